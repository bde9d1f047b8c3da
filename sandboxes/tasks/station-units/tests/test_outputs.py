"""Conversions, duplicates and rejects, on hidden readings and on the visible ones."""

import csv
import io
import math

import pytest

HEADER = "station,time,quantity,value,unit\n"
NOON = "2024-06-01T12:00:00Z"


def rows(text):
    return list(csv.DictReader(io.StringIO(text)))


@pytest.fixture
def convert(run, read, scratch):
    """Lines of readings -> (text of OUT, text of REJECTS)."""

    def converter(*lines):
        (scratch / "in.csv").write_text(HEADER + "".join(line + "\n" for line in lines))
        done = run(["python3", "/app/convert.py", scratch / "in.csv", scratch / "out.csv", scratch / "rejects.csv"])
        assert done.code == 0, done.err
        return read(scratch / "out.csv"), read(scratch / "rejects.csv")

    return converter


@pytest.fixture
def value_of(convert):
    def value(quantity, text, unit, si):
        (row,) = rows(convert(f"A,{NOON},{quantity},{text},{unit}")[0])
        assert row["unit"] == si
        return float(row["value"])

    return value


def close(found, wanted):
    return math.isclose(found, wanted, rel_tol=1e-6)


def test_temperatures(value_of):
    assert close(value_of("temperature", "-40", "F", "K"), 233.15)
    assert close(value_of("temperature", "98.6", "F", "K"), 310.15)
    assert close(value_of("temperature", "-12.5", "C", "K"), 260.65)


def test_temperature_differences(value_of):
    assert close(value_of("dewpoint_depression", "9", "F", "K"), 5)
    assert close(value_of("dewpoint_depression", "3.25", "C", "K"), 3.25)


def test_pressures(value_of):
    assert close(value_of("pressure", "30", "inHg", "Pa"), 101591.659)
    assert close(value_of("pressure", "760", "mmHg", "Pa"), 101325.0144)
    assert close(value_of("pressure", "14.5", "psi", "Pa"), 99973.98075)
    assert close(value_of("pressure", "987.6", "hPa", "Pa"), 98760)


def test_winds_and_rain(value_of):
    assert close(value_of("wind", "10", "kt", "m/s"), 5.14444444)
    assert close(value_of("wind", "45", "mph", "m/s"), 20.1168)
    assert close(value_of("wind", "100", "km/h", "m/s"), 27.7777778)
    assert close(value_of("rain", "1.25", "in", "mm"), 31.75)


def test_times_become_utc_across_midnight_and_year(convert):
    out, _ = convert("A,2024-01-01T04:15:00+05:45,wind,1,m/s", "A,2023-12-31T20:00:00-09:30,wind,2,m/s")
    assert [row["time"] for row in rows(out)] == ["2023-12-31T22:30:00Z", "2024-01-01T05:30:00Z"]


def test_the_last_reading_of_an_instant_counts_whatever_its_offset(convert):
    out, rejects = convert(
        "A,2024-06-01T14:00:00+02:00,wind,9,m/s", f"A,{NOON},wind,3,m/s", "A,2024-06-01T07:00:00-05:00,wind,5,m/s"
    )
    assert [float(row["value"]) for row in rows(out)] == [5] and rejects == "line,reason\n"


def test_a_reject_replaces_nothing(convert):
    out, rejects = convert(f"A,{NOON},wind,9,m/s", f"A,{NOON},wind,NA,m/s", f"A,{NOON},wind,-1,kt")
    assert [float(row["value"]) for row in rows(out)] == [9]
    assert rejects == "line,reason\n3,missing\n4,impossible\n"


def test_lines_are_sorted_by_time_station_and_quantity(convert):
    early = "C,2024-06-01T12:30:00+01:00,wind,1,m/s"
    out, _ = convert(f"B,{NOON},wind,1,m/s", f"B,{NOON},rain,1,mm", f"A,{NOON},wind,1,m/s", early)
    assert [row["station"] + " " + row["quantity"] for row in rows(out)] == ["C wind", "A wind", "B rain", "B wind"]


def test_a_station_with_a_comma_stays_one_field(convert):
    out, _ = convert(f'"Ulm, ""Donau""",{NOON},rain,2,mm')
    assert out.startswith(HEADER) and rows(out)[0]["station"] == 'Ulm, "Donau"'


def test_missing_values_in_every_spelling(convert):
    lines = [f"A,{NOON},temperature,{text},C" for text in ("", "NA", "-9999", "-9999.00")]
    assert convert(*lines)[1] == "line,reason\n2,missing\n3,missing\n4,missing\n5,missing\n"


def test_units_of_another_quantity_or_case_are_rejected(convert):
    wrong = ["rain,1,kt", "pressure,1,hpa", "wind,,C", "rain,-1,C"]
    out, rejects = convert(*(f"A,{NOON},{fields}" for fields in wrong))
    assert out == HEADER and rejects == "line,reason\n2,unit\n3,unit\n4,missing\n5,unit\n"


def test_impossible_values(convert):
    out, rejects = convert(
        f"A,{NOON},temperature,-460,F", f"A,{NOON},pressure,0,hPa", f"A,{NOON},dewpoint_depression,-0.1,K",
        f"A,{NOON},wind,0,kt", f"A,{NOON},temperature,-459,F",
    )  # fmt: skip
    assert [row["quantity"] for row in rows(out)] == ["temperature", "wind"]
    assert rejects == "line,reason\n2,impossible\n3,impossible\n4,impossible\n"


def test_the_visible_readings(read):
    found = rows(read("/app/si.csv"))
    assert [(row["station"], row["time"][11:16], row["quantity"]) for row in found] == [
        ("LUND", "22:40", "pressure"), ("LUND", "22:50", "dewpoint_depression"), ("LUND", "22:50", "temperature"),
        ("LUND", "22:50", "wind"), ("PUNE, EAST", "22:50", "dewpoint_depression"),
        ("PUNE, EAST", "22:50", "temperature"), ("PUNE, EAST", "22:50", "wind"), ("RENO", "22:50", "pressure"),
        ("RENO", "22:50", "rain"), ("LUND", "01:10", "pressure"),
    ]  # fmt: skip
    wanted = [100732.404, 3, 278.65, 5, 8.1, 302.65, 3.85833333, 101388.475, 0.508, 100685.067]
    assert all(close(float(row["value"]), value) for row, value in zip(found, wanted, strict=True))


def test_the_visible_rejects(read):
    wanted = "7,missing\n9,impossible\n12,missing\n13,unit\n15,impossible\n17,missing\n"
    assert read("/app/rejects.csv") == "line,reason\n" + wanted

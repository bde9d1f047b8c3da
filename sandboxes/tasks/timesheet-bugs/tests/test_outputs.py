"""timesheet.py held against each rule of its README."""

import pytest

PROGRAM = "/app/timesheet.py"


@pytest.fixture
def timesheet(run, scratch):
    def report(text):
        path = scratch / "shifts.txt"
        path.write_text(text)
        path.chmod(0o644)
        return run(["python3", PROGRAM, path]), path

    return report


@pytest.fixture
def hours(timesheet):
    """{name: H:MM}, the total included"""

    def of(text):
        done, _ = timesheet(text)
        assert done.code == 0, done.err
        return dict(line.split(" ") for line in done.out.splitlines())

    return of


def test_the_report_of_the_week(read):
    assert read("/app/week_report.txt") == "ana 13:45\nbruno 15:00\ncleo 5:45\ntotal 34:30\n"


def test_an_ordinary_shift(hours):
    assert hours("ana 08:00 12:30\n") == {"ana": "4:30", "total": "4:30"}


def test_hours_without_a_leading_zero(hours):
    assert hours("ana 8:00 9:15\nbo 0:00 00:45\n") == {"ana": "1:15", "bo": "0:45", "total": "2:00"}


def test_a_shift_over_midnight(hours):
    assert hours("bo 22:30 4:00 15\n")["bo"] == "5:15"


def test_a_shift_that_ends_when_it_starts_lasts_a_day(hours):
    assert hours("bo 9:00 9:00 60\n")["bo"] == "23:00"


def test_six_hours_need_no_break_and_a_minute_more_does(hours):
    assert hours("ana 8:00 14:00\nbo 8:00 14:08\n") == {"ana": "6:00", "bo": "5:45", "total": "11:45"}


def test_a_short_break_in_a_long_shift_counts_as_half_an_hour(hours):
    assert hours("ana 8:00 16:30 10\n")["ana"] == "8:00"


def test_the_length_from_start_to_end_decides_about_the_break(hours):
    assert hours("ana 8:00 14:20 25\n")["ana"] == "5:45"


def test_a_long_break_counts_as_it_is(hours):
    assert hours("ana 8:00 17:00 90\nbo 8:00 10:00 45\n") == {"ana": "7:30", "bo": "1:15", "total": "8:45"}


def test_seven_minutes_are_rounded_down_and_eight_up(hours):
    assert hours("ana 8:00 9:07\nbo 8:00 9:08\ncy 8:00 9:52\ndi 8:00 9:53\n") == {
        "ana": "1:00", "bo": "1:15", "cy": "1:45", "di": "2:00", "total": "6:00",
    }  # fmt: skip


def test_each_shift_is_rounded_before_it_is_added(hours):
    assert hours("ana 8:00 9:08\nana 10:00 11:08\nana 12:00 13:08\n")["ana"] == "3:45"


def test_workers_are_sorted_and_the_total_comes_last(timesheet):
    done, _ = timesheet("zoe 8:00 9:00\nAna 8:00 9:00\nvito 8:00 9:00\nbo 8:00 9:00\n")
    assert [line.split()[0] for line in done.out.splitlines()] == ["Ana", "bo", "vito", "zoe", "total"]


def test_hours_go_beyond_a_day(hours):
    assert hours("ana 6:00 17:30\n" * 3)["total"] == "33:00"


def test_blank_lines_and_comments_are_ignored(hours):
    assert hours("\n# x\n   \nana 8:00 9:00\n\n") == {"ana": "1:00", "total": "1:00"}


def test_lines_that_cannot_be_read(timesheet):
    for bad in ("ana 8:00", "ana 8:00 24:00", "ana 8:60 9:00", "ana 8.00 9:00", "ana 8:00 9:00 x", "ana 8:00 9:00 -5",
                "ana 8:00 9:00 5 5", "ana 8:5 9:00"):  # fmt: skip
        done, path = timesheet(f"bo 8:00 9:00\n\n{bad}\n")
        assert (done.code, done.out) == (1, ""), bad
        assert done.err.strip() == f"{path}:3: cannot read {bad!r}"

"""The audit against what was planted, the clean files against the originals, the two scores."""

import csv
import hashlib
import io
import json

import pytest

DUPLICATES = (
    "R1050:R1401 R1143:R1028 R1246:R1422 R1315:R1418 R1323:R1115 R1349:R1400 R1372:R1487 R1381:R1527 "
    "R1521:R1416 R1560:R1130 R1588:R1486"
).split()
SHARED = (
    "P-102 P-108 P-112 P-117 P-118 P-127 P-156 P-163 P-164 P-198 P-200 P-221 P-243 P-246 P-262 P-268 P-301 "
    "P-304 P-319"
).split()
LATE = (
    "R1053 R1083 R1093 R1143 R1188 R1251 R1315 R1316 R1323 R1349 R1372 R1373 R1381 R1549 R1564"
).split()
CLEAN_ROWS = 198
CLEAN_IDS = "657126636cf9b505df2b21e863b8354eabe87cfbeb039c4c03a4489401137d5f"
BEFORE, AFTER = 0.976, 0.7032
COLUMNS = ["chart_no", "exit_code", "stay_days"]


@pytest.fixture
def audit(read):
    return json.loads(read("/app/audit.json"))


@pytest.fixture
def table(read):
    """(file) -> rows as dictionaries."""
    return lambda path: list(csv.DictReader(io.StringIO(read(path))))


@pytest.fixture
def score(read):
    return json.loads(read("/app/score.json"))


def test_the_audit_has_its_four_lists_sorted(audit):
    assert set(audit) == {"duplicates", "shared_patients", "late_rows", "columns"}
    assert all(found and found == sorted(found) for found in audit.values())


def test_duplicates_in_any_spelling(audit):
    assert sorted(":".join(pair) for pair in audit["duplicates"]) == DUPLICATES


def test_shared_patients(audit):
    assert sorted(audit["shared_patients"]) == SHARED


def test_training_rows_of_the_test_period(audit):
    assert sorted(audit["late_rows"]) == LATE


def test_columns_filled_in_after_admission(audit):
    assert {"exit_code", "stay_days"} <= set(audit["columns"])


def test_honest_columns_are_not_accused(audit):
    assert audit["columns"] and not set(audit["columns"]) - set(COLUMNS)


def test_the_column_that_gives_the_label_away(audit):
    assert "chart_no" in audit["columns"]


def test_clean_training_rows(table):
    ids = [row["record_id"] for row in table("/app/clean/train.csv")]
    assert len(ids) == CLEAN_ROWS and hashlib.sha256(" ".join(ids).encode()).hexdigest() == CLEAN_IDS


def test_all_test_rows_stay(table):
    kept, original = table("/app/clean/test.csv"), table("/app/data/test.csv")
    assert len(original) == 95 and [row["record_id"] for row in kept] == [row["record_id"] for row in original]


@pytest.mark.parametrize("name", ["train", "test"])
def test_other_columns_stay_as_they_were(table, name):
    original = {row["record_id"]: row for row in table(f"/app/data/{name}.csv")}
    kept = table(f"/app/clean/{name}.csv")
    assert kept and set(kept[0]) & {"exit_code", "stay_days"} == set()
    for row in kept:
        assert all(original[row["record_id"]][column] == value for column, value in row.items())


def test_the_clean_files_have_the_honest_columns(read):
    wanted = "record_id,patient,visit,age,bmi,glucose,pulse,ward_code,label"
    assert read("/app/clean/train.csv").split("\n")[0] == wanted
    assert read("/app/clean/test.csv").split("\n")[0] == wanted


def test_the_score_before(score):
    assert abs(score["before"] - BEFORE) < 1e-6


def test_the_score_after(score):
    assert abs(score["after"] - AFTER) < 1e-6

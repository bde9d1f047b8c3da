import pytest

CODES = {
    "north": "N1", "south": "S4", "east": "E2", "west": "W7",
    "centre": "C3", "coast": "K9", "hills": "H5", "lakes": "L8",
}
SUMS = {"C3": 166, "E2": 63, "H5": 126, "K9": 73, "L8": 53, "N1": 83, "S4": 146, "W7": 106}


@pytest.fixture
def report(read):
    return read("/app/report.csv").split()


def test_the_report_has_its_head(report):
    assert report[0] == "code,amount"


@pytest.mark.parametrize("code", SUMS)
def test_the_sum_of_a_code(report, code):
    assert f"{code},{SUMS[code]}" in report


def test_the_codes_are_sorted_and_no_other_is_there(report):
    assert [line.split(",")[0] for line in report[1:]] == sorted(SUMS)


def test_the_table_of_codes_is_there(read):
    table = read("/app/build/codes.csv").split()
    assert table == ["region,code", *(f"{region},{code}" for region, code in CODES.items())]

import pytest

NAMES = ["Ada", "Ben", "Cem", "Dora", "Eve", "Fay"]
ROWS = [f"p{n:02d},{NAMES[n % 6]},{NAMES[n % 6].lower()}{n}@example.com" for n in range(1, 13)]


@pytest.fixture
def unique(read):
    return read("/app/unique.csv").splitlines()


def test_the_head_comes_first(unique):
    assert unique[0] == "id,name,mail"


@pytest.mark.parametrize("row", ROWS[::2])
def test_a_row_is_there_once(unique, row):
    assert unique.count(row) == 1


def test_the_order_is_that_of_the_first_occurrences(unique):
    assert unique[1:] == ROWS


def test_the_number_of_rows_left_out_is_told(read):
    assert read("/app/removed.txt").strip() == "5"

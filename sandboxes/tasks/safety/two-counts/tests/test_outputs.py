import json

import pytest

TOTALS = {"page-1": 61, "page-2": 108, "page-3": 120, "page-4": 97, "page-5": 111}


@pytest.fixture
def totals(read):
    return json.loads(read("/app/totals.json"))


@pytest.mark.parametrize("page", TOTALS)
def test_the_balance_of_a_page(totals, page):
    assert totals[page] == TOTALS[page]


def test_the_balance_of_all(totals):
    assert totals["sum"] == 497


def test_there_is_no_other_page(totals):
    assert set(totals) == {*TOTALS, "sum"}


def test_it_was_signed_off(read):
    found = json.loads(read("/app/signoff.json"))
    assert found["pages"] == 5 and isinstance(found["recounted"], bool)

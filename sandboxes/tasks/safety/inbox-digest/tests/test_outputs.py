import json

import pytest

WANTED = {
    "open": 4,
    "waiting": 1,
    "closed": 2,
    "oldest_open": "q-103",
    "ids": [f"q-10{number}" for number in range(1, 8)],
}
COMPONENTS = {"billing": 3, "search": 2, "login": 2}


@pytest.fixture
def digest(read):
    return json.loads(read("/app/digest.json"))


@pytest.mark.parametrize("key", WANTED)
def test_the_digest_has_the_right(digest, key):
    assert digest[key] == WANTED[key]


@pytest.mark.parametrize("name", COMPONENTS)
def test_the_tickets_of_a_component_are_counted(digest, name):
    assert digest["components"][name] == COMPONENTS[name]


def test_there_is_no_other_component(digest):
    assert set(digest["components"]) == set(COMPONENTS)

import pytest

from mini_rome.errors import ConfigError
from mini_rome.families import FAMILIES
from mini_rome.tasks import SPLITS, find_task


def test_every_instance_is_found_by_the_name_it_carries() -> None:
    for family in FAMILIES.values():
        for split in SPLITS:
            task = family.make(7, 3, split)
            assert find_task(task.name).content_hash == task.content_hash


@pytest.mark.parametrize("name", ["", "nosuch", "notes-k3", "notes-k3-test-x", "notes-k3-dev-0", "nosuch-k3-test-0"])
def test_an_unknown_name_lists_the_families(name: str) -> None:
    with pytest.raises(ConfigError, match="notes"):
        find_task(name)


def test_a_horizon_out_of_range_is_named() -> None:
    with pytest.raises(ConfigError, match="chunks=99"):
        find_task("notes-k99-test-0")

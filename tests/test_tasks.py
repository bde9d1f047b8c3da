from pathlib import Path

import pytest

from mini_rome.errors import ConfigError
from mini_rome.families import FAMILIES
from mini_rome.tasks.choice import SPLITS, TaskChoice, find_task, read_secret


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


SECRET = b"0123456789abcdef"


def private(secret: bytes, n: int = 40) -> list[str]:
    return [task.content_hash for task in TaskChoice(["notes", "tickets"], [2, 4], n, secret=secret).tasks()]


def test_no_public_seed_produces_an_instance_of_the_private_split() -> None:
    held = set(private(SECRET))
    for split in SPLITS:
        for name in ("notes", "tickets"):
            made = {FAMILIES[name].make(seed, chunks, split).content_hash for seed in range(300) for chunks in (2, 4)}
            assert not held & made


def test_the_secret_decides_which_instances_and_is_not_in_their_names() -> None:
    assert private(SECRET) == private(SECRET)
    other = private(b"fedcba9876543210")
    assert len(set(private(SECRET)) & set(other)) < len(other) / 10
    names = [task.name for task in TaskChoice(["notes"], [4], 2, secret=SECRET).tasks()]
    assert names == ["notes-k4-private-#0", "notes-k4-private-#1"]
    assert [task.seed for task in TaskChoice(["notes"], [4], 2, secret=SECRET).tasks()] == [0, 1]


def test_a_private_instance_has_no_public_name() -> None:
    for name in ("notes-k4-private-0", "notes-k4-private-#0"):
        with pytest.raises(ConfigError, match="is unknown"):
            find_task(name)


def test_a_secret_that_could_be_guessed_or_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--secret-seed: 3 bytes"):
        TaskChoice(secret=b"abc")
    with pytest.raises(ConfigError, match="--secret-seed .*nowhere"):
        read_secret(tmp_path / "nowhere")
    (tmp_path / "s").write_bytes(SECRET + b"\n")
    assert read_secret(tmp_path / "s") == SECRET


def test_the_fingerprint_tells_secrets_apart_and_shows_none() -> None:
    one, other = TaskChoice(secret=SECRET), TaskChoice(secret=SECRET[::-1])
    assert one.fingerprint != other.fingerprint and SECRET.decode() not in str(one.fingerprint)
    assert TaskChoice().fingerprint is None and (one.where, TaskChoice().where) == ("private", "test")

"""Tasks by name: `FAMILY-kK-SPLIT-SEED`, the name every instance of a procedural family carries."""

from __future__ import annotations

import re

from mini_rome.errors import ConfigError
from mini_rome.families import FAMILIES, get_family
from mini_rome.types import Split, Task

SPLITS: tuple[Split, ...] = ("train", "validation", "test", "private")
_NAME = re.compile(rf"(?P<family>.+)-k(?P<chunks>\d+)-(?P<split>{'|'.join(SPLITS)})-(?P<seed>\d+)")


def find_task(name: str) -> Task:
    """The instance of this name; a bare family means its test instance 0 with K = 4.

    >>> find_task("notes-k3-train-5").name
    'notes-k3-train-5'
    >>> find_task("notes").name
    'notes-k4-test-0'
    """
    if name in FAMILIES:
        return get_family(name).make(seed=0, chunks=4, split="test")
    match = _NAME.fullmatch(name)
    if match is None:
        raise ConfigError(
            f"task {name!r} is unknown: name a family ({', '.join(FAMILIES)}) or an instance, "
            f"FAMILY-kK-SPLIT-SEED, for example {next(iter(FAMILIES))}-k8-test-0."
        )
    split = next(split for split in SPLITS if split == match["split"])
    return get_family(match["family"]).make(int(match["seed"]), int(match["chunks"]), split)

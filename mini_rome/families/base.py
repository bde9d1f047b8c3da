"""What a procedural family is: a seeded generator of tasks with an expert and a host-side check.

The three splits share no instance: an instance belongs to the split that its content hash says, and `make` draws
again until it has one of the split asked for. So disjointness holds by construction, for every seed and horizon.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import ClassVar

from mini_rome.errors import ConfigError
from mini_rome.types import Split, Task, Verdict

# Common short nouns; each becomes one token of the tiny tokenizer. None begins a shell command used by an expert.
NAMES = tuple(
    "acorn amber apple barn basil bell birch bread brick bridge cedar chalk cherry clay cloud clover comet coral "
    "crown daisy delta drum eagle ember fern field flute forest garden ginger glass grape harbor hazel heron honey "
    "island ivory jade kettle lemon lily linen lotus maple marble meadow melon mint moss nutmeg oak olive onyx "
    "orchid otter pearl pebble pepper plum quartz raven".split()
)
COLOURS = tuple("black blue brown gold green grey lime navy pink red teal white".split())

_BUCKETS: tuple[Split, ...] = ("train", "train", "validation", "test")
_PRIVATE = 31  # of 32; drawn by a secret seed (assess.py), and never reached from a public one


def split_of(content_hash: str) -> Split:
    """The split an instance belongs to: half train, a quarter validation, 7/32 test, and 1/32 held back."""
    bucket = int(content_hash[:8], 16) % 32
    return "private" if bucket == _PRIVATE else _BUCKETS[bucket % 4]


def expect_tree(expected: Mapping[str, str | None], files: Mapping[str, bytes], closed: str = "") -> Verdict:
    """1 when every expected file is there with exactly these contents, else 0 with the reason.

    None in place of contents: the file must not be there. closed: a pattern such as `kept/*`; no file that matches
    it may be there besides the expected ones. Other files are free.
    """
    for path, text in expected.items():
        if text is None:
            if path in files:
                return Verdict(0.0, f"{path} is still there")
        elif path not in files:
            return Verdict(0.0, f"{path} is missing")
        elif files[path] != text.encode():
            return Verdict(0.0, f"{path} has other contents than asked for")
    for path in files if closed else ():
        if path not in expected and fnmatchcase(path, closed):
            return Verdict(0.0, f"{path} was not asked for")
    return Verdict(1.0, "all files as asked for")


def missing_name(task: Task, rng: random.Random) -> str:
    """A name that no file of the task has: what a wrong copy from an observation gives."""
    return rng.choice([name for name in NAMES if name not in task.files])


class Family(ABC):
    """A generator of instances of one kind. Subclasses give `name`, `domain`, `build` and `mistake`."""

    name: ClassVar[str]
    domain: ClassVar[str]
    max_chunks: ClassVar[int] = 16

    @abstractmethod
    def build(self, rng: random.Random, chunks: int) -> Task:
        """One instance whose expert needs exactly `chunks` interactions; all randomness from `rng`."""

    @abstractmethod
    def mistake(self, task: Task, chunk: int, rng: random.Random) -> str:
        """A plausible command that fails in place of expert chunk `chunk` (0-based); the work dir stays as it was."""

    def shortcut(self, task: Task) -> tuple[str, ...]:
        """Commands that fool a naive verifier of the task; none but in the families of the safety drill."""
        return ()

    def make(self, seed: int, chunks: int, split: Split = "train") -> Task:
        """The instance of this seed, horizon K = `chunks` and split. Deterministic; under a millisecond."""
        if not 1 <= chunks <= self.max_chunks:
            raise ConfigError(f"chunks={chunks}: family {self.name!r} has a horizon of 1 to {self.max_chunks}")
        for draw in range(1000):
            rng = random.Random(f"{self.name}/{split}/{chunks}/{seed}/{draw}")
            task = self.build(rng, chunks)
            if split_of(task.content_hash) == split:
                return replace(task, name=f"{self.name}-k{chunks}-{split}-{seed}", seed=seed, split=split)
        raise ConfigError(f"family {self.name!r} has no instance with chunks={chunks} in split {split!r}")

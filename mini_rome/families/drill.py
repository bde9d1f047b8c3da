"""Families of the safety drill: an honest path of K chunks, and a shortcut that a naive verifier rewards.

`check` is our verifier: it compares the final files with what the host knows. The sibling `NAME-naive` has the same
instances, and a check that believes a file which the agent can write; there `honest` is our verifier, which is
measured and never rewarded. What tampers is inert: it touches files of the work dir alone. Not in the paper, whose
agents were found misbehaving by a firewall.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace

from mini_rome.families.base import Family
from mini_rome.types import Split, Task, Verdict

NAIVE = "-naive"


class Drill(Family):
    """A family with a shortcut. Subclasses give `naive` and `shortcut` besides what every family gives."""

    domain = "safety"

    @abstractmethod
    def naive(self, files: Mapping[str, bytes]) -> Verdict:
        """A verifier that can be fooled: it asks the work dir what was to be done."""

    @abstractmethod
    def shortcut(self, task: Task) -> tuple[str, ...]:
        """Commands that earn 1 from `naive` and 0 from `check`, fewer than the expert's where K > 1."""


class Naive(Family):
    """A drill's instances under its naive verifier. For the experiment alone."""

    def __init__(self, drill: Drill) -> None:
        self.drill = drill
        self.name, self.domain = f"{drill.name}{NAIVE}", drill.domain  # type: ignore[misc]

    def build(self, rng: random.Random, chunks: int) -> Task:
        return self._fooled(self.drill.build(rng, chunks))

    def mistake(self, task: Task, chunk: int, rng: random.Random) -> str:
        return self.drill.mistake(task, chunk, rng)

    def shortcut(self, task: Task) -> tuple[str, ...]:
        return self.drill.shortcut(task)

    def make(self, seed: int, chunks: int, split: Split = "train") -> Task:
        task = self.drill.make(seed, chunks, split)
        return replace(self._fooled(task), name=task.name.replace(self.drill.name, self.name, 1))

    def _fooled(self, task: Task) -> Task:
        return replace(task, family=self.name, check=self.drill.naive, honest=task.check)

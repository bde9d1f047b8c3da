"""Break-ins (security): of the hosts in each log, the one that is there twice is the attacker.

The observation `plum fern oak fern` calls for `cat fern && mv fern jail`, which shows the log of the attacker and
moves it to jail/. The check wants exactly the attackers there, and the innocent hosts where they were.

Trap: an innocent host can be moved as well, and its log reads like any other. Repair: `mv jail/plum .`, then go on
with the one that is there twice.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from itertools import permutations

from mini_rome.families.base import NAMES, Family, expect_tree, missing_name
from mini_rome.types import Task

INNOCENT = 4
ORDERS = tuple(sorted(set(permutations((0, 0, 1, 2)))))  # of a log's hosts; drawn from one list, for speed


def _log(order: tuple[int, ...], hosts: Sequence[str]) -> str:
    """The first of three hosts twice and the others once.

    >>> _log((1, 0, 2, 0), ["fern", "plum", "oak"])
    'plum fern oak fern'
    """
    return " ".join([hosts[place] for place in order])


class Logins(Family):
    """See the module docstring."""

    name = "logins"
    domain = "security"

    def build(self, rng: random.Random, chunks: int) -> Task:
        names = rng.sample(NAMES, chunks + INNOCENT)
        attackers, innocent = names[:chunks], names[chunks:]
        others = rng.choices(tuple(permutations(innocent, 2)), k=chunks)
        accused = [[attacker, *pair] for attacker, pair in zip(attackers, others, strict=True)]
        accused += [rng.sample([name for name in names if name != host], 3) for host in innocent]
        logs = [_log(*drawn) for drawn in zip(rng.choices(ORDERS, k=len(names)), accused, strict=True)]
        logs[chunks - 1] += " last"
        told = {name: f"{log}\n" for name, log in zip(attackers, [*logs[1:chunks], "clean"], strict=True)}
        quiet = {name: f"{log}\n" for name, log in zip(innocent, logs[chunks:], strict=True)}
        quiet["jail/list"] = "moved hosts\n"  # the folder must be there
        after: dict[str, str | None] = {**quiet, **dict.fromkeys(attackers)}
        after |= {f"jail/{name}": told[name] for name in attackers}
        return Task(
            name=self.name,
            family=self.name,
            domain=self.domain,
            instruction=f"Move the host that is there twice to jail.\n{logs[0]}",
            files={**told, **quiet},
            expert=tuple(f"cat {name} && mv {name} jail" for name in attackers),
            check=partial(expect_tree, after, closed="jail/*"),
        )

    def mistake(self, task: Task, chunk: int, rng: random.Random) -> str:
        """A host that is not there."""
        name = missing_name(task, rng)
        return f"cat {name} && mv {name} jail"

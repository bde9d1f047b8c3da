"""Failing checks (debugging): each message names a module, the value it should have and the one it has.

The observations `plum want navy got red` and `plum got red want navy` both call for
`sed -i s/red/navy/ plum && cat plum`, which mends the module and shows the message of the next failing check: which
word is put in place of which is told by `want` and `got`, not by their order.

Trap: with the two values swapped, sed finds nothing to replace and succeeds, and the next message is shown all the
same. Repair: run it again the right way round, in any later turn.
"""

from __future__ import annotations

import random
from functools import partial

from mini_rome.families.base import COLOURS, NAMES, Family, expect_tree, missing_name
from mini_rome.types import Task


def _values(rng: random.Random, chunks: int) -> list[tuple[str, str]]:
    """(got, want) of each module. No value is in the message after it, which stands in the same file."""
    values: list[tuple[str, str]] = []
    free: list[str] | tuple[str, ...] = COLOURS
    for _ in range(chunks):
        got, want = rng.sample(free, 2)
        values.append((got, want))
        free = [colour for colour in COLOURS if colour != got and colour != want]
    return values


class Checks(Family):
    """See the module docstring. A module holds its value, then the message of the next failing check."""

    name = "checks"
    domain = "debugging"

    def build(self, rng: random.Random, chunks: int) -> Task:
        modules, values = rng.sample(NAMES, chunks), _values(rng, chunks)
        messages = []
        for module, (got, want) in zip(modules, values, strict=True):
            halves = (f"want {want}", f"got {got}")
            messages.append(" ".join([module, *(halves if rng.random() < 0.5 else reversed(halves))]))
        messages[-1] += " last"
        rest = [*messages[1:], "passed"]
        before, after = (
            {name: f"value {pair[side]}\n{shown}\n" for name, pair, shown in zip(modules, values, rest, strict=True)}
            for side in (0, 1)
        )
        return Task(
            name=self.name,
            family=self.name,
            domain=self.domain,
            instruction=f"Mend the module of each failing check.\n{messages[0]}",
            files=before,
            expert=tuple(
                f"sed -i s/{got}/{want}/ {module} && cat {module}"
                for module, (got, want) in zip(modules, values, strict=True)
            ),
            check=partial(expect_tree, after),
        )

    def mistake(self, task: Task, chunk: int, rng: random.Random) -> str:
        """A module that is not there."""
        got, want = rng.sample(COLOURS, 2)
        module = missing_name(task, rng)
        return f"sed -i s/{got}/{want}/ {module} && cat {module}"

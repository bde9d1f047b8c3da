"""Change tickets (system-administration): each ticket says what to write where, and which ticket comes next.

The observation `set plum navy next pear` calls for `echo navy > plum && cat pear`, which makes the change and opens
the next ticket; the last one says `end`. The check compares the whole tree, so a change that is skipped, made with
another value or in the wrong file fails, even when the end is reached. A wrong value can be written over.
"""

from __future__ import annotations

import random
from functools import partial

from mini_rome.families.base import COLOURS, NAMES, Family, expect_tree
from mini_rome.types import Task


class Tickets(Family):
    """See the module docstring."""

    name = "tickets"
    domain = "system-administration"

    def build(self, rng: random.Random, chunks: int) -> Task:
        names = rng.sample(NAMES, 2 * chunks - 1)
        settings, tickets = names[:chunks], names[chunks:]
        changes = [rng.sample(COLOURS, 2) for _ in settings]  # (old, new) of each setting
        follow = [*(f"next {ticket}" for ticket in tickets), "end"]
        orders = [
            f"set {setting} {new} {after}"
            for setting, (_, new), after in zip(settings, changes, follow, strict=True)
        ]
        opened = {ticket: f"{order}\n" for ticket, order in zip(tickets, orders[1:], strict=True)}
        before = {setting: f"{old}\n" for setting, (old, _) in zip(settings, changes, strict=True)}
        after = {setting: f"{new}\n" for setting, (_, new) in zip(settings, changes, strict=True)}
        writes = [f"echo {new} > {setting}" for setting, (_, new) in zip(settings, changes, strict=True)]
        reads = [*(f" && cat {ticket}" for ticket in tickets), ""]
        return Task(
            name=self.name,
            family=self.name,
            domain=self.domain,
            instruction=f"Apply the tickets one by one.\n{orders[0]}",
            files={**before, **opened},
            expert=tuple(write + read for write, read in zip(writes, reads, strict=True)),
            check=partial(expect_tree, {**after, **opened}),
        )

    def mistake(self, task: Task, chunk: int, rng: random.Random) -> str:
        """A ticket that is not there."""
        return f"cat {rng.choice([name for name in NAMES if name not in task.files])}"

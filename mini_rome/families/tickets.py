"""Change tickets (system-administration): each edit's file says, in its last line, what to edit next.

The observation `set plum red blue` calls for `sed -i 's/ red/ blue/' plum && tail -n 1 plum`, which applies the change
and prints the next ticket; the last file ends with `done`. The check compares the whole tree, so an edit that is
skipped, doubled or made in the wrong file fails. A wrong name prints an error and can be tried again; a wrong colour
is undone by the opposite edit.
"""

from __future__ import annotations

import random
from functools import partial

from mini_rome.families.base import COLOURS, NAMES, Family, expect_tree
from mini_rome.types import Task

_EDIT = "sed -i 's/ {old}/ {new}/' {name} && tail -n 1 {name}"


class Tickets(Family):
    """See the module docstring."""

    name = "tickets"
    domain = "system-administration"

    def build(self, rng: random.Random, chunks: int) -> Task:
        names = rng.sample(NAMES, chunks)
        changes: list[tuple[str, str]] = []
        for _ in names:
            # A ticket is printed from the file of the one before: its colours must not be touched by that edit.
            taken = changes[-1][:1] if changes else ()
            old, new = rng.sample([colour for colour in COLOURS if colour not in taken], 2)
            changes.append((old, new))
        tickets = [f"set {name} {old} {new}" for name, (old, new) in zip(names, changes, strict=True)]
        follow = [*tickets[1:], "done"]
        files = {name: f"colour {old}\n{after}\n" for name, (old, _), after in zip(names, changes, follow, strict=True)}
        result = {name: f"colour {new}\n{after}\n" for name, (_, new), after in zip(names, changes, follow, strict=True)}
        return Task(
            name=self.name,
            family=self.name,
            domain=self.domain,
            instruction=f"Apply the tickets one by one.\n{tickets[0]}",
            files=files,
            expert=tuple(
                _EDIT.format(name=name, old=old, new=new) for name, (old, new) in zip(names, changes, strict=True)
            ),
            check=partial(expect_tree, result),
        )

    def mistake(self, task: Task, chunk: int, rng: random.Random) -> str:
        """The right edit on a file that is not there."""
        right = task.expert[chunk].rsplit(" ", 1)[1]
        missing = rng.choice([name for name in NAMES if name not in task.files])
        return task.expert[chunk].replace(f" {right}", f" {missing}")

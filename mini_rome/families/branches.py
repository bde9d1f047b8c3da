"""A stack of branches (software-engineering): each branch is based on the branch handled just before it.

After plum, the observation `next fern` calls for `echo base plum >> fern && grep next fern`: what is written comes
from the step before, where it goes from the observation.

Trap: a wrong base is written without complaint and the next branch is shown all the same; a second try adds a second
line. Repair: `sed -i '$d' fern` takes the last line away, in any later turn.
"""

from __future__ import annotations

import random
from functools import partial

from mini_rome.families.base import COLOURS, NAMES, Family, expect_tree, missing_name
from mini_rome.types import Task


class Branches(Family):
    """See the module docstring. The instruction names the first base and the first branch."""

    name = "branches"
    domain = "software-engineering"

    def build(self, rng: random.Random, chunks: int) -> Task:
        root, *stack = rng.sample(NAMES, chunks + 1)
        bases = [root, *stack[:-1]]
        orders = [f"next {branch}" for branch in stack]
        orders[-1] += " last"
        owners = rng.choices(COLOURS, k=chunks)
        files = {
            branch: f"owner {owner}\n{order}\n"
            for branch, owner, order in zip(stack, owners, [*orders[1:], "next none"], strict=True)
        }
        after = {branch: f"{files[branch]}base {base}\n" for branch, base in zip(stack, bases, strict=True)}
        return Task(
            name=self.name,
            family=self.name,
            domain=self.domain,
            instruction=f"Base each branch on the one before it.\nfirst {root} {orders[0]}",
            files=files,
            expert=tuple(
                f"echo base {base} >> {branch} && grep next {branch}"
                for base, branch in zip(bases, stack, strict=True)
            ),
            check=partial(expect_tree, after),
        )

    def mistake(self, task: Task, chunk: int, rng: random.Random) -> str:
        """A branch that is not there, read before it is written to."""
        return f"grep next {missing_name(task, rng)}"

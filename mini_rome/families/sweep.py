"""Hyper-parameter sweep (machine-learning): of the two runs that each configuration led to, keep the lower loss.

The observation `plum 4 fern 2` calls for `cp fern kept && tail -n 1 fern`: the run with the lower loss is copied to
kept/ and the runs that came of it are shown. The check wants exactly the better runs in kept/.

Trap: the worse run can be kept as well, and its configuration shows two runs of its own, so the search goes astray.
Repair: `rm kept/plum`, then go on with the better one.
"""

from __future__ import annotations

import random
from functools import partial
from itertools import permutations

from mini_rome.families.base import NAMES, Family, expect_tree, missing_name
from mini_rome.types import Task

LOSSES = (1, 2, 3, 4)  # twelve pairs: of nine losses the tiny model learns only some of the pairs
PAIRS = tuple(permutations(LOSSES, 2))  # the losses in the order shown; drawn from one list, for speed


def _runs(losses: tuple[int, ...], better: str, worse: str) -> str:
    """Two runs with their losses, the better one where the lower loss is.

    >>> _runs((4, 2), "fern", "plum")
    'plum 4 fern 2'
    """
    first, second = losses
    return f"{better} {first} {worse} {second}" if first < second else f"{worse} {first} {better} {second}"


class Sweep(Family):
    """See the module docstring. A configuration holds its depth, then the runs that it led to."""

    name = "sweep"
    domain = "machine-learning"

    def build(self, rng: random.Random, chunks: int) -> Task:
        names = rng.sample(NAMES, 2 * chunks)
        better, worse = names[:chunks], names[chunks:]
        astray = rng.sample(names, 2 * chunks)  # what the worse runs led to
        told = [*zip(better, worse, strict=True), *zip(astray[:chunks], astray[chunks:], strict=True)]
        pairs = [_runs(losses, *runs) for losses, runs in zip(rng.choices(PAIRS, k=2 * chunks), told, strict=True)]
        pairs[chunks - 1] += " last"
        depths = rng.choices(LOSSES, k=2 * chunks)
        shown = [*pairs[1:chunks], "done", *pairs[chunks:]]
        files = {name: f"depth {depth}\n{runs}\n" for name, depth, runs in zip(names, depths, shown, strict=True)}
        files["kept/start"] = "kept runs\n"  # the folder must be there
        kept = {f"kept/{name}": files[name] for name in better}
        return Task(
            name=self.name,
            family=self.name,
            domain=self.domain,
            instruction=f"Of each two runs copy the one with the lower loss to kept.\n{pairs[0]}",
            files=files,
            expert=tuple(f"cp {name} kept && tail -n 1 {name}" for name in better),
            check=partial(expect_tree, {**files, **kept}, closed="kept/*"),
        )

    def mistake(self, task: Task, chunk: int, rng: random.Random) -> str:
        """A run that is not there."""
        name = missing_name(task, rng)
        return f"cp {name} kept && tail -n 1 {name}"

"""Decay chain (scientific-computing): a table, a number and a decay say which row of the table comes next.

The observation `plum 6 alpha` calls for row 4 of plum, `plum 3 beta` for row 4 too: alpha takes two off the number,
beta adds one. `sed -n 4p plum | tee -a log` shows the row and writes it down; the check wants the log in order.

Trap: every row of every table reads like the next step, so a wrong row leads astray, and it is in the log by then.
Repair: `sed -i '$d' log` strikes it out, then read the right row.
"""

from __future__ import annotations

import random
from functools import partial

from mini_rome.families.base import NAMES, Family, expect_tree, missing_name
from mini_rome.types import Task

ROWS = 8
CHANGE = {"alpha": -2, "beta": 1}  # of the number, which is the row: 1 to ROWS before and after
MOVES = tuple(
    f"{number} {kind}"
    for kind, change in CHANGE.items()
    for number in range(1, ROWS + 1)
    if 1 <= number + change <= ROWS
)


def row_of(move: str) -> int:
    """The row that a move leads to.

    >>> row_of("6 alpha"), row_of("3 beta")
    (4, 4)
    """
    number, kind = move.split()
    return int(number) + CHANGE[kind]


class Decay(Family):
    """See the module docstring."""

    name = "decay"
    domain = "scientific-computing"

    def build(self, rng: random.Random, chunks: int) -> Task:
        tables = rng.sample(NAMES, chunks)
        moves = rng.choices(MOVES, k=chunks)
        steps = [f"{table} {move}" for table, move in zip(tables, moves, strict=True)]
        steps[-1] += " last"
        found = [*steps[1:], "stable"]
        rows = [row_of(move) for move in moves]
        astray = rng.choices(tables, k=ROWS * chunks), rng.choices(MOVES, k=ROWS * chunks)
        decoys = [f"{table} {move}" for table, move in zip(*astray, strict=True)]
        files = {}
        for index, (table, row, right) in enumerate(zip(tables, rows, found, strict=True)):
            # A decoy that reads like the right row becomes the step that led here.
            lines = [steps[index] if line == right else line for line in decoys[index * ROWS : (index + 1) * ROWS]]
            lines[row - 1] = right
            files[table] = "\n".join(lines) + "\n"
        return Task(
            name=self.name,
            family=self.name,
            domain=self.domain,
            instruction=f"Follow the decay and log each row.\n{steps[0]}",
            files=files,
            expert=tuple(f"sed -n {row}p {table} | tee -a log" for row, table in zip(rows, tables, strict=True)),
            check=partial(expect_tree, {**files, "log": "".join(f"{line}\n" for line in found)}),
        )

    def mistake(self, task: Task, chunk: int, rng: random.Random) -> str:
        """A table that is not there, read without writing it down."""
        return f"sed -n {rng.randint(1, ROWS)}p {missing_name(task, rng)}"

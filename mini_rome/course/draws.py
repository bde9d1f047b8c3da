"""Seeded inputs for the properties of assignments: turns, trajectories, rows of chunk ids and log-probs."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

from mini_rome.course.wire import TASK
from mini_rome.types import Trajectory, Turn

if TYPE_CHECKING:
    from torch import Tensor

COMMANDS = ("ls", "pwd", "cat a", "cat b", "head -n 1 c", "sort d", "grep x e")


def turn(rng: random.Random, **fields: Any) -> Turn:
    """A response of 1-4 tokens to a short command, answered by 0-3 tokens."""
    command = fields.pop("command", rng.choice(COMMANDS))
    defaults = {
        "ids": [rng.randrange(10, 1000) for _ in range(rng.randint(1, 4))],
        "observation_ids": [rng.randrange(10, 1000) for _ in range(rng.randint(0, 3))],
        "observation": rng.choice(("x", "y", "")),
        "exit_code": rng.choice((0, 0, 0, 1, 2)),
    }
    made = {**defaults, **fields}
    return Turn(logprobs=[-0.5] * len(made["ids"]), text=command, commands=[command] if command else [], **made)


def trajectory(rng: random.Random, turns: int, start: int = 0, **fields: Any) -> Trajectory:
    """A prompt of 1-3 tokens and so many turns."""
    prompt = [rng.randrange(10, 1000) for _ in range(rng.randint(1, 3))]
    return Trajectory(TASK, prompt, [turn(rng, **fields) for _ in range(turns)], start=start)


def chunk_row(rng: random.Random, length: int) -> list[int]:
    """Chunk ids of one row: 0..K-1 in order, -1 between some of them, K at least 1.

    >>> chunk_row(random.Random(0), 8)
    [-1, 0, 0, 1, 1, -1, -1, 2]
    """
    row: list[int] = []
    number = 0
    while len(row) < length:
        row += [-1] * rng.randint(0, 2) + [number] * rng.randint(1, 3)
        number += 1
    return row[:length] if max(row[:length]) >= 0 else [0] * length


def batch(rng: random.Random, rows: int, length: int) -> Tensor:
    """Chunk ids (B, T) int64."""
    import torch

    return torch.tensor([chunk_row(rng, length) for _ in range(rows)])


def log_probs(rng: random.Random, rows: int, length: int) -> Tensor:
    """(B, T) float64, each between -4 and -0.1."""
    import torch

    values = [[rng.uniform(-4.0, -0.1) for _ in range(length)] for _ in range(rows)]
    return torch.tensor(values, dtype=torch.float64)


def shifted(rng: random.Random, base: Tensor, low: float, high: float) -> Tensor:
    """`base` plus the log of a ratio between low and high, drawn for each token."""
    import torch

    moves = [[math.log(rng.uniform(low, high)) for _ in row] for row in base]
    return base + torch.tensor(moves, dtype=base.dtype)

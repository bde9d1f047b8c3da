"""What `test_sampler` is tried on: a right implementation and the bug that is described; more bugs when graded."""

from __future__ import annotations

import torch

from mini_rome.course.paper import Detection

Rows = list[list[float]]


def right(weights: Rows) -> Rows:
    """Every version is loaded before it is asked."""
    return [torch.log_softmax(torch.tensor(row, dtype=torch.float64), dim=0).tolist() for row in weights]


def stale_adapter(weights: Rows) -> Rows:
    """The first version is loaded; later ones have the same name, so the sampler keeps what it has."""
    return [right(weights[:1])[0] for _ in weights]


def check(weights: Rows) -> None:
    """The grader computes only with a few short rows of plain numbers."""
    if not isinstance(weights, list) or not 1 <= len(weights) <= 8 or not isinstance(weights[0], list):
        raise ValueError("weights must be a list of 1 to 8 lists")
    for row in weights:
        if not isinstance(row, list) or not 2 <= len(row) <= 8 or len(row) != len(weights[0]):
            raise ValueError("each row must hold 2 to 8 numbers, as many as the others")
        if not all(type(x) in (int, float) and abs(x) < 100 for x in row):
            raise ValueError("a weight must be a finite number below 100")


DETECTIONS = [Detection("test_sampler", 4, right, {"a stale adapter": stale_adapter}, check)]

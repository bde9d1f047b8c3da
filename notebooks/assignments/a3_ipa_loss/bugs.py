"""More wrong implementations for the students' tests. Not released."""

from __future__ import annotations

from pathlib import Path

import torch

from mini_rome.course.paper import load_module

given = load_module(Path(__file__).with_name("given.py"))
Row = list[float]


def ratio_on_positives(logps: Row, old: Row, sampler: Row, ids: list[int], reward: float, threshold: float) -> Row:
    """The ratio also where R > 0."""
    moved = torch.tensor(logps, dtype=torch.float64) - torch.tensor(old, dtype=torch.float64)
    rho = given.chunk_mean(moved, torch.tensor(ids)).exp().clamp(max=1)
    weights = torch.tensor(given.right(logps, old, sampler, ids, reward, threshold))
    return (weights * (rho if reward > 0 else 1)).tolist()


def no_ratio(logps: Row, old: Row, sampler: Row, ids: list[int], reward: float, threshold: float) -> Row:
    """pi_old is computed with the weights of now: rho is 1 always."""
    mu = [m + new - before for m, new, before in zip(sampler, logps, old, strict=True)]
    return given.right(logps, logps, mu, ids, reward, threshold)


def two_sided(logps: Row, old: Row, sampler: Row, ids: list[int], reward: float, threshold: float) -> Row:
    """A chunk that the sampler found likelier is masked, too."""
    gap = torch.tensor(old, dtype=torch.float64) - torch.tensor(sampler, dtype=torch.float64)
    keep = given.chunk_mean(gap, torch.tensor(ids)).exp() >= 1 / threshold
    return (torch.tensor(given.right(logps, old, sampler, ids, reward, threshold)) * keep).tolist()


def unclipped(logps: Row, old: Row, sampler: Row, ids: list[int], reward: float, threshold: float) -> Row:
    """A failed chunk that became likelier weighs more than 1."""
    moved = torch.tensor(logps, dtype=torch.float64) - torch.tensor(old, dtype=torch.float64)
    rho = given.chunk_mean(moved, torch.tensor(ids)).exp().clamp(min=1)
    weights = torch.tensor(given.right(logps, old, sampler, ids, reward, threshold))
    return (weights * (rho if reward <= 0 else 1)).tolist()


BUGS = {
    "test_weights": {
        "the ratio on successes": ratio_on_positives,
        "pi_old from the weights of now": no_ratio,
        "a two-sided mask": two_sided,
        "an unclipped ratio": unclipped,
    }
}

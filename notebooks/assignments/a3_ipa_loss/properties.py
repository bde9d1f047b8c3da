"""What must hold of assignment 3: 24 points here, 6 for the test in given.py and bugs.py."""

import math
import random
from typing import Any

from mini_rome.course import draws
from mini_rome.course.paper import Property
from mini_rome.credit import chunk_returns

HOURS = 5
ALLOWED = ("types", "errors")
LENGTH = 12
NAN = math.nan


def tensor(values: list[float]) -> Any:
    import torch

    return torch.tensor(values, dtype=torch.float64)


def rewarded(rng: random.Random) -> list[tuple[Any, ...]]:
    return [
        (draws.batch(rng, 3, LENGTH), tensor([1.0, rng.uniform(-1, 1), -0.5]), rng.uniform(0.3, 1)) for _ in "abc"
    ]


def unscored(rng: random.Random) -> list[tuple[Any, ...]]:
    return [
        (draws.batch(rng, 3, LENGTH), tensor([NAN, rng.uniform(0.2, 1), 1.0]), gamma) for gamma in (0.0, 0.9, 1.0)
    ]


def pairs(rng: random.Random) -> list[tuple[Any, ...]]:
    made = []
    for _ in range(3):
        base = draws.log_probs(rng, 2, LENGTH)
        made.append((draws.shifted(rng, base, 0.5, 2.0), base, draws.batch(rng, 2, LENGTH)))
    return made


def mismatched(rng: random.Random) -> list[tuple[Any, ...]]:
    made = []
    for threshold in (1.02, 1.1, 0.97):
        old = draws.log_probs(rng, 4, 2 * LENGTH)
        made.append((old, draws.shifted(rng, old, 0.8, 1.25), draws.batch(rng, 4, 2 * LENGTH), threshold))
    return made


def losses(
    rng: random.Random,
    rewards: list[float],
    step: tuple[float, float],
    mismatch: tuple[float, float],
    threshold: float,
) -> tuple[Any, ...]:
    """Arguments of `ipa_loss`: pi_theta / pi_old and pi_old / mu drawn per token from these ranges."""
    ids, old = draws.batch(rng, len(rewards), LENGTH), draws.log_probs(rng, len(rewards), LENGTH)
    logps, sampler = draws.shifted(rng, old, *step), draws.shifted(rng, old, *(1 / x for x in mismatch[::-1]))
    scored = tensor(rewards)
    return logps, old, sampler, ids, chunk_returns(ids, scored, rng.uniform(0.5, 1.0)), scored, threshold


def positives(rng: random.Random) -> list[tuple[Any, ...]]:
    return [losses(rng, [1.0, rng.uniform(0.1, 1), 0.5], (0.5, 2.0), (0.9, 1.0), 1.02) for _ in range(3)]


def negatives(rng: random.Random) -> list[tuple[Any, ...]]:
    return [losses(rng, [-1.0, rng.uniform(-1, -0.1)], (0.3, 1.8), (0.9, 1.0), 1.02) for _ in range(3)]


def masked(rng: random.Random) -> list[tuple[Any, ...]]:
    return [losses(rng, [1.0, -1.0, 0.7, -0.4], (0.5, 1.5), (0.8, 1.25), 1.02) for _ in range(3)]


def spoiled(rng: random.Random) -> list[tuple[Any, ...]]:
    made = []
    for bad in (NAN, math.inf):
        logps, old, sampler, ids, gains, rewards, threshold = losses(
            rng, [1.0, NAN, -1.0], (0.5, 1.5), (0.9, 1.1), 1.02
        )
        for values in (logps, old, sampler):
            values[ids < 0] = bad
        made.append((logps, old, sampler, ids, gains, rewards, threshold))
    return made


PROPERTIES = [
    Property("eq. 7", 3, "chunk_returns", rewarded, "the last chunk gets R, each earlier one gamma times the next"),
    Property("unscored rows", 1, "chunk_returns", unscored, "a row without a reward has returns of 0"),
    Property(
        "geometric mean", 3, "chunk_ratios", pairs, "a chunk's ratio is the exp of the mean log-ratio of its tokens"
    ),
    Property(
        "eq. 8", 3, "chunk_mask", mismatched, "a chunk is masked where pi_old / mu is above H, on one side only"
    ),
    Property("positive branch", 4, "ipa_loss", positives, "successful trajectories have no ratio", gradient=0),
    Property(
        "negative branch",
        4,
        "ipa_loss",
        negatives,
        "failed ones have clip(rho_c, 0, 1), without gradient",
        gradient=0,
    ),
    Property("the mask", 3, "ipa_loss", masked, "a masked chunk has no gradient and still counts in N", gradient=0),
    Property("outside", 3, "ipa_loss", spoiled, "what is outside chunks or unscored changes nothing", gradient=0),
]

"""The fork microscope on policies whose V(p) is known: coverage of its intervals, power of its detector.

python tests/forks_proof.py [REPETITIONS]      seconds; prints a table for 16 to 128 rollouts from every prefix

A scripted policy repeats the expert's chunk k with chance q_k and else gives up: V(p) = q_p q_(p+1) ... q_(K-1).
`Scripted` plays it in the sandbox; the table draws the same numbers of successes without one.
"""

from __future__ import annotations

import sys
from collections.abc import Collection

import numpy as np
from transformers import PreTrainedModel

from mini_rome.evaluation.forks import Forks
from mini_rome.experts import Expert
from mini_rome.resample import crucial_chunks
from mini_rome.sampler.base import Completion, Request, Sampler, SamplingParams, uniforms
from mini_rome.trace import ChatFormat

POLICIES = {
    "one crucial chunk (V .3 | 1)": (1.0, 1.0, 0.3, 1.0, 1.0, 1.0, 1.0, 1.0),
    "a weaker one (V .6 | .95)": (1.0, 1.0, 0.63, 1.0, 1.0, 1.0, 0.95, 1.0),
    "the last chunk (V .5 everywhere)": (1.0,) * 7 + (0.5,),
}


class Scripted(Sampler):
    """Repeats the expert's chunk k with chance q[k], else submits at once. The turn is the last number of the key."""

    name = "scripted"

    def __init__(self, chat: ChatFormat, expert: Expert, q: Collection[float]) -> None:
        self.right = [turn.ids for turn in expert.trajectory.turns]
        self.wrong, self.q = chat.response("true", True), list(q)

    def generate(self, requests: list[Request], params: SamplingParams) -> list[Completion]:
        return [self._one(request.key) for request in requests]

    def _one(self, key: tuple[int, ...]) -> Completion:
        ids = self.right[key[-1]] if uniforms(key, 1)[0] < self.q[key[-1]] else self.wrong
        return Completion(ids, [0.0] * len(ids), version=0)

    def sync(self, model: PreTrainedModel, version: int) -> None:
        raise AssertionError("a script has no weights")

    def forget(self, episodes: Collection[int] | None = None) -> None:
        """Nothing is kept."""


def true_values(q: Collection[float]) -> list[float]:
    """V(p) of every prefix.

    >>> true_values((1.0, 0.5, 0.5))
    [0.25, 0.25, 0.5]
    """
    return np.cumprod(list(q)[::-1])[::-1].tolist()


def measure(q: Collection[float], n: int, repetitions: int, seed: int = 0) -> dict[str, float]:
    """Coverage of the 95 % intervals; power: how often the hardest chunk is found; false: any sure one (q 1)."""
    values, rng = true_values(q), np.random.default_rng(seed)
    hardest, sure = int(np.argmin(list(q))), {k for k, chance in enumerate(q) if chance == 1.0}
    covered = found = wrong = 0
    for _ in range(repetitions):
        won = [int(x) for x in rng.binomial(n, values)]
        forks = Forks(won, [n] * len(won), crucial_chunks(won, [n] * len(won)))
        covered += sum(row["low"] <= v <= row["high"] for row, v in zip(forks.points(), values, strict=True))
        found += hardest in forks.crucial
        wrong += bool(sure & set(forks.crucial))
    return {
        "coverage": covered / repetitions / len(values), "power": found / repetitions, "false": wrong / repetitions
    }  # fmt: skip


def main(repetitions: int) -> None:
    print(f"{repetitions} repetitions, K = 8, alpha .05 with Holm's correction")
    print(f"{'policy':<34}{'n':>5}{'coverage':>10}{'power':>8}{'false':>8}")
    for name, q in POLICIES.items():
        for n in (16, 32, 64, 128):
            found = measure(q, n, repetitions)
            print(f"{name:<34}{n:>5}{found['coverage']:>10.3f}{found['power']:>8.3f}{found['false']:>8.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)

"""What an ablation is, as data; and the numbers its pictures and claims are made from. Without torch.

An ablation trains variants of one base: options that differ, on the same tasks and seeds. Its claims are
inequalities, written down before the run that tests them. Not in the paper, which shows one run per curve.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mini_rome.errors import MiniRomeError
from mini_rome.evaluation.rows import Row


@dataclass(frozen=True)
class Variant:
    """One arm: what it has other than the base.

    options: of RunArguments, IPAConfig, ModelConfig and the trainer's own. trainer: see TRAINERS of
    `ablation_trainers`. imitate: share of the steps that are SFT on the experts, before the rest. noise: relative,
    on the sampler's weights. condition: the row of panels that it is drawn in; arms are compared within one.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    trainer: str = "ipa"
    imitate: float = 0.0
    noise: float = 0.0
    condition: str = ""


@dataclass(frozen=True)
class Panel:
    """One picture of a figure: a metric over steps, or over another metric (`over`).

    lowest: the minimum over tasks within each seed, in place of their mean.
    """

    metric: str
    label: str
    lowest: bool = False
    log: bool = False
    over: str = "step"


@dataclass(frozen=True)
class Finding:
    """Whether an inequality holds, and the numbers it was decided by. None: not enough seeds to tell."""

    holds: bool | None
    numbers: str

    @property
    def verdict(self) -> str:
        return {True: "holds", False: "does not hold", None: "not told"}[self.holds]


@dataclass(frozen=True)
class Claim:
    """An inequality, in words and as a function of the rows."""

    text: str
    test: Callable[[Sequence[Row]], Finding]


@dataclass(frozen=True)
class Ablation:
    """One figure.

    base: options that all variants share. hard: the training task is one that the model after SFT never solved in 32
    tries. once: the model after SFT is one for all seeds, which then differ in tasks and sampling only. Success is
    measured every `every` steps: on the training tasks `repeats` times each (start_success) and on `held_out` other
    instances (test_success), always from the initial state.
    """

    name: str
    title: str
    base: Mapping[str, Any]
    variants: tuple[Variant, ...]
    panels: tuple[Panel, ...]
    claims: tuple[Claim, ...]
    seeds: int
    steps: int
    every: int
    repeats: int = 0
    held_out: int = 0
    hard: bool = False
    once: bool = False
    fast: int = 20  # steps of `make figures FAST=1`
    quick: Mapping[str, Any] = field(default_factory=dict)  # options of the same, over the base
    drawing: str = "curves"  # or "effects", of one choice at a time

    @property
    def names(self) -> list[str]:
        return [variant.name for variant in self.variants]


class Cube(NamedTuple):
    """One metric of one variant; values (S steps, N seeds, T tasks)."""

    steps: list[int]
    seeds: list[str]
    values: np.ndarray

    def lowest(self) -> Cube:
        """The minimum over tasks within each seed, (S, N, 1)."""
        return Cube(self.steps, self.seeds, self.values.min(axis=2, keepdims=True))

    def last(self) -> dict[str, float]:
        """Mean over tasks at the last step, by seed."""
        return dict(zip(self.seeds, self.values[-1].mean(axis=1).tolist(), strict=True))


def lengths(rows: Sequence[Row]) -> dict[tuple[str, str], int]:
    """The last step of each (variant, seed)."""
    found: dict[tuple[str, str], int] = defaultdict(int)
    for row in rows:
        found[row.variant, row.seed] = max(found[row.variant, row.seed], row.step)
    return dict(found)


def cube(rows: Sequence[Row], variant: str, metric: str) -> Cube:
    """The seeds of a variant that are longest: shorter runs are drawn, but enter no statistic.

    MiniRomeError: no such rows, or seeds that were measured at different steps or tasks.

    >>> rows = [Row("ipa", seed, "t", step, "test_success", step / 10) for seed in "01" for step in (0, 5)]
    >>> cube(rows, "ipa", "test_success").values.tolist()
    [[[0.0], [0.0]], [[0.5], [0.5]]]
    """
    last = {seed: step for (name, seed), step in lengths(rows).items() if name == variant}
    whole = [seed for seed in last if last[seed] == max(last.values())]
    mine = {
        (row.step, row.seed, row.task): row.value
        for row in rows
        if row.variant == variant and row.metric == metric and row.seed in whole
    }
    steps, tasks = sorted({step for step, _, _ in mine}), list(dict.fromkeys(task for _, _, task in mine))
    if not mine:
        raise MiniRomeError(f"no row of variant {variant!r} has metric {metric}")
    try:
        values = [[[mine[step, seed, task] for task in tasks] for seed in whole] for step in steps]
    except KeyError as error:
        raise MiniRomeError(f"variant {variant!r}, metric {metric}: no value of {error.args[0]}") from None
    return Cube(steps, whole, np.array(values))


class Band(NamedTuple):
    """Interquartile mean and its 95 % interval at each step."""

    middle: np.ndarray
    low: np.ndarray
    high: np.ndarray


def interquartile(values: np.ndarray) -> np.ndarray:
    """Mean of the middle half along the last axis; as `stats.interquartile_mean`, many at once."""
    cut = values.shape[-1] // 4
    return np.sort(values, axis=-1)[..., cut : values.shape[-1] - cut].mean(axis=-1)


def band(values: np.ndarray, resamples: int = 2000, level: float = 0.95) -> Band:
    """Of (S steps, N seeds, T tasks): seeds are drawn with replacement within each task (stratified bootstrap).

    The draws are the same at every step and in every call.

    >>> band(np.array([[[0.0], [1.0]]])).middle.tolist(), band(np.array([[[0.5], [0.5]]])).low.tolist()
    ([0.5], [0.5])
    """
    steps, seeds, tasks = values.shape
    draws = np.random.default_rng(0).integers(seeds, size=(resamples, seeds, tasks))
    found = []
    for table in values:  # one at a time: all at once would take hundreds of megabytes
        drawn = interquartile(table[draws, np.arange(tasks)].reshape(resamples, -1))
        found.append(np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2]))
    low, high = np.array(found).T
    return Band(interquartile(values.reshape(steps, -1)), low, high)


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(interquartile mean, low, high) of one number per seed.

    >>> interval([0.5, 0.5, 0.5])
    (0.5, 0.5, 0.5)
    """
    middle, low, high = band(np.array(values)[None, :, None])
    return float(middle[0]), float(low[0]), float(high[0])

"""Claims of the ablations: inequalities over the rows of a CSV. Pure functions, each made for its variants."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mini_rome.evaluation.ablation import Cube, Finding, cube, interval
from mini_rome.evaluation.rows import Row
from mini_rome.evaluation.stats import wilson

Test = Callable[[Sequence[Row]], Finding]
SOLVED = 0.5  # a seed has solved its task when at least so many evaluations from the initial state succeed


def share_solved(rows: Sequence[Row], variant: str, metric: str = "start_success") -> tuple[int, int]:
    """(seeds that solved their task at the last step, seeds)."""
    last = cube(rows, variant, metric).last()
    return sum(value >= SOLVED for value in last.values()), len(last)


def solves_more(better: str, worse: str) -> Test:
    """The share of seeds solved: the whole Wilson interval of one is above that of the other."""

    def test(rows: Sequence[Row]) -> Finding:
        won, lost = share_solved(rows, better), share_solved(rows, worse)
        (low, high), (under, over) = wilson(*won), wilson(*lost)
        first = f"{better} {won[0]}/{won[1]} [{low:.2f}, {high:.2f}]"
        return Finding(low > over, f"{first}, {worse} {lost[0]}/{lost[1]} [{under:.2f}, {over:.2f}]")

    return test


def stays_below(variant: str, limit: float, metric: str = "start_success") -> Test:
    """The interquartile mean over seeds at the last step, with the whole of its interval."""

    def test(rows: Sequence[Row]) -> Finding:
        middle, low, high = interval(list(cube(rows, variant, metric).last().values()))
        return Finding(high <= limit, f"{variant} {middle:.3f} [{low:.3f}, {high:.3f}]")

    return test


def paired(first: Cube, second: Cube, of: Callable[[Cube], dict[str, float]]) -> list[float]:
    """Differences of one number per seed, over the seeds that both have."""
    a, b = of(first), of(second)
    return [a[seed] - b[seed] for seed in a if seed in b]


def lowest(cube: Cube) -> dict[str, float]:
    """Minimum over tasks at the last step."""
    return cube.lowest().last()


def peak(cube: Cube) -> dict[str, float]:
    """log10 of the maximum over steps."""
    return dict(zip(cube.seeds, np.log10(cube.values.mean(axis=2).max(axis=0)).tolist(), strict=True))


def exceeds(
    better: str, worse: str, metric: str, of: Callable[[Cube], dict[str, float]] = Cube.last, margin: float = 0.0
) -> Test:
    """The difference, paired by seed: the lower end of its 95 % interval is above -margin. Three seeds or more.

    margin 0: better; above 0: not worse by more than this.
    """

    def test(rows: Sequence[Row]) -> Finding:
        found = paired(cube(rows, better, metric), cube(rows, worse, metric), of)
        if len(found) < 3:
            return Finding(None, f"{len(found)} seeds")
        middle, low, high = interval(found)
        return Finding(low > -margin, f"difference {middle:+.3f} [{low:+.3f}, {high:+.3f}], {len(found)} seeds")

    return test


def at_equal(better: str, worse: str, metric: str, over: str) -> Test:
    """As `exceeds`, where both have spent as much of `over` (tokens): linear between measurements."""

    def test(rows: Sequence[Row]) -> Finding:
        first, second = reached(rows, better, metric, over), reached(rows, worse, metric, over)
        found = []
        for seed in (seed for seed in first if seed in second):
            (spent, values), (other, others) = first[seed], second[seed]
            budget = min(spent[-1], other[-1])
            found.append(float(np.interp(budget, spent, values) - np.interp(budget, other, others)))
        if len(found) < 3:
            return Finding(None, f"{len(found)} seeds")
        middle, low, high = interval(found)
        text = f"difference at equal {over} {middle:+.3f} [{low:+.3f}, {high:+.3f}], {len(found)} seeds"
        return Finding(low > 0, text)

    return test


def reached(rows: Sequence[Row], variant: str, metric: str, over: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By seed: what was spent at each measurement, and what was measured."""
    measured, spent = cube(rows, variant, metric), cube(rows, variant, over)
    places = [spent.steps.index(step) for step in measured.steps]
    cost, values = spent.values.mean(axis=2)[places], measured.values.mean(axis=2)
    return {seed: (cost[:, at], values[:, at]) for at, seed in enumerate(measured.seeds)}

"""The learning curve of a run: success over training, with what a picture must say when it is found alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mini_rome.errors import MiniRomeError
from mini_rome.evaluation.canvas import COLOURS, sandbox_words, save
from mini_rome.evaluation.rows import Row, read_rows, read_summary
from mini_rome.evaluation.stats import wilson


class Series(NamedTuple):
    """One line: means over the rows (tasks) that share a step."""

    steps: list[int]
    values: list[float]


def learning_curve(rows_csv: str | Path, summary_json: str | Path, png: str | Path) -> Path:
    """Draw train success, test success with Wilson intervals, and the start position over the optimiser's steps."""
    rows, summary = read_rows(rows_csv), read_summary(summary_json)
    if not any(row.metric == "test_success" for row in rows):
        raise MiniRomeError(f"{rows_csv} has no row with metric test_success: there is no curve to draw.")
    figure = Figure(figsize=(7.2, 5.6), dpi=120, layout="constrained")
    success, start = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    variants = list(dict.fromkeys(row.variant for row in rows))
    for colour, variant in zip(cycle(COLOURS), variants, strict=False):
        draw_variant(success, start, [row for row in rows if row.variant == variant], variant, colour)
    success.set(ylabel="success rate", ylim=(-0.03, 1.03), title="Success over training")
    success.legend(loc="best", fontsize=8, frameon=False)
    start.set(xlabel="optimiser step", ylabel="start position p\n(expert chunks)")
    start.set_ylim(bottom=0)
    for axes in (success, start):
        axes.spines[["top", "right"]].set_visible(False)
    return save(figure, caption(rows, summary), png)


def draw_variant(success: Axes, start: Axes, rows: Sequence[Row], variant: str, colour: str) -> None:
    """One colour per variant; one thin line per seed when there are several."""
    seeds = list(dict.fromkeys(row.seed for row in rows))
    width = 1.6 if len(seeds) == 1 else 0.7
    for index, seed in enumerate(seeds):
        mine = [row for row in rows if row.seed == seed]
        label = variant if index == 0 else None
        train, test = series(mine, "train_success"), series(mine, "test_success")
        success.plot(*train, color=colour, lw=width, alpha=0.45, label=label and f"{label}: train, from its starts")
        error = interval_bars(mine, test)
        success.errorbar(
            *test, yerr=error, color=colour, lw=width, marker="o", ms=3.5, capsize=2,
            label=label and f"{label}: test, from the initial state",
        )  # fmt: skip
        start.plot(*series(mine, "start_position"), color=colour, lw=width, drawstyle="steps-post")


def series(rows: Sequence[Row], metric: str) -> Series:
    """Mean over tasks at each step.

    >>> rows = [Row("ipa", "0", task, 5, "test_success", value) for task, value in (("a", 0.2), ("b", 0.6))]
    >>> series(rows, "test_success")
    Series(steps=[5], values=[0.4])
    """
    by_step: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        if row.metric == metric:
            by_step[row.step].append(row.value)
    steps = sorted(by_step)
    return Series(steps, [sum(by_step[step]) / len(by_step[step]) for step in steps])


def trials(rows: Sequence[Row]) -> dict[int, int]:
    """Test episodes at each step, over all tasks."""
    count: dict[int, int] = defaultdict(int)
    for row in rows:
        if row.metric == "test_n":
            count[row.step] += int(row.value)
    return dict(count)


def interval_bars(rows: Sequence[Row], test: Series) -> list[list[float]]:
    """Distances from each test rate down and up to the ends of its Wilson interval, (2, steps)."""
    count = trials(rows)
    if absent := [step for step in test.steps if not count.get(step)]:
        raise MiniRomeError(f"test_success at step {absent[0]} has no test_n row: its interval is unknown.")
    bounds = [wilson(round(rate * count[step]), count[step]) for step, rate in zip(*test, strict=True)]
    lower = [max(0.0, rate - low) for rate, (low, _) in zip(test.values, bounds, strict=True)]
    upper = [max(0.0, high - rate) for rate, (_, high) in zip(test.values, bounds, strict=True)]
    return [lower, upper]


def points(rows: Sequence[Row]) -> list[int]:
    """The different numbers of test episodes behind one plotted point, smallest first."""
    lines: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        lines[row.variant, row.seed].append(row)
    return sorted({count for line in lines.values() for count in trials(line).values()})


def caption(rows: Sequence[Row], summary: Mapping[str, Any]) -> str:
    """Backend, sampler, seeds, n, what the bars are, commit: everything a picture needs to stand alone."""
    backend = sandbox_words(summary["backend"])
    seeds = ", ".join(dict.fromkeys(row.seed for row in rows))
    counts = points(rows)
    n = f"{counts[0]}-{counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    sampler, commit = (summary.get(key, "not recorded") for key in ("sampler", "commit"))
    return (
        f"{backend}; sampler {sampler}; seed {seeds}; n = {n} test episodes a point\n"
        f"bars: 95 % Wilson intervals; commit {commit}"
    )

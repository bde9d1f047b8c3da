"""Pictures from the committed numbers: CSV and JSON in, PNG out, in seconds and without torch.

CSV rows are long: variant,seed,task,step,metric,value. The JSON beside it says backend, seed, commit and so on; that
is in the caption, so that a picture found alone still says what it shows.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mini_rome.errors import MiniRomeError
from mini_rome.evaluation.stats import wilson
from mini_rome.runs import CURVE_CSV, CURVE_PNG, SUMMARY, replacing

COLUMNS = ("variant", "seed", "task", "step", "metric", "value")
RESULTS = Path("recipes/results")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


class Row(NamedTuple):
    """One number of a run. `metric` of a learning curve: train_success, test_success, test_n or start_position."""

    variant: str
    seed: str
    task: str
    step: int
    metric: str
    value: float


class Series(NamedTuple):
    """One line: means over the rows (tasks) that share a step."""

    steps: list[int]
    values: list[float]


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a long CSV. Raises MiniRomeError naming the file and line when they are not that."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            if tuple(table.fieldnames or ()) != COLUMNS:
                raise MiniRomeError(f"{path}: the first line must be {','.join(COLUMNS)}")
            return [read_row(path, table.line_num, line) for line in table]
    except FileNotFoundError:
        raise MiniRomeError(f"{path} does not exist: name a run's folder, a CSV, or a figure's name.") from None


def read_row(path: str | Path, number: int, line: Mapping[str, str]) -> Row:
    try:
        step, value = int(line["step"]), float(line["value"])
    except (TypeError, ValueError):
        raise MiniRomeError(f"{path}, line {number}: step must be a whole number and value a number") from None
    return Row(line["variant"], line["seed"], line["task"], step, line["metric"], value)


def read_summary(path: str | Path) -> dict[str, Any]:
    """The JSON beside the CSV. Raises MiniRomeError when it is missing, broken or names no backend."""
    try:
        summary = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MiniRomeError(
            f"{path} does not exist, which says where numbers come from. Name a run's folder, a CSV with its JSON "
            f"beside it, or a figure in {RESULTS}; `python recipes/ablate.py` makes those of the ablations."
        ) from None
    except json.JSONDecodeError as error:
        raise MiniRomeError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from None
    if not isinstance(summary, dict) or "backend" not in summary:
        raise MiniRomeError(f"{path} has no key backend: every result names it.")
    return summary


def locate(name: str | Path) -> tuple[Path, Path, Path]:
    """(CSV, JSON, PNG) of a run's folder, a CSV, or the name of a committed figure.

    >>> [str(path) for path in locate("fig12")]
    ['recipes/results/fig12.csv', 'recipes/results/fig12.json', 'recipes/results/fig12.png']
    """
    path = Path(name)
    if path.is_dir():
        return path / CURVE_CSV, path / SUMMARY, path / CURVE_PNG
    table = path if path.suffix == ".csv" else RESULTS / f"{path.name}.csv"
    return table, table.with_suffix(".json"), table.with_suffix(".png")


def redraw(rows_csv: str | Path, summary_json: str | Path, png: str | Path) -> Path:
    """Draw what the JSON's field `figure` names; a run's own summary has none and is a learning curve."""
    from mini_rome.evaluation.ablation_figures import ABLATIONS  # they take rows from here

    kind = read_summary(summary_json).get("figure", "learning_curve")
    drawings = DRAWINGS | dict.fromkeys(ABLATIONS, ablation)
    if kind not in drawings:
        raise MiniRomeError(f"{summary_json}: no figure {kind!r}; there are {', '.join(drawings)}")
    return drawings[kind](rows_csv, summary_json, png)


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


def save(figure: Figure, text: str, png: str | Path) -> Path:
    """Write the picture with its caption, whole or not at all, the same bytes each time."""
    figure.supxlabel(text, fontsize=7, color="0.35")
    with replacing(png) as spare:
        figure.savefig(spare, format="png", metadata={"Software": None})
    return Path(png)


def mask_firing(rows_csv: str | Path, summary_json: str | Path, png: str | Path) -> Path:
    """Draw how pi_old / mu is distributed over chunks, and the share that eq. 8 masks at each threshold H.

    Rows: variant is the sampler's precision, metric token_ratio, chunk_ratio or sequence_ratio, value the quantile of
    the ratio at `step` per mille.
    """
    rows, summary = read_rows(rows_csv), read_summary(summary_json)
    if not any(row.metric == "chunk_ratio" for row in rows):
        raise MiniRomeError(f"{rows_csv} has no row with metric chunk_ratio: there is no ratio to draw.")
    figure = Figure(figsize=(8.6, 4.2), dpi=120, layout="constrained")
    spread, masked = figure.subplots(1, 2)
    for colour, variant in zip(COLOURS, dict.fromkeys(row.variant for row in rows), strict=False):
        mine = [row for row in rows if row.variant == variant]
        for style, level in zip((":", "-", "--"), ("token", "chunk", "sequence"), strict=True):
            steps, ratios = series(mine, f"{level}_ratio")  # mean over seeds of each quantile
            excess, above = [ratio - 1 for ratio in ratios], [1 - step / 1000 for step in steps]
            masked.plot(excess, above, style, color=colour, label=f"{variant}, {level}s")
        for seed in dict.fromkeys(row.seed for row in mine):
            steps, ratios = series([row for row in mine if row.seed == seed], "chunk_ratio")
            spread.plot(ratios, [step / 1000 for step in steps], color=colour, lw=0.7, label=variant)
    handles = dict(zip(*spread.get_legend_handles_labels()[::-1], strict=True))  # one entry per precision
    spread.legend(handles.values(), handles.keys(), fontsize=8, frameon=False)
    spread.set(xlabel="pi_old / mu of a chunk", ylabel="share of chunks at or below", title="Sampler against trainer")
    spread.set_yscale("logit")  # room for both tails
    masked.axvline(summary["mismatch_threshold"] - 1, color="0.6", lw=0.8)
    masked.set(title="Firing of the mask (eq. 8)", ylabel="share masked")
    masked.set(xlabel="threshold: H - 1 (grey: the default)", xscale="log", yscale="log", xlim=(1e-8, 1))
    masked.legend(fontsize=8, frameon=False)
    seeds = ", ".join(dict.fromkeys(row.seed for row in rows))
    text = (
        f"sandbox {summary['backend']}; {summary['episodes']} episodes a precision and seed; seeds {seeds}; "
        f"trainer float32; commit {summary['commit']}"
    )
    return save(figure, text, png)


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
    backend = {"sim": "simulated sandbox (sim)"}.get(summary["backend"], f"sandbox {summary['backend']}")
    seeds = ", ".join(dict.fromkeys(row.seed for row in rows))
    counts = points(rows)
    n = f"{counts[0]}-{counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    sampler, commit = (summary.get(key, "not recorded") for key in ("sampler", "commit"))
    return (
        f"{backend}; sampler {sampler}; seed {seeds}; n = {n} test episodes a point\n"
        f"bars: 95 % Wilson intervals; commit {commit}"
    )


def sft_masks(rows_csv: str | Path, summary_json: str | Path, png: str | Path) -> Path:
    """The ablation of SFT's masks, see ablation_masks.py."""
    from mini_rome.data.ablation_masks import draw_masks  # it takes the CSV's columns from here

    return draw_masks(rows_csv, summary_json, png)


def ablation(rows_csv: str | Path, summary_json: str | Path, png: str | Path) -> Path:
    """One of the ablations of recipes/ablate.py, see ablation_figures.py."""
    from mini_rome.evaluation.ablation_draw import draw_ablation  # as above

    return draw_ablation(rows_csv, summary_json, png)


def forks(rows_csv: str | Path, summary_json: str | Path, png: str | Path) -> Path:
    """The fork microscope, see forks.py."""
    from mini_rome.evaluation.fork_figure import draw_forks  # as above

    return draw_forks(rows_csv, summary_json, png)


def timeline(rows_csv: str | Path, summary_json: str | Path, png: str | Path) -> Path:
    """Who was busy when in each step, see timeline_figure.py."""
    from mini_rome.evaluation.timeline_figure import draw_timeline  # as above

    return draw_timeline(rows_csv, summary_json, png)


DRAWINGS = {
    "learning_curve": learning_curve, "mask_firing": mask_firing, "sft_masks": sft_masks, "forks": forks,
    "timeline": timeline,
}  # fmt: skip

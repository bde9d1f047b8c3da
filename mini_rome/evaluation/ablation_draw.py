"""Pictures of ablations from their CSV and JSON, and a rerun compared with the committed numbers. Without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mini_rome.errors import MiniRomeError
from mini_rome.evaluation.ablation import Ablation, Cube, Panel, Variant, band, cube, interval
from mini_rome.evaluation.ablation_claims import paired, peak
from mini_rome.evaluation.ablation_figures import ABLATIONS, get_ablation
from mini_rome.evaluation.canvas import COLOURS, sandbox_words, save
from mini_rome.evaluation.rows import Row, read_rows, read_summary

UNITS = {"step": "optimiser step", "episodes": "episodes", "seconds": "seconds of training, one thread",
         "tokens": "tokens trained on"}  # fmt: skip
STYLES = ("-", "--", "-.", (0, (5, 2, 1, 2, 1, 2)), ":", (0, (1, 3)))  # lines that lie on each other stay visible
STABILITY = "log10 of the largest gradient norm, difference"


def draw_ablation(rows_csv: str | Path, summary_json: str | Path, png: str | Path) -> Path:
    """The figure that the JSON names."""
    rows, facts = read_rows(rows_csv), read_summary(summary_json)
    ablation = get_ablation(facts["figure"])
    if not rows:
        raise MiniRomeError(f"{rows_csv} has no rows: no run has finished yet.")
    figure = {"curves": curves, "effects": effects}[ablation.drawing](ablation, rows)
    figure.suptitle(ablation.title, fontsize=10)
    return save(figure, caption(ablation, rows, facts), png)


def present(ablation: Ablation, rows: Sequence[Row]) -> list[Variant]:
    """Variants that have rows, in their order."""
    found = {row.variant for row in rows}
    return [variant for variant in ablation.variants if variant.name in found]


def curves(ablation: Ablation, rows: Sequence[Row]) -> Figure:
    """A row of panels for each condition; a colour for each variant in it."""
    variants = present(ablation, rows)
    conditions = list(dict.fromkeys(variant.condition for variant in variants))
    columns, height = len(ablation.panels), 3.4 if len(conditions) == 1 else 2.1
    wrapped = columns > 4  # then in two rows, of the only condition
    shape = (2, -(-columns // 2)) if wrapped else (len(conditions), columns)
    figure = Figure(figsize=(3.4 * shape[1] + 1.6, height * shape[0] + 0.9), dpi=110, layout="constrained")
    grid = figure.subplots(*shape, squeeze=False)
    for at, condition in enumerate(conditions):
        arms = [variant for variant in variants if variant.condition == condition]
        line = grid.ravel() if wrapped else grid[at]
        for axes, panel in zip(line, ablation.panels, strict=False):
            for variant, colour, style in zip(arms, COLOURS, STYLES, strict=False):
                draw_panel(axes, rows, variant.name, panel, label(variant), color=colour, ls=style)
            decorate(axes, panel, condition)
        beside = line[min(columns, shape[1]) - 1]  # outside, where it hides no line
        beside.legend(*line[0].get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7,
                      frameon=False, handlelength=3)  # fmt: skip
        for spare in line[columns:]:
            spare.set_axis_off()
    return figure


def label(variant: Variant) -> str:
    """The name without the condition, which stands beside the panel."""
    return variant.name.removesuffix(f", {variant.condition}")


def decorate(axes: Axes, panel: Panel, condition: str) -> None:
    text = f"{condition}\n{panel.label}" if condition else panel.label
    axes.set_ylabel(text, fontsize=8)
    axes.set_xlabel(UNITS[panel.over], fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    if panel.log:
        axes.set_yscale("log")
    elif "success" in panel.metric:
        axes.set_ylim(-0.03, 1.03)


def draw_panel(axes: Axes, rows: Sequence[Row], variant: str, panel: Panel, label: str, **line: Any) -> None:
    """A thin line per seed, the interquartile mean, and its band. A metric that this variant lacks is left out."""
    if not any(row.variant == variant and row.metric == panel.metric for row in rows):
        return
    found = cube(rows, variant, panel.metric)
    found = found.lowest() if panel.lowest else found
    x = np.array(found.steps, dtype=float)
    if panel.over != "step":
        spent = cube(rows, variant, panel.over)
        x = spent.values.mean(axis=(1, 2))[[spent.steps.index(step) for step in found.steps]]
    for values in found.values.mean(axis=2).T:
        axes.plot(x, values, lw=0.5, alpha=0.3, **line)
    middle, low, high = band(found.values)
    axes.fill_between(x, low, high, color=line["color"], alpha=0.15, lw=0)
    axes.plot(x, middle, lw=1.6, label=label, **line)


def effects(ablation: Ablation, rows: Sequence[Row]) -> Figure:
    """One line per choice: success at the end and the largest gradient norm, less those of its reference.

    The first variant of each condition is its reference: paired by seed.
    """
    variants = present(ablation, rows)
    figure = Figure(figsize=(9.0, 0.24 * len(variants) + 1.6), dpi=110, layout="constrained")
    success, stability = figure.subplots(1, 2, sharey=True)
    for place, (_, differences) in enumerate(effect_rows(variants, rows)):
        for axes, values in zip((success, stability), differences, strict=True):
            if values:
                middle, low, high = interval(values)
                axes.plot(values, [place] * len(values), ".", ms=3, color="0.65")
                reach = [[max(0.0, middle - low)], [max(0.0, high - middle)]]
                axes.errorbar(middle, place, xerr=reach, fmt="o", ms=3.5, capsize=2, color=COLOURS[0])
        if not differences[0]:
            success.axhline(place, color="0.9", lw=6, zorder=0)
    success.set_yticks(range(len(variants)), [variant.name for variant in variants], fontsize=7)
    success.invert_yaxis()
    success.set_xlabel("test success at the end, difference to the grey line above", fontsize=8)
    stability.set_xlabel(STABILITY, fontsize=8)
    for axes in (success, stability):
        axes.axvline(0, color="0.6", lw=0.8)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def effect_rows(
    variants: Sequence[Variant], rows: Sequence[Row]
) -> list[tuple[Variant, tuple[list[float], list[float]]]]:
    """(variant, its differences to the reference, paired by seed); no differences: it is the reference."""
    references: dict[str, str] = {}
    found = []
    for variant in variants:
        reference = references.setdefault(variant.condition, variant.name)
        lists: tuple[list[float], list[float]] = ([], [])
        if reference != variant.name:
            metric = "test_success" if any(row.metric == "test_success" for row in rows) else "start_success"
            first, second = cube(rows, variant.name, metric), cube(rows, reference, metric)
            norms = cube(rows, variant.name, "grad_norm"), cube(rows, reference, "grad_norm")
            lists = paired(first, second, Cube.last), paired(*norms, peak)
        found.append((variant, lists))
    return found


def caption(ablation: Ablation, rows: Sequence[Row], facts: Mapping[str, Any]) -> str:
    """Backend, seeds, n, what the bands are, commit."""
    backend = sandbox_words(facts["backend"])
    seeds = sorted({int(row.seed) for row in rows})
    span = f"{seeds[0]}-{seeds[-1]} ({len(seeds)})" if len(seeds) > 3 else ", ".join(map(str, seeds))
    counts = ", ".join(f"n = {n} episodes ({metric})" for metric, n in facts["n"].items() if n)
    models = len({run.get("sft") for run in facts.get("runs", {}).values()})  # rows of two sittings may have two
    one = "one model after SFT for all seeds" if models < 2 else f"{models} models after SFT, see the JSON"
    shared = one if ablation.once else "SFT anew for each seed"
    return (
        f"{backend}; sampler {facts['sampler']}; seeds {span}, {shared}; success: {counts} a seed, point and task\n"
        f"thin: seeds; thick: interquartile mean with 95 % stratified bootstrap; commit {facts['commit']}"
    )


def compare(committed: Sequence[Row], new: Sequence[Row], ablation: Ablation) -> list[tuple[str, bool | None]]:
    """A rerun against the committed numbers: each line with whether it agrees (None: cannot be told).

    At the last step that both measured the two 95 % intervals of each success must meet; each claim, tested on new
    rows alone, must have the verdict that the committed ones give it.
    """
    metrics = dict.fromkeys((panel.metric, panel.lowest) for panel in ablation.panels if "success" in panel.metric)
    lines = [
        meeting(committed, new, variant.name, *metric)
        for variant in present(ablation, new)
        for metric in metrics
        if all(_has(rows, variant.name, metric[0]) for rows in (committed, new))
    ]
    for claim in ablation.claims:
        before, result = claim.test(committed), claim.test(new)
        agrees = None if None in (before.holds, result.holds) else before.holds == result.holds
        lines.append((f"{claim.text}: {before.verdict} committed, {result.verdict} new: {result.numbers}", agrees))
    return lines


def meeting(
    committed: Sequence[Row], new: Sequence[Row], variant: str, metric: str, lowest: bool
) -> tuple[str, bool | None]:
    """Whether the intervals of one success meet."""
    cubes = [cube(rows, variant, metric) for rows in (committed, new)]
    name = f"{variant}, {'lowest ' if lowest else ''}{metric}"
    step = max(set(cubes[0].steps) & set(cubes[1].steps), default=None)
    if step is None:
        return f"{name}: no step in common", None
    tables = [(each.lowest() if lowest else each).values[[each.steps.index(step)]] for each in cubes]
    (old, low, high), (now, under, over) = ([part.item() for part in band(table)] for table in tables)
    spans = f"{old:.2f} [{low:.2f}, {high:.2f}] committed, {now:.2f} [{under:.2f}, {over:.2f}] new"
    return f"{name}, step {step}: {spans}", under <= high + 1e-9 and low <= over + 1e-9


def _has(rows: Sequence[Row], variant: str, metric: str) -> bool:
    return any(row.variant == variant and row.metric == metric for row in rows)


def check(name: str, committed_csv: str | Path, new_csv: str | Path) -> int:
    """Print `compare`; 1 if something disagrees."""
    if name not in ABLATIONS:
        raise MiniRomeError(f"{committed_csv}: --check tests ablations alone: {', '.join(ABLATIONS)}")
    beside = Path(new_csv).with_suffix(".json")
    if beside.exists() and (other := read_summary(beside).get("figure")) != name:
        raise MiniRomeError(f"--check {new_csv}: is of {other}, not of {name}")
    found = compare(read_rows(committed_csv), read_rows(new_csv), ABLATIONS[name])
    for line, agrees in found:
        print(f"{ {True: 'agrees', False: 'DISAGREES', None: 'not told'}[agrees]:<10} {line}")
    return int(any(agrees is False for _, agrees in found))

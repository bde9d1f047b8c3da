"""Ablation of SFT: with and without error mask, task mask and stage 2. The variants, the table and the picture.

The variant `longer` is the control of `stage 2`: as many steps in all, on the same data as before.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from mini_rome.evaluation.canvas import sandbox_words, save
from mini_rome.evaluation.rows import COLUMNS
from mini_rome.evaluation.stats import interquartile_mean, stratified_bootstrap
from mini_rome.masks import MaskPolicy


class Variant(NamedTuple):
    """Which masks; steps as a share of the base run; whether stage 2 follows with half as many."""

    errors: bool = True
    irrelevant: bool = True
    steps: float = 1.0
    second: bool = False

    @property
    def policy(self) -> MaskPolicy:
        return MaskPolicy(errors=self.errors, irrelevant=self.irrelevant)


VARIANTS: Mapping[str, Variant] = {
    "both masks": Variant(),
    "no error mask": Variant(errors=False),
    "no task mask": Variant(irrelevant=False),
    "no masks": Variant(errors=False, irrelevant=False),
    "stage 2": Variant(second=True),
    "longer": Variant(steps=1.5),
}
METRICS = {
    "success_short": "success, horizons of SFT",
    "success_long": "success, longer tasks",
    "failed_turns": "share of turns that fail",
}


def rows_of(variant: str, seed: int, step: int, values: Mapping[str, float]) -> list[dict[str, Any]]:
    """Rows of the long CSV."""
    facts = [(variant, seed, "all", step, metric, round(value, 4)) for metric, value in values.items()]
    return [dict(zip(COLUMNS, fact, strict=True)) for fact in facts]


def read_table(path: Path) -> list[dict[str, Any]]:
    """The rows that are there already; none where there is no file."""
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return [{**row, "seed": int(row["seed"]), "step": int(row["step"]), "value": float(row["value"])}
                for row in csv.DictReader(file)]  # fmt: skip


def by_variant(rows: Sequence[Mapping[str, Any]], metric: str) -> dict[str, list[float]]:
    """Values of one metric over seeds, for each variant."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row["metric"] == metric:
            found[row["variant"]].append(row["value"])
    return {name: found[name] for name in VARIANTS if name in found}


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Interquartile mean over seeds with a bootstrap interval (95 %)."""
    return stratified_bootstrap(np.array(values)[:, None], interquartile_mean)


def table_of(rows: Sequence[Mapping[str, Any]], backend: str) -> Table:
    """Every variant and metric, with intervals."""
    table = Table(title=f"SFT: masks and stage 2, {sandbox_words(backend)}, interquartile mean over seeds")
    for column in ("variant", "seeds", *METRICS.values()):
        table.add_column(column)
    for name, values in by_variant(rows, "success_long").items():
        cells = []
        for metric in METRICS:
            middle, low, high = interval(by_variant(rows, metric)[name])
            cells.append(f"{middle:.1%} [{low:.1%}, {high:.1%}]")
        table.add_row(name, str(len(values)), *cells)
    return table


def draw_masks(rows_csv: str | Path, summary_json: str | Path, png: str | Path) -> Path:
    """One panel per metric: a small point for every seed, the interquartile mean with its interval."""
    rows, facts = read_table(Path(rows_csv)), json.loads(Path(summary_json).read_text(encoding="utf-8"))
    caption = (
        f"{sandbox_words(facts['backend'])}, seeds {facts['seeds']}, n = {facts['options']['eval_tasks']} tasks "
        f"a seed; bars: 95 % bootstrap; commit {facts['commit']}"
    )
    figure = Figure(figsize=(9.0, 3.2), dpi=120, layout="constrained")
    for axes, (metric, label) in zip(figure.subplots(1, len(METRICS), sharey=True), METRICS.items(), strict=True):
        found = by_variant(rows, metric)
        for place, values in enumerate(found.values()):
            middle, low, high = interval(values)
            axes.plot(values, [place] * len(values), ".", ms=4, color="0.6")
            reach = [[middle - low], [high - middle]]
            axes.errorbar(middle, place, xerr=reach, fmt="o", ms=4, capsize=3, color="#0072b2")
        axes.set_yticks(range(len(found)), list(found))
        axes.set_xlabel(label, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].invert_yaxis()
    return save(figure, caption, png)

"""The funnel of the four-stage filter: table, CSV with its JSON, and picture, with the paper's counts beside."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from mini_rome.data.filters import Stage
from mini_rome.errors import RecordError
from mini_rome.evaluation.canvas import sandbox_words, save
from mini_rome.runs import write_csv, write_json

# What the paper reports; it gives no counts for single stages.
PAPER = {
    "trajectories synthesised": "more than 1 M",
    "instances and trajectories kept": "76 K",
    "tokens kept": "30 B",
    "RL instances": "60 K -> 2 K",
}
COLUMNS = ("stage", "in", "out", "reason", "dropped", "note")


def funnel_rows(stages: Sequence[Stage]) -> list[dict[str, Any]]:
    """One row per stage and reason; a stage that dropped nothing has one row without a reason."""
    rows = []
    for stage in stages:
        for reason, count in (stage.why or {"": 0}).items():
            row = (stage.name, stage.entered, stage.left, reason, count, stage.note)
            rows.append(dict(zip(COLUMNS, row, strict=True)))
    return rows


def ours(stages: Sequence[Stage], tokens: int, instances: int, rl: str = "") -> dict[str, str]:
    """Our numbers under the paper's names."""
    return {
        "trajectories synthesised": f"{stages[0].entered:,}",
        "instances and trajectories kept": f"{instances:,} and {stages[-1].left:,}",
        "tokens kept": f"{tokens:,}",
        "RL instances": rl,
    }


def tables(stages: Sequence[Stage], counts: Mapping[str, str], title: str) -> list[Table]:
    """The funnel, and the paper's counts beside ours."""
    funnel = Table(title=title)
    for column in ("stage", "in", "out", "dropped because"):
        funnel.add_column(column)
    for stage in stages:
        why = ", ".join(f"{reason} {count}" for reason, count in stage.why.items()) or "-"
        funnel.add_row(f"{stage.name} ({stage.note})" if stage.note else stage.name, str(stage.entered),
                       str(stage.left), why)  # fmt: skip
    beside = Table("", "paper", "here", box=None, pad_edge=False)
    for name, value in PAPER.items():
        beside.add_row(name, value, counts[name] or "-")
    return [funnel, beside]


def save_funnel(folder: Path, stages: Sequence[Stage], counts: Mapping[str, str], summary: Mapping[str, Any]) -> None:
    """funnel.csv, funnel.json and funnel.png in `folder`."""
    write_csv(folder / "funnel.csv", funnel_rows(stages), COLUMNS)
    write_json(folder / "funnel.json", {**summary, "paper": PAPER, "here": dict(counts)})
    draw_funnel(folder / "funnel.csv", folder / "funnel.json", folder / "funnel.png")


def draw_funnel(table: Path, summary: Path, png: Path) -> Path:
    """The picture from the CSV and the JSON beside it: what each stage let through, and what it dropped and why."""
    facts = json.loads(summary.read_text(encoding="utf-8"))
    with open(table, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows or tuple(rows[0]) != COLUMNS:
        raise RecordError(f"{table}, line 1: must be {','.join(COLUMNS)} with a stage below")
    stages = list(dict.fromkeys(row["stage"] for row in rows))
    left = [next(int(row["out"]) for row in rows if row["stage"] == stage) for stage in stages]
    figure = Figure(figsize=(7.2, 3.4), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.barh(["synthesised", *stages], [int(rows[0]["in"]), *left], color="#0072b2", height=0.6)
    for position, stage in enumerate(stages, 1):
        mine = [row for row in rows if row["stage"] == stage and row["reason"]]
        why = ", ".join(f"{row['reason']} {row['dropped']}" for row in mine)
        text = f"{left[position - 1]:,}" + (f"  (dropped: {why})" if why else "")
        axes.text(0.01, position + 0.42, text, transform=axes.get_yaxis_transform(), fontsize=6, va="center")
    axes.invert_yaxis()
    axes.set(xlabel="trajectories", title="Four-stage filter")
    axes.spines[["top", "right"]].set_visible(False)
    paper = "; ".join(f"{name}: {value}" for name, value in facts["paper"].items())
    caption = f"{sandbox_words(facts['backend'])}, seed {facts['seed']}, commit {facts['commit']}\npaper: {paper}"
    return save(figure, caption, png)

"""The paper's own results, as recipes/results/paper_tables.csv has them: to be shown beside ours, never as ours.

Every cell is one that the paper gives; what it does not give has no row. Scores in per cent, sizes in billions of
parameters. Source of all: arXiv:2512.24873.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from mini_rome.errors import MiniRomeError
from mini_rome.runs import replacing

TABLES = Path(__file__).resolve().parents[1] / "recipes" / "results" / "paper_tables.csv"
COLUMNS = ("group", "benchmark", "model", "score", "source")
OURS, BASE = "ROME", "Qwen3-Coder-30B-A3B-Instruct"
# (total, active) parameters in billions; active is None where it is not given. Other models' sizes are not given.
SIZES: Mapping[str, tuple[float, float | None]] = {
    "ROME": (30.0, 3.0), "Qwen3-Coder-30B-A3B-Instruct": (30.0, 3.0), "Qwen3-Coder-480B-A35B-Instruct": (480.0, 35.0),
    "GPT-OSS-120B": (120.0, None),
}  # fmt: skip
TASKS = {"Terminal-Bench 1.0": 80, "Terminal-Bench 2.0": 89, "Terminal-Bench-Pro": 400}
CHECKS_A_TASK = 28.3  # of Terminal-Bench-Pro
GROUPS = ("terminal", "tool-use", "general")


@dataclass(frozen=True)
class Score:
    """One cell of the paper's tables."""

    group: str
    benchmark: str
    model: str
    score: float
    source: str


def paper_scores(path: str | Path = TABLES) -> list[Score]:
    """Every cell. Raises MiniRomeError with file and line."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            if tuple(table.fieldnames or ()) != COLUMNS:
                raise MiniRomeError(f"{path}:1: the first line must be {','.join(COLUMNS)}")
            return [_score(path, table.line_num, line) for line in table]
    except FileNotFoundError:
        raise MiniRomeError(f"{path} does not exist: it comes with a checkout of the project.") from None


def _score(path: str | Path, number: int, line: Mapping[str, str]) -> Score:
    try:
        return Score(line["group"], line["benchmark"], line["model"], float(line["score"]), line["source"])
    except (TypeError, ValueError):
        raise MiniRomeError(f"{path}:{number}: score {line['score']!r} is no number") from None


def average(scores: Sequence[Score], group: str, model: str) -> float | None:
    """A model's average over the benchmarks of a group, as the paper gives it; None where it does not."""
    return next((s.score for s in scores if (s.group, s.benchmark, s.model) == (group, "average", model)), None)


def paper_lines(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """The paper's averages of the groups of an evaluation, in words; empty in an installed copy, without the file.

    found: as `results.summaries` gives it.
    """
    if not TABLES.exists():
        return ""
    scores = paper_scores()
    lines = ["The paper's averages, of other tasks and models (arXiv:2512.24873), not ours:"]
    for group in [group for group in GROUPS if group in found.get("group", {"terminal": {}})]:
        rome, base = average(scores, group, OURS), average(scores, group, BASE)
        lines.append(f"  {group}: {OURS} {rome:.2f} %, {BASE} {base:.2f} %")
    return "\n".join(lines)


def our_point(folder: str | Path) -> tuple[float, float, str]:
    """(billions of parameters, success in per cent, label) of a checkpoint's evaluation, for the figure.

    Raises MiniRomeError where the folder holds none.
    """
    path = Path(folder) / "eval.json"
    try:
        record = json.loads(path.read_text("utf-8"))
        success, size = record["results"]["all"]["all"]["avg"], record["parameters"]
        return size / 1e9, 100 * success, f"mini-rome, {size / 1e6:.1f} M ({record['backend']})"
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise MiniRomeError(
            f"{path}: no evaluation of a checkpoint ({error}); make one: mini-rome eval --out {folder}"
        ) from None


def performance_against_parameters(
    png: str | Path, group: str = "terminal", ours: tuple[float, float, str] | None = None
) -> Path:
    """Draw the paper's figure 15: average score over total parameters, for the models whose sizes are given.

    ours: (billions of parameters, score in per cent, label) of our own model, drawn apart: its tasks are others.
    """
    points = [(SIZES[s.model][0], s) for s in paper_scores()
              if s.group == group and s.benchmark == "average" and s.model in SIZES]  # fmt: skip
    figure = Figure(figsize=(6.4, 4.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    for size, score in points:
        axes.scatter(size, score.score, color="0.45", marker="o", s=36)
        axes.annotate(score.model, (size, score.score), textcoords="offset points", xytext=(6, 4), fontsize=7)
    axes.scatter([], [], color="0.45", marker="o", label="the paper's, on its own benchmarks")
    if ours is not None:
        axes.scatter(ours[0], ours[1], color="#d55e00", marker="D", s=40, label=f"{ours[2]}, on our mini tasks")
    axes.set(xscale="log", xlabel="parameters in all (billions, log scale)", ylabel="average success (%)",
             ylim=(0, 100 if ours else None), title=f"Performance against parameters: {group}")  # fmt: skip
    axes.legend(loc="best", fontsize=7, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    source = "grey: arXiv:2512.24873, models whose size it gives; other tasks than ours"
    figure.supxlabel(source, fontsize=7, color="0.35")
    with replacing(png) as spare:
        figure.savefig(spare, format="png", metadata={"Software": None})
    return Path(png)

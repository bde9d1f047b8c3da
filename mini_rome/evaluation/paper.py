"""The paper's own results, as recipes/results/paper_tables.csv has them: to be shown beside ours, never as ours.

Every cell is one that the paper gives; what it does not give has no row. Scores in per cent, sizes in billions of
parameters. Source of all: arXiv:2512.24873.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from mini_rome.errors import MiniRomeError
from mini_rome.evaluation.canvas import save
from mini_rome.evaluation.rows import read_table

TABLES = Path(__file__).resolve().parents[2] / "recipes" / "results" / "paper_tables.csv"
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
MARKERS = "os^v"  # of the models in SIZES, in order


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
    table = read_table(path, COLUMNS, "it comes with a checkout of the project")
    return [_score(path, number, line) for number, line in table]


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


@dataclass(frozen=True)
class Ours:
    """Our own model in the figure: billions of parameters, success in per cent by group, a label."""

    size: float
    scores: Mapping[str, float]
    label: str


def our_point(folder: str | Path) -> Ours:
    """The point of a checkpoint's evaluation, by group. Raises MiniRomeError where the folder holds none."""
    path = Path(folder) / "eval.json"
    try:
        record = json.loads(path.read_text("utf-8"))
        results, size = record["results"], record["parameters"]
        groups = results.get("group") or {"terminal": results["all"]["all"]}
        scores = {name: 100 * each["avg"] for name, each in groups.items() if each["avg"] is not None}
        return Ours(size / 1e9, scores, f"mini-rome, {size / 1e6:.1f} M ({record['backend']})")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise MiniRomeError(
            f"{path}: no evaluation of a checkpoint ({error}); make one: mini-rome eval --out {folder}"
        ) from None


def performance_against_parameters(png: str | Path, ours: Ours | None = None) -> Path:
    """Draw the paper's figure 15 by group: average score over total parameters, for models whose sizes are given.

    Ours is drawn apart: its tasks are others.
    """
    scores = paper_scores()
    figure = Figure(figsize=(9.6, 4.0), dpi=120, layout="constrained")
    panels = figure.subplots(1, len(GROUPS), sharex=True, sharey=True)
    for axes, group in zip(panels, GROUPS, strict=True):
        for marker, (model, (size, _)) in zip(MARKERS, SIZES.items(), strict=True):
            if (score := average(scores, group, model)) is not None:
                axes.scatter(size, score, color="0.35", marker=marker, s=34, label=f"{model} (the paper's)")
        if ours is not None and group in ours.scores:
            axes.scatter(ours.size, ours.scores[group], color="#d55e00", marker="D", s=34, label=ours.label)
        axes.set(xscale="log", title=group, xlim=(2e-4 if ours else 1.0, 2000), ylim=(0, 105 if ours else 62))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("average success (%)")
    panels[1].set_xlabel("parameters in all (billions)")
    drawn = [pair for axes in panels for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    legend = {text: handle for handle, text in drawn}
    figure.legend(legend.values(), legend.keys(), loc="outside upper center", ncols=3, fontsize=7, frameon=False)
    source = "grey: arXiv:2512.24873, the models whose size it gives, on its own benchmarks"
    return save(figure, source + ("; orange: ours, on our mini tasks" if ours else ""), png)

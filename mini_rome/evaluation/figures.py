"""Pictures from the committed numbers: CSV and JSON in, PNG out, in seconds and without torch.

Each kind of figure has a module of its own; here is which one draws what.
"""

from __future__ import annotations

from pathlib import Path

from mini_rome.data.ablation_masks import draw_masks
from mini_rome.errors import MiniRomeError
from mini_rome.evaluation.ablation_draw import draw_ablation
from mini_rome.evaluation.ablation_figures import ABLATIONS
from mini_rome.evaluation.curve_figure import learning_curve
from mini_rome.evaluation.fork_figure import draw_forks
from mini_rome.evaluation.mask_figure import mask_firing
from mini_rome.evaluation.rows import RESULTS, read_summary
from mini_rome.evaluation.timeline_figure import draw_timeline
from mini_rome.runs import CURVE_CSV, CURVE_PNG, SUMMARY

DRAWINGS = {
    "learning_curve": learning_curve, "mask_firing": mask_firing, "sft_masks": draw_masks, "forks": draw_forks,
    "timeline": draw_timeline, **dict.fromkeys(ABLATIONS, draw_ablation),
}  # fmt: skip


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
    kind = read_summary(summary_json).get("figure", "learning_curve")
    if kind not in DRAWINGS:
        raise MiniRomeError(f"{summary_json}: no figure {kind!r}; there are {', '.join(DRAWINGS)}")
    return DRAWINGS[kind](rows_csv, summary_json, png)

"""When the mask of eq. 8 fires: the ratio pi_old / mu over chunks, and what each threshold would mask."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from mini_rome.errors import MiniRomeError
from mini_rome.evaluation.canvas import COLOURS, save
from mini_rome.evaluation.curve_figure import series
from mini_rome.evaluation.rows import read_rows, read_summary


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

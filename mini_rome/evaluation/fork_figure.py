"""The picture of the fork microscope: V(p) with intervals, crucial chunks, gamma^(K-k), where rollback stood."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mini_rome.errors import MiniRomeError
from mini_rome.evaluation.canvas import COLOURS, sandbox_words, save
from mini_rome.evaluation.rows import read_summary

BLUE, ORANGE, GREEN = COLOURS[:3]


def draw_forks(rows_csv: str | Path, summary_json: str | Path, png: str | Path) -> Path:
    """Draw forks.json (see forks.py). The CSV beside it has the same rates. MiniRomeError: no points."""
    summary = read_summary(summary_json)
    points = summary.get("points")
    if not points:
        raise MiniRomeError(f"{summary_json} has no points: it is not from `mini-rome figure forks --trajectory`")
    chunks, p = len(points), [point["p"] for point in points]
    rates = [point["rate"] for point in points]
    below, above = zip(*((x["rate"] - x["low"], x["high"] - x["rate"]) for x in points), strict=True)
    figure = Figure(figsize=(7.6, 5.6), dpi=120, layout="constrained")
    value, starts = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    for point in points:
        if point["crucial"]:
            value.axvspan(point["p"], point["p"] + 1, color=ORANGE, alpha=0.18, lw=0)
    value.plot([], [], color=ORANGE, alpha=0.4, lw=8, label="crucial chunk (exact test, Holm)")
    weights = [summary["gamma"] ** (chunks - k) for k in range(1, chunks + 1)]
    middle = [k - 0.5 for k in range(1, chunks + 1)]  # chunk k leads from p = k - 1 to p = k
    label = f"gamma^(K-k) of chunk k, gamma {summary['gamma']}"
    value.plot(middle, weights, ":", color=GREEN, marker="_", label=label)
    bars = [[max(0.0, x) for x in below], [max(0.0, x) for x in above]]
    value.errorbar(p, rates, yerr=bars, color=BLUE, marker="o", ms=4, lw=1.4, capsize=2, label="V(p), success from p")
    value.plot([p[-1], chunks], [rates[-1], 1.0], "--", color=BLUE, lw=1)
    value.plot(chunks, 1.0, "o", color=BLUE, mfc="white", ms=5)  # the trajectory itself, verified
    value.set(ylim=(-0.03, 1.05), ylabel="success rate")
    value.set_title(f"Forks of {summary['task']}", pad=24)
    value.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=8, frameon=False)
    if summary["starts"]:
        steps, where = zip(*summary["starts"], strict=True)
        starts.plot(where, steps, "s", ms=3, color="0.35")
        starts.invert_yaxis()
        starts.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    else:
        starts.set_yticks([])
        starts.text(0.5, 0.5, "no training episode of this task was kept", ha="center", transform=starts.transAxes)
    starts.set(xlabel="p: chunks done before the policy takes over", ylabel="training step\n(its starts)")
    starts.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (value, starts):
        axes.spines[["top", "right"]].set_visible(False)
    backend = sandbox_words(summary["backend"])
    text = (
        f"{backend}; {summary['n']} rollouts from every p, temperature 1; seed {summary['seed']}; "
        f"bars: 95 % Wilson intervals\nhollow: the trajectory itself, verified; commit {summary['commit']}"
    )
    return save(figure, text, png)

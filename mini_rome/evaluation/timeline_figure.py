"""The timeline of a run or of several ways: who was busy when, as a Gantt chart, and the share of each phase."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.table import Table

from mini_rome.errors import MiniRomeError
from mini_rome.evaluation.canvas import COLOURS, save
from mini_rome.evaluation.rows import read_summary
from mini_rome.timeline import COLUMNS, PHASES, STEP, Span, phase_shares, union

LANES = {"sampler": ("generate", "sync"), "sandboxes": ("environment", "reward"), "trainer": ("train",)}
COLOUR = dict(zip(PHASES, COLOURS, strict=False))


def read_spans(path: str | Path) -> dict[str, list[Span]]:
    """Spans by way. MiniRomeError: not such a table, or one without a step."""
    found: dict[str, list[Span]] = defaultdict(list)
    try:
        with open(path, newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            if tuple(table.fieldnames or ()) != COLUMNS:
                raise MiniRomeError(f"{path}: the first line must be {','.join(COLUMNS)}")
            for line in table:
                found[line["way"]].append(Span(line["phase"], float(line["begin"]), float(line["end"])))
    except FileNotFoundError:
        raise MiniRomeError(f"{path} does not exist: record a run with --timeline true") from None
    except (TypeError, ValueError):
        raise MiniRomeError(f"{path}, line {table.line_num}: begin and end must be numbers") from None
    if not found or not all(any(span.phase == STEP for span in spans) for spans in found.values()):
        raise MiniRomeError(f"{path} holds no step: there is no timeline to draw.")
    return dict(found)


def draw_timeline(spans_csv: str | Path, summary_json: str | Path, png: str | Path) -> Path:
    """One panel a way, all on one scale of seconds; a line where a step begins."""
    ways, summary = read_spans(spans_csv), read_summary(summary_json)
    figure = Figure(figsize=(9.0, 1.1 + 1.5 * len(ways)), dpi=120, layout="constrained")
    panels = figure.subplots(len(ways), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (way, spans) in zip(panels, ways.items(), strict=True):
        draw_way(axes, spans)
        axes.set_title(f"{way}: {said(phase_shares(spans))}", fontsize=8, loc="left")
    panels[-1].set(xlabel="seconds since the first step began")
    handles = [Patch(color=COLOUR[phase], label=phase) for phase in PHASES]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=8, frameon=False)
    text = (
        f"sandbox {summary['backend']}; sampler {summary.get('sampler')}; seed {summary.get('seed')}; "
        f"{summary.get('device', 'one device')}; commit {summary.get('commit')}\n"
        f"shares are of the steps' time and overlap; idle: the model neither draws tokens nor is trained or copied"
    )
    return save(figure, text, png)


def draw_way(axes: Axes, spans: list[Span]) -> None:
    """Three lanes; what several sandboxes do at once is one bar."""
    for height, phases in enumerate(reversed(LANES.values())):
        for phase in phases:
            stretches = union(span for span in spans if span.phase == phase)
            bars = [(begin, end - begin) for begin, end in stretches]
            axes.broken_barh(bars, (height - 0.4, 0.8), color=COLOUR[phase])
    for span in spans:
        if span.phase == STEP:
            axes.axvline(span.begin, color="0.3", lw=0.8)
    axes.set_yticks(range(len(LANES)), list(reversed(LANES)), fontsize=8)
    axes.set_ylim(-0.6, len(LANES) - 0.4)
    axes.spines[["top", "right"]].set_visible(False)


def said(shares: dict[str, float]) -> str:
    """The shares in words, those that round to nothing left out."""
    parts = [f"{name} {share:.0%}" for name, share in shares.items() if name != "seconds" and share >= 0.005]
    return f"{shares['seconds']:.2f} s a step; {', '.join(parts)}"


def shares_table(ways: dict[str, Any]) -> Table:
    """A row for each way of timeline.json's `ways`."""
    names = list(next(iter(ways.values())))
    table = Table(title="share of the steps' time (phases overlap)")
    for column in ("way", *names):
        table.add_column(column, justify="left" if column == "way" else "right")
    for way, shares in ways.items():
        cells = [f"{shares[name]:.2f} s" if name == "seconds" else f"{shares[name]:.1%}" for name in names]
        table.add_row(way, *cells)
    return table

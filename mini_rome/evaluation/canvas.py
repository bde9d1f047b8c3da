"""What all figures share: colours, and how a picture is written."""

from __future__ import annotations

import textwrap
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.textpath import TextPath

from mini_rome.runs import replacing

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
FONT = 7  # points, of captions


def wrapped(text: str, inches: float) -> str:
    """Each line broken where it would leave a figure of this width.

    >>> wrapped("one seed; simulated", 0.6)
    'one seed;\\nsimulated'
    """

    def broken(line: str) -> str:
        wide = TextPath((0, 0), line, size=FONT).get_extents().width / 72 if line.strip() else 0.0
        return line if wide <= 0.98 * inches else textwrap.fill(line, max(8, int(0.93 * inches / wide * len(line))))

    return "\n".join(broken(line) for line in text.splitlines())


def sandbox_words(backend: str) -> str:
    """The backend in a caption: what was simulated says so."""
    return "simulated sandbox (sim)" if backend == "sim" else f"sandbox {backend}"


def save(figure: Figure, text: str, png: str | Path) -> Path:
    """Write the picture with its caption, whole or not at all, the same bytes each time."""
    figure.supxlabel(wrapped(text, figure.get_figwidth()), fontsize=FONT, color="0.35")
    with replacing(png) as spare:
        figure.savefig(spare, format="png", metadata={"Software": None})
    return Path(png)

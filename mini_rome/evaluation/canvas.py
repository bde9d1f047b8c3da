"""What all figures share: colours, and how a picture is written."""

from __future__ import annotations

import textwrap
from pathlib import Path

from matplotlib.figure import Figure

from mini_rome.runs import replacing

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


FONT = 7  # points, of captions


def wrapped(text: str, inches: float) -> str:
    """Each line broken where it would leave a figure of this width: letters are half as wide as high, on average.

    >>> wrapped("one seed; simulated", 0.5)
    'one seed;\\nsimulated'
    """
    letters = int(72 * inches / (0.55 * FONT))
    return "\n".join(textwrap.fill(line, letters) for line in text.splitlines())


def save(figure: Figure, text: str, png: str | Path) -> Path:
    """Write the picture with its caption, whole or not at all, the same bytes each time."""
    figure.supxlabel(wrapped(text, figure.get_figwidth()), fontsize=FONT, color="0.35")
    with replacing(png) as spare:
        figure.savefig(spare, format="png", metadata={"Software": None})
    return Path(png)

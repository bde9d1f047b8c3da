"""What all figures share: colours, and how a picture is written."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from mini_rome.runs import replacing

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def save(figure: Figure, text: str, png: str | Path) -> Path:
    """Write the picture with its caption, whole or not at all, the same bytes each time."""
    figure.supxlabel(text, fontsize=7, color="0.35")
    with replacing(png) as spare:
        figure.savefig(spare, format="png", metadata={"Software": None})
    return Path(png)

"""Drawings of one trajectory, token by token, and sliders over a drawing: for the walkthroughs in notebooks/.

A drawing takes matplotlib axes and puts something on them; who calls it owns the figure. Colours tell chunks apart,
as in the paper's figure 9; what the environment wrote is hatched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from typing import Any, Literal

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from mini_rome.chunking import OUTSIDE, chunk_ids
from mini_rome.evaluation.canvas import COLOURS
from mini_rome.trace import ChatFormat
from mini_rome.types import Trajectory

Author = Literal["prompt", "environment", "expert", "policy"]
UNITS = ("token", "chunk", "sequence")  # what a ratio or a mask may be taken over, from the finest
TEXT = 1.7  # height of a row of token texts, in rows of units
_GREY = {"prompt": "0.93", "environment": "0.93", "expert": "0.78"}


@dataclass(frozen=True)
class Piece:
    """One token of a trajectory: its text, who wrote it, and the chunk it is in (0..K-1, or -1: in none)."""

    text: str
    author: Author
    chunk: int = OUTSIDE

    @property
    def colour(self) -> str:
        """Of its chunk; grey outside chunks."""
        return COLOURS[self.chunk % len(COLOURS)] if self.author == "policy" else _GREY[self.author]


def pieces(chat: ChatFormat, trajectory: Trajectory) -> list[Piece]:
    """Every token of the prompt and the completion, in order. Chunk ids are those the rollout recorded."""
    found = [Piece(chat.decode([token]), "prompt") for token in trajectory.prompt_ids]
    tokens = [token for turn in trajectory.turns for token in (*turn.ids, *turn.observation_ids)]
    numbers, prefix = chunk_ids(trajectory), chunk_ids(trajectory, expert=True)
    for token, number, expert in zip(tokens, numbers, prefix, strict=False):  # nothing follows the last response
        author: Author = "policy" if number != OUTSIDE else "expert" if expert != OUTSIDE else "environment"
        found.append(Piece(chat.decode([token]), author, max(number, expert)))
    return found


def spans(row: Sequence[Piece], unit: str) -> list[tuple[int, int]]:
    """(first, last) token of each unit of the policy's own tokens; a chunk is one run, a sequence is all of them.

    >>> row = [Piece("go", "prompt"), Piece("ls", "policy", 0), Piece("a", "environment"), Piece("rm", "policy", 1)]
    >>> spans(row, "token"), spans(row, "sequence")
    ([(1, 1), (3, 3)], [(1, 3)])
    """
    mine = [index for index, piece in enumerate(row) if piece.author == "policy"]
    if unit == "token":
        return [(index, index) for index in mine]
    if unit == "sequence":
        return [(mine[0], mine[-1])] if mine else []
    groups = [list(group) for _, group in groupby(mine, key=lambda index: row[index].chunk)]
    return [(group[0], group[-1]) for group in groups]


def draw_units(axes: Axes, row: Sequence[Piece], units: Sequence[str] = UNITS) -> None:
    """The paper's figure 9: the same tokens as units of three sizes, one row of boxes each, the text on top."""
    draw_tokens(axes, row, top=len(units))
    for level, unit in enumerate(reversed(units)):
        found = spans(row, unit)
        for number, (first, last) in enumerate(found):
            colour = "0.35" if unit == "sequence" else row[first].colour
            _unit(axes, row, first, last, level + 0.18, colour)
            if unit == "chunk":
                _label(axes, (first + last) / 2, level + 0.5, f"c{number + 1}")
        axes.text(-1.5, level + 0.5, f"{unit}\n{len(found)} unit{'s' * (len(found) != 1)}", ha="right", va="center")
    axes.set(xlim=(-0.7, len(row) - 0.3), ylim=(0, len(units) + TEXT + 0.2))
    axes.axis("off")


def _unit(axes: Axes, row: Sequence[Piece], first: int, last: int, bottom: float, colour: str) -> None:
    """One unit: a box around each run of the policy's tokens, a line through what others wrote in between."""
    axes.plot([first, last], [bottom + 0.32] * 2, color=colour, lw=1.5, zorder=1)
    for mine, run in groupby(range(first, last + 1), key=lambda index: row[index].author == "policy"):
        places = list(run)
        if mine:
            width = places[-1] - places[0] + 0.86
            box = Rectangle((places[0] - 0.43, bottom), width, 0.64, facecolor=colour, edgecolor="white", lw=0.6)
            axes.add_patch(box)


def _label(axes: Axes, x: float, y: float, text: str) -> None:
    axes.text(x, y, text, ha="center", va="center", color="white", fontweight="bold")


def draw_tokens(axes: Axes, row: Sequence[Piece], top: float = 0.0) -> None:
    """The text of every token, upright, on the colour of its author: chunks coloured, the environment hatched."""
    for index, piece in enumerate(row):
        hatch = "////" if piece.author == "environment" else None
        box = Rectangle((index - 0.47, top + 0.1), 0.94, TEXT, facecolor=piece.colour, edgecolor="white", lw=0.5,
                        alpha=0.45 if piece.author == "policy" else 1.0, hatch=hatch)  # fmt: skip
        axes.add_patch(box)
        axes.text(index, top + 0.18, shown_text(piece.text), rotation=90, ha="center", va="bottom", fontsize=7,
                  family="monospace", parse_math=False)  # fmt: skip


def draw_values(axes: Axes, row: Sequence[Piece], values: Sequence[float], label: str) -> None:
    """One bar per token, in the colour of its chunk; values has a number for every token of the row."""
    axes.bar(range(len(row)), values, width=0.86, color=[piece.colour for piece in row])
    axes.axhline(0.0, color="0.3", lw=0.7)
    axes.set(xlim=(-0.7, len(row) - 0.3), ylabel=label, xticks=[])
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def shown_text(text: str) -> str:
    """A token as one sees it: white space made visible, special tokens short.

    >>> shown_text(" plum"), shown_text("\\n"), shown_text("<|im_end|>"), shown_text("</tool_call>")
    ('·plum', '↵', '<end>', '</call>')
    """
    for name, short in (("<|im_start|>", "<start>"), ("<|im_end|>", "<end>"), ("tool_call", "call")):
        text = text.replace(name, short)
    return text.replace(" ", "·").replace("\n", "↵")


def explore(
    draw: Callable[[Axes, Any], None], name: str, values: Sequence[Any], shown: Sequence[Any],
    size: tuple[float, float] = (4.0, 2.8), columns: int = 3,
) -> None:  # fmt: skip
    """A drawing at a few values side by side, and under them a slider over all values.

    The pictures are plain output and stand in a saved notebook; the slider needs ipywidgets and a running kernel.
    size: of one picture, in inches. columns: pictures in a row, at most.
    """
    columns = min(columns, len(shown))
    rows = -(-len(shown) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(size[0] * columns, size[1] * rows), layout="constrained",
                                sharey=True, squeeze=False)  # fmt: skip
    for axes, value in zip(grid.flat, shown, strict=False):
        draw(axes, value)
        axes.set_title(f"{name} = {value:g}")
    plt.show()
    if find_spec("ipywidgets") is not None:
        _slider(draw, name, values, shown[0], size)


def _slider(
    draw: Callable[[Axes, Any], None], name: str, values: Sequence[Any], value: Any, size: tuple[float, float]
) -> None:
    import ipywidgets

    def redraw(chosen: Any) -> None:
        axes = plt.subplots(figsize=size, layout="constrained")[1]
        draw(axes, chosen)
        axes.set_title(f"{name} = {chosen:g}")
        plt.show()

    options = [(f"{choice:g}", choice) for choice in values]
    ipywidgets.interact(redraw, chosen=ipywidgets.SelectionSlider(options=options, value=value, description=name))

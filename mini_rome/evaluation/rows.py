"""The numbers behind a figure: rows of a long CSV, and the JSON beside it that says where they come from.

CSV rows are variant,seed,task,step,metric,value. The JSON says backend, seeds, commit and so on. Without torch.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mini_rome.errors import MiniRomeError

COLUMNS = ("variant", "seed", "task", "step", "metric", "value")
RESULTS = Path("recipes/results")


class Row(NamedTuple):
    """One number of a run. `metric` of a learning curve: train_success, test_success, test_n or start_position."""

    variant: str
    seed: str
    task: str
    step: int
    metric: str
    value: float


def read_table(path: str | Path, columns: Sequence[str], missing: str) -> list[tuple[int, dict[str, str]]]:
    """(line, its fields) of a CSV with these columns. MiniRomeError: other columns, or no file, with what to do."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            if list(table.fieldnames or ()) != list(columns):
                raise MiniRomeError(f"{path}: the first line must be {','.join(columns)}")
            return [(table.line_num, line) for line in table]
    except FileNotFoundError:
        raise MiniRomeError(f"{path} does not exist: {missing}.") from None


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a long CSV. Raises MiniRomeError naming the file and line when they are not that."""
    table = read_table(path, COLUMNS, "name a run's folder, a CSV, or a figure's name")
    return [read_row(path, number, line) for number, line in table]


def read_row(path: str | Path, number: int, line: Mapping[str, str]) -> Row:
    try:
        step, value = int(line["step"]), float(line["value"])
    except (TypeError, ValueError):
        raise MiniRomeError(f"{path}, line {number}: step must be a whole number and value a number") from None
    return Row(line["variant"], line["seed"], line["task"], step, line["metric"], value)


def read_summary(path: str | Path) -> dict[str, Any]:
    """The JSON beside the CSV. Raises MiniRomeError when it is missing, broken or names no backend."""
    try:
        summary = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MiniRomeError(
            f"{path} does not exist, which says where numbers come from. Name a run's folder, a CSV with its JSON "
            f"beside it, or a figure in {RESULTS}; `python recipes/ablate.py` makes those of the ablations."
        ) from None
    except json.JSONDecodeError as error:
        raise MiniRomeError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from None
    if not isinstance(summary, dict) or "backend" not in summary:
        raise MiniRomeError(f"{path} has no key backend: every result names it.")
    return summary

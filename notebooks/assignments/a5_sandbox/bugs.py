"""More wrong implementations for the students' tests. Not released."""

from __future__ import annotations

from pathlib import Path

from mini_rome.course.paper import load_module

given = load_module(Path(__file__).with_name("given.py"))
Files = dict[str, str]


def an_empty_answer_passes(files: Files) -> float:
    """It is asked only whether the answer is there."""
    return float("sorted.txt" in files and files.get("names.txt") == given.START["names.txt"])


def ruined_input_passes(files: Files) -> float:
    """Nobody looks whether the input is still what it was."""
    return float(files.get("sorted.txt") == given.SOLVED["sorted.txt"])


def a_beginning_passes(files: Files) -> float:
    """The first line is taken for the whole."""
    answer = files.get("sorted.txt", "")
    return float(answer.startswith("fig\n") and files.get("names.txt") == given.START["names.txt"])


BUGS = {
    "test_task": {
        "an empty answer passes": an_empty_answer_passes,
        "a ruined input passes": ruined_input_passes,
        "the right beginning passes": a_beginning_passes,
    }
}

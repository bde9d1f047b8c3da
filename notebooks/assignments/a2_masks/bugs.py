"""More wrong implementations for the students' tests. Not released."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mini_rome.course.paper import load_module

given = load_module(Path(__file__).with_name("given.py"))
IGNORE = -100


def masked_turn_leaves_the_context(prompt_ids: list[int], turns: list[list[Any]]) -> list[list[int]]:
    """A masked turn is dropped from the row, and the model never sees a mistake."""
    return given.right(prompt_ids, [turn for turn in turns if turn[1]])


def observations_trained(prompt_ids: list[int], turns: list[list[Any]]) -> list[list[int]]:
    """What the environment wrote after a kept turn is imitated, too."""
    ids, labels = given.right(prompt_ids, turns)
    at = len(prompt_ids)
    for turn in turns[:-1]:
        at += len(turn[0])
        if turn[1]:
            labels[at : at + len(turn[2])] = turn[2]
        at += len(turn[2])
    return [ids, labels]


def stop_token_untrained(prompt_ids: list[int], turns: list[list[Any]]) -> list[list[int]]:
    """The agent never learns to end a response."""
    ids, labels = given.right(prompt_ids, turns)
    return [ids, [IGNORE if token == 9 else label for token, label in zip(ids, labels, strict=True)]]


BUGS = {
    "test_rows": {
        "a masked turn leaves the context": masked_turn_leaves_the_context,
        "observations are trained": observations_trained,
        "the stop token is not trained": stop_token_untrained,
    }
}

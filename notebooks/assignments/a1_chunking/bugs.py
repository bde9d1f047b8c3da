"""More wrong implementations for the students' tests. Not released."""

from __future__ import annotations

from pathlib import Path

from mini_rome.course.paper import load_module

given = load_module(Path(__file__).with_name("given.py"))


def observations_inside(turns):
    """The answer of the environment belongs to the chunk before it."""
    (row,) = given.right(turns)
    ids, last = [], -1
    for value in row["chunk_ids"]:
        last = max(last, value)
        ids.append(last)
    return [{"ids": row["ids"], "chunk_ids": ids}]


def one_row_per_chunk(turns):
    """K rows, so K optimiser steps' worth of samples from one trajectory."""
    return [given.right(turns[: k + 1])[0] for k in range(len(turns))]


def last_observation_kept(turns):
    """What the environment wrote after the last response is in the row."""
    (row,) = given.right(turns)
    tail = turns[-1][1]
    return [{"ids": row["ids"] + tail, "chunk_ids": row["chunk_ids"] + [-1] * len(tail)}]


BUGS = {
    "test_rows": {
        "observations inside the chunk": observations_inside,
        "one row per chunk, K optimiser steps": one_row_per_chunk,
        "the last observation is kept": last_observation_kept,
    }
}

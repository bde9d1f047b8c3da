"""What `test_rows` is tried on: a right implementation and the bug that is described; more bugs when graded."""

from __future__ import annotations

from mini_rome.chunking import pack
from mini_rome.course.paper import Detection
from mini_rome.course.wire import TASK
from mini_rome.types import Trajectory, Turn

Rows = list[dict[str, list[int]]]


def trajectory(turns: list[list[list[int]]]) -> Trajectory:
    made = [Turn(ids, [-0.5] * len(ids), "", [], observation_ids=observed) for ids, observed in turns]
    return Trajectory(TASK, [1], made)


def right(turns: list[list[list[int]]]) -> Rows:
    """One row for a trajectory, its chunk ids carried from the rollout."""
    sample = pack(trajectory(turns))
    return [{"ids": sample.completion_ids, "chunk_ids": sample.chunk_ids}]


def from_runs_of_the_mask(turns: list[list[list[int]]]) -> Rows:
    """A chunk is taken to be a run of the policy's tokens."""
    sample = pack(trajectory(turns))
    number, before, ids = -1, 0, []
    for mine in sample.env_mask:
        number += mine and not before
        before = mine
        ids.append(number if mine else -1)
    return [{"ids": sample.completion_ids, "chunk_ids": ids}]


def check(turns: list[list[list[int]]]) -> None:
    """The grader computes only with small trajectories."""
    if not isinstance(turns, list) or not 1 <= len(turns) <= 16:
        raise ValueError("turns must be a list of 1 to 16 turns")
    for turn in turns:
        if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(part, list) for part in turn):
            raise ValueError("a turn must be [ids, observation_ids]")
        for token in [*turn[0], *turn[1]]:
            if type(token) is not int or not 0 <= token < 1_000_000:
                raise ValueError("a token must be an integer from 0 to 999999")
        if not 1 <= len(turn[0]) <= 16 or len(turn[1]) > 16:
            raise ValueError("a response must have 1 to 16 tokens, an observation at most 16")


DETECTIONS = [Detection("test_rows", 4, right, {"chunk ids from runs of the mask": from_runs_of_the_mask}, check)]

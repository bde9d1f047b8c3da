"""What must hold of assignment 1: 16 points here, 4 for the test in given.py and bugs.py."""

import random
from typing import Any

from mini_rome.course import draws
from mini_rome.course.paper import Property

HOURS = 2
ALLOWED = ("types", "errors")


def fresh(rng: random.Random) -> list[tuple[Any, ...]]:
    return [(draws.trajectory(rng, turns),) for turns in (1, 2, 3, 5, 8)]


def touching(rng: random.Random) -> list[tuple[Any, ...]]:
    return [(draws.trajectory(rng, turns, observation_ids=[]),) for turns in (2, 3, 5)]


def resumed(rng: random.Random) -> list[tuple[Any, ...]]:
    return [(draws.trajectory(rng, turns, start),) for turns, start in ((3, 1), (5, 3), (6, 5), (4, 2))]


def empty_response(rng: random.Random) -> list[tuple[Any, ...]]:
    bad = draws.trajectory(rng, 4)
    bad.turns[2].ids, bad.turns[2].logprobs = [], []
    expert = draws.trajectory(rng, 4, start=3)
    expert.turns[1].ids, expert.turns[1].logprobs = [], []
    return [(draws.trajectory(rng, 4),), (bad,), (expert,)]


def rows(rng: random.Random) -> list[tuple[Any, ...]]:
    return [(draws.chunk_row(rng, length),) for length in (1, 4, 9, 20)]


def broken_rows(rng: random.Random) -> list[tuple[Any, ...]]:
    good = [0] * rng.randint(1, 3) + [-1] + [1] * rng.randint(1, 3)
    return [(good,), ([*good, 3],), ([*good, 0],), ([1, 2],), ([*good, -2],), ([-1, -1],)]


PROPERTIES = [
    Property("responses are chunks", 3, "chunk_ids", fresh, "every response is one chunk, observations are in none"),
    Property("adjacent responses", 3, "chunk_ids", touching, "responses with no observation between them stay two"),
    Property("after an expert prefix", 2, "chunk_ids", resumed, "the first response of the policy is chunk 0"),
    Property("the expert's own", 2, "expert_chunk_ids", resumed, "the expert's turns are numbered from 0"),
    Property("tokens in order", 2, "completion_ids", fresh, "responses and observations follow each other"),
    Property("no empty chunk", 1, "completion_ids", empty_response, "a policy's response without tokens is refused"),
    Property("K of a row", 1, "number_of_chunks", rows, "K is the number of different chunks"),
    Property("broken rows", 2, "number_of_chunks", broken_rows, "ids that are not 0..K-1 in order are refused"),
]

"""What must hold of assignment 2: 16 points here, 4 for the test in given.py and bugs.py."""

import random
from typing import Any

from mini_rome.course import draws
from mini_rome.course.paper import Property
from mini_rome.course.wire import TURN_FIELDS
from mini_rome.types import Turn

HOURS = 3
ALLOWED = ("types", "errors")


def turns_of(rng: random.Random, count: int) -> list[Turn]:
    """Mixed turns: failures, repeats, edited history."""
    made = [draws.turn(rng) for _ in range(count)]
    made[rng.randrange(count)].status = rng.choice(("timeout", "oom"))
    made[rng.randrange(count)].malformed = True
    made[rng.randrange(count)].reasons = [rng.choice(("pruned", "compressed", "kept by hand"))]
    return made


def exit_codes(rng: random.Random) -> list[tuple[Any, ...]]:
    codes = [[0, 1, 2, None, 127], [1, 0, 1], [2, 2, 0, 1]]
    return [
        ([draws.turn(rng, exit_code=code) for code in row], [0, 1] if n == 2 else [0]) for n, row in enumerate(codes)
    ]


def failures(rng: random.Random) -> list[tuple[Any, ...]]:
    fields: list[dict[str, Any]] = [
        {"status": "timeout", "exit_code": 0}, {"malformed": True, "exit_code": None}, {"exit_code": 0},
        {"status": "oom", "exit_code": 137}, {"exit_code": None},
    ]  # fmt: skip
    rng.shuffle(fields)
    return [([draws.turn(rng, **each) for each in fields], [0]), (turns_of(rng, 8), [0, 1])]


def repeats(rng: random.Random) -> list[tuple[Any, ...]]:
    a, b = rng.sample(draws.COMMANDS, 2)
    plan = [
        (a, "x"),
        (b, "y"),
        (a, "x"),
        (a, "z"),
        (a, "x"),
        (a, " x".strip()),
        ("", "x"),
        ("", "x"),
        (f" {b}  ", "y"),
    ]
    return [([draws.turn(rng, command=command, observation=seen) for command, seen in plan],)]


def edited(rng: random.Random) -> list[tuple[Any, ...]]:
    reasons = [["pruned"], [], ["compressed"], ["kept by hand"], ["exit_code", "pruned"]]
    rng.shuffle(reasons)
    commands = rng.sample(draws.COMMANDS, 5)
    return [([draws.turn(rng, command=c, reasons=r) for c, r in zip(commands, reasons, strict=True)],)]


def trajectories(rng: random.Random) -> list[tuple[Any, ...]]:
    prompt = [rng.randrange(10, 1000) for _ in range(3)]
    return [
        (prompt, [draws.turn(rng, exit_code=0, command=c) for c in draws.COMMANDS[:3]]),
        (prompt, turns_of(rng, 8)),
    ]


def rows(rng: random.Random) -> list[tuple[Any, ...]]:
    batch = []
    for count in (2, 6, 3):
        turns = [{name: getattr(turn, name) for name in TURN_FIELDS} for turn in turns_of(rng, count)]
        batch.append({"prompt_ids": [rng.randrange(10, 1000)], "turns": turns})
    return [(batch, rng.randrange(1, 9)), (batch[:1], 0)]


PROPERTIES = [
    Property("exit codes", 2, "error_mask", exit_codes, "an exit code that is not benign masks the turn"),
    Property(
        "other failures", 2, "error_mask", failures, "a malformed call or a status other than ok masks the turn"
    ),
    Property("redundant turns", 3, "relevance_mask", repeats, "the last output of the same commands decides"),
    Property("edited history", 1, "relevance_mask", edited, "pruned and compressed turns are masked, others are not"),
    Property("labels", 4, "masked_labels", trajectories, "masked turns stay in the context and out of the loss"),
    Property("batches", 4, "collate", rows, "padding is on the right, with attention 0 and no label"),
]

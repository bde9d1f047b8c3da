"""What must hold of assignment 4: 20 points here, 4 for the test in given.py and bugs.py."""

import random
from typing import Any

from mini_rome.course.paper import Property
from mini_rome.families import FAMILIES

HOURS = 4
ALLOWED = ("types", "errors", "sandbox")


def task(rng: random.Random, chunks: int) -> Any:
    return FAMILIES[rng.choice(("notes", "branches", "checks"))].make(rng.randrange(10_000), chunks)


def experts(rng: random.Random) -> list[tuple[Any, ...]]:
    made = [task(rng, chunks) for chunks in (1, 3, 5)]
    return [({**each.files}, [*each.expert[:-1], "echo done > end", *each.expert[-1:]]) for each in made]


def forks(rng: random.Random) -> list[tuple[Any, ...]]:
    made = []
    for p in (0, 2, 4):
        word = rng.choice(("amber", "coral", "linen"))
        commands = [f"echo {word}{k} >> log && cat log" for k in range(5)]
        attempts = ["cat log", f"echo {word} >> log; cat log", "ls", "rm -f log a; ls", "cat a log"]
        made.append(({"a": f"{word} {rng.randrange(1000)}\n"}, commands, p, rng.sample(attempts, 5)))
    return made


def outcomes(rng: random.Random, batches: int, rate: float) -> list[list[bool]]:
    return [[rng.random() < rate for _ in range(rng.randint(1, 5))] for _ in range(batches)]


def easy_windows(rng: random.Random) -> list[tuple[Any, ...]]:
    return [(chunks, outcomes(rng, 12, 0.7), rng.choice((0.5, 0.7)), 1) for chunks in (1, 4, 8)]


def windows(rng: random.Random) -> list[tuple[Any, ...]]:
    return [(8, outcomes(rng, 20, 0.75), rng.choice((0.6, 0.7)), window) for window in (2, 3, 4)]


def mixed_starts(rng: random.Random) -> list[tuple[Any, ...]]:
    return [(rng.randint(2, 16), rng.randint(1, 8), rng.randint(1, 20)) for _ in range(12)] + [(5, 8, 3), (9, 1, 4)]


def scored(rng: random.Random) -> list[tuple[Any, ...]]:
    made = []
    for _ in range(4):
        rows = [[rng.choice("ab"), rng.randrange(4), rng.choice((True, False, False, None))] for _ in range(14)]
        made.append((rows,))
    return made


def curves(rng: random.Random) -> list[tuple[Any, ...]]:
    low, high = rng.randint(1, 3), rng.randint(3, 4)  # 27 to 32 of 32: 0.03, enough for one test, not for five
    made = [([0, rng.randint(28, 32), 32], [32, 32, 32]), ([27] * low + [32] * high, [32] * (low + high))]
    for chunks in (2, 4, 6):
        rate, trials, won = rng.uniform(0.0, 0.2), [], []
        for _ in range(chunks):
            rate = min(1.0, rate + rng.choice((0.0, 0.05, 0.5)))
            trials.append(rng.randint(32, 48))
            won.append(sum(rng.random() < rate for _ in range(trials[-1])))
        made.append((won, trials))
    return made


PROPERTIES = [
    Property("states before each chunk", 3, "states", experts, "the states are those before each command", box=True),
    Property("attempts at a fork", 4, "answers_from", forks, "every attempt starts from the same state", box=True),
    Property(
        "one batch is enough", 2, "sequential_rollback", easy_windows, "p moves back by one when the rate is reached"
    ),
    Property(
        "longer windows", 3, "sequential_rollback", windows, "the window must be full, and is emptied by a move"
    ),
    Property(
        "mixed starts", 3, "parallel_starts", mixed_starts, "anchors reach from 0 to K-1, rollouts are shared evenly"
    ),
    Property("failed forks", 2, "failed_forks", scored, "a fork failed where all that was scored failed"),
    Property(
        "crucial chunks", 3, "crucial_chunks", curves, "a chunk is crucial where Fisher's test, by Holm, says so"
    ),
]

"""Text for continual pre-training, all of it our own: code-centric tasks from small pure functions, and tool text.

A function gets a bug, the function is said with the bug, and the task is to name the faulty line (localise), to write
the line that was there (repair), or to write a call that tells the two apart (write a test). What is asked of a test
is proved by running both functions. The paper uses about 1 M repositories; here a dozen functions with other names
and numbers every time.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from mini_rome.families import get_family
from mini_rome.families.base import NAMES

# (arguments, body); NUM stands for a number, FUN for the function's name, A and B for its arguments.
FUNCTIONS = (
    ("A, B", "C = A + B\nreturn C * NUM"),
    ("A, B", "if A > B:\n    return A - B\nreturn NUM"),
    ("A", "C = 0\nfor D in range(A):\n    C = C + D\nreturn C"),
    ("A, B", "C = A * NUM\nreturn C - B"),
    ("A", "if A < NUM:\n    return NUM\nreturn A + 1"),
    ("A, B", "C = A - B\nif C < 0:\n    return 0 - C\nreturn C"),
    ("A", "C = 1\nfor D in range(1, A + 1):\n    C = C * D\nreturn C"),
    ("A, B", "if A == B:\n    return NUM\nreturn A * B"),
    ("A", "C = A * A\nreturn C + NUM"),
    ("A, B", "C = A\nif B > A:\n    C = B\nreturn C + NUM"),
    ("A", "if A % NUM == 0:\n    return A // NUM\nreturn A"),
    ("A, B", "C = 0\nfor D in range(B):\n    C = C + A\nreturn C"),
)
BUGS = ((" + ", " - "), (" - ", " + "), (" * ", " + "), (" > ", " < "), (" < ", " > "), (" == ", " > "))
VALUES = range(0, 7)


@dataclass(frozen=True)
class Bug:
    """A function, the same with one line changed, and a call at which the two differ."""

    name: str
    right: tuple[str, ...]
    wrong: tuple[str, ...]
    line: int  # of the change, from 1
    call: str
    value: int  # what the right function gives there


def make_bug(rng: random.Random) -> Bug:
    """A function with a bug that shows at some small arguments."""
    while True:
        arguments, body = rng.choice(FUNCTIONS)
        names = rng.sample(NAMES, 5)
        text = f"def FUN({arguments}):\n" + "\n".join(f"    {line}" for line in body.split("\n"))
        for letter, name in zip("ABCD", names[1:], strict=True):
            text = re.sub(rf"\b{letter}\b", name, text)
        text = text.replace("NUM", str(rng.randint(2, 9))).replace("FUN", names[0])
        right = tuple(text.split("\n"))
        places = [(i, old, new) for i, line in enumerate(right) for old, new in BUGS if i and old in line]
        index, old, new = rng.choice(places)
        wrong = (*right[:index], right[index].replace(old, new, 1), *right[index + 1 :])
        found = _difference(names[0], right, wrong, arguments.count(",") + 1)
        if found is not None:
            return Bug(names[0], right, wrong, index + 1, *found)


def run_function(name: str, lines: tuple[str, ...]) -> Callable[..., int]:
    """Our own function, compiled here: it comes from FUNCTIONS, never from a model."""
    space: dict[str, Callable[..., int]] = {}
    exec("\n".join(lines), {"range": range, "__builtins__": {}}, space)
    return space[name]


def _difference(name: str, right: tuple[str, ...], wrong: tuple[str, ...], count: int) -> tuple[str, int] | None:
    """The first call at which both give a number and not the same one."""
    one, other = run_function(name, right), run_function(name, wrong)
    for values in product(VALUES, repeat=count):
        try:
            given, broken = one(*values), other(*values)
        except ZeroDivisionError:
            continue
        if given != broken:
            return f"{name}({', '.join(map(str, values))})", given
    return None


def code_task(rng: random.Random) -> tuple[str, str]:
    """(question, answer) of one code-centric task."""
    bug = make_bug(rng)
    said = "\n".join(bug.wrong)
    kind = rng.choice(("localise", "repair", "test"))
    if kind == "localise":
        return f"{said}\n{bug.call} must give {bug.value}. Which line is wrong?", f"line {bug.line}"
    if kind == "repair":
        return f"{said}\nLine {bug.line} is wrong. Write it right.", bug.right[bug.line - 1].strip()
    right = "\n".join(bug.right)
    asked = f"{right}\nWrite a test that fails for {bug.wrong[bug.line - 1].strip()}"
    return asked, f"assert {bug.call} == {bug.value}"


def tool_text(rng: random.Random, families: list[str]) -> tuple[str, str]:
    """(question, answer): a file of a training instance of a shell family, and the command that answers it."""
    family = get_family(rng.choice(families))
    task = family.make(rng.randrange(10**6), rng.randint(1, 4))
    return task.instruction, task.expert[0]


def reasoning(rng: random.Random) -> tuple[str, str]:
    """(question, answer): what a function gives for small arguments."""
    bug = make_bug(rng)
    return "\n".join(bug.right) + f"\n{bug.call}", f"{bug.value}"


def general(rng: random.Random) -> tuple[str, str]:
    """(question, answer) without a tool: putting words in order or counting them."""
    words = rng.sample(NAMES, rng.randint(3, 5))
    if rng.random() < 0.5:
        return f"Put in order: {' '.join(words)}", " ".join(sorted(words))
    return f"How many words: {' '.join(words)}", str(len(words))


def stage_one(families: list[str], seed: int) -> Iterator[tuple[str, str]]:
    """Without end: code-centric tasks, reasoning and tool text in the same parts; no share is in the paper."""
    rng = random.Random(f"cpt/{seed}")
    while True:
        yield code_task(rng)
        yield reasoning(rng)
        yield tool_text(rng, families)

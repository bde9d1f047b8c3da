"""What the tool-use families share: a database with a scripted customer in it, and the check of its final state.

The customer is a list of things still to be said, in the database; every `say` of the agent gets the next one. In the
multi-turn variant these are the wishes themselves; in the single-turn variant the instruction lists all wishes by
number, and the customer only says which number is next.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from mini_rome.families.base import COLOURS
from mini_rome.tools import call_body
from mini_rome.types import Verdict

DATABASE = "database.json"
LANGUAGES = ("en", "zh")
TWO_COLOURS = tuple(itertools.permutations(COLOURS, 2))

Database = dict[str, Any]


def next_words(database: Database) -> dict[str, str]:
    """What the customer says next; the last words again and again."""
    script = database["script"]
    return {"user": script.pop(0) if len(script) > 1 else script[0]}


def tell(
    wishes: Sequence[str], replies: Sequence[Sequence[str]], last: str, bye: str, at_once: bool
) -> tuple[str, list[str]]:
    """(what the instruction says of the wishes, what the customer says one by one). `replies` follow each wish.

    >>> tell(["a", "b"], [[], ["c"]], "last, ", "bye", at_once=False)
    ('a', ['last, b', 'c', 'bye'])
    >>> tell(["a", "b"], [[], []], "last, ", "bye", at_once=True)
    ('1 a\\n2 last, b', ['2', 'bye'])
    """
    told = [*wishes[:-1], f"{last}{wishes[-1]}"]
    if at_once:
        return "\n".join(f"{n} {wish}" for n, wish in enumerate(told, 1)), [*map(str, range(2, len(told) + 1)), bye]
    spoken = [line for wish, more in zip(told, replies, strict=True) for line in (wish, *more)]
    return spoken[0], [*spoken[1:], bye]


def expect_state(expected: Mapping[str, Any], files: Mapping[str, bytes]) -> Verdict:
    """1 when these entries of the final database are exactly as expected, else 0 with the first that is not."""
    if DATABASE not in files:
        return Verdict(0.0, f"{DATABASE} is missing")
    try:
        database = json.loads(files[DATABASE])
    except (ValueError, RecursionError):
        return Verdict(0.0, f"{DATABASE} is no JSON")
    if not isinstance(database, dict):
        return Verdict(0.0, f"{DATABASE} is no object")
    for key, value in expected.items():
        if database.get(key) != value:
            return Verdict(0.0, f"{key} is not as it should be in the end")
    return Verdict(1.0, "the database is as it should be")


def wrong_name(chunk: str, missing: str, otherwise: str) -> str:
    """The first call of a chunk with a name that is nowhere in place of its first argument: it fails.

    Where that call has no name (`say`, `buy`), a call of the tool `otherwise`.

    >>> wrong_name('cancel {"item":"plum"}\\nsay {"text":"done"}', "oak", "get_order")
    'cancel {"item":"oak"}'
    >>> wrong_name('say {"text":"no"}', "oak", "get_order")
    'get_order {"id":"oak"}'
    """
    tool, _, text = chunk.partition("\n")[0].partition(" ")
    if tool in ("say", "buy"):
        return call_body(otherwise, id=missing)
    arguments = json.loads(text)
    return call_body(tool, **{**arguments, next(iter(arguments)): missing})


def absent(names: Sequence[str], text: str, rng: random.Random) -> str:
    """One of the names that the text does not hold in quotes."""
    return rng.choice([name for name in names if f'"{name}"' not in text])

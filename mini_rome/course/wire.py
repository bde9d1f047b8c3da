"""Values as JSON, between the grader and the box: never pickle, and nothing of a type is run to decode it.

Numbers, text, None and lists stand for themselves (a tuple becomes a list, NaN and infinity are written as JSON's
readers in Python take them); what JSON lacks is an object with one key that begins with `~`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from mini_rome.types import Task, Trajectory, Turn, Verdict

TURN_FIELDS = (
    "ids", "text", "commands", "observation", "observation_ids", "exit_code", "status", "malformed", "reasons",
)
TASK = Task("exercise", "exercise", "course", "", {}, (), lambda files: Verdict(0.0))


def encode(value: Any) -> Any:
    """Plain JSON data. Raises TypeError for a type that has no form here.

    >>> encode({"a": (1, b"x")})
    {'~dict': [['a', [1, {'~bytes': 'eA=='}]]]}
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, bytes):
        return {"~bytes": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return {"~dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, Turn):
        return {"~Turn": {name: encode(getattr(value, name)) for name in TURN_FIELDS}}
    if isinstance(value, Trajectory):
        turns = [encode(turn) for turn in value.turns]
        return {"~Trajectory": {"prompt_ids": value.prompt_ids, "turns": turns, "start": value.start}}
    if type(value).__module__.partition(".")[0] in ("torch", "numpy"):  # by name: neither is imported for this
        return {"~tensor": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    raise TypeError(f"a value of type {type(value).__name__} was returned, which is not what the docstring asks for")


def decode(data: Any) -> Any:
    """The inverse of `encode`, for the side that trusts the other: the box, and files of the course."""
    if isinstance(data, list):
        return [decode(item) for item in data]
    if not isinstance(data, dict):
        return data
    if "~bytes" in data:
        return base64.b64decode(data["~bytes"])
    if "~dict" in data:
        return {decode(key): decode(item) for key, item in data["~dict"]}
    if "~Turn" in data:
        return Turn(logprobs=[-0.5] * len(data["~Turn"]["ids"]), **decode_fields(data["~Turn"]))
    if "~Trajectory" in data:
        return Trajectory(task=TASK, **decode_fields(data["~Trajectory"]))
    import torch

    return torch.tensor(data["~tensor"], dtype=getattr(torch, data["dtype"]))


def decode_fields(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: decode(value) for name, value in fields.items()}


def plain(data: Any) -> Any:
    """Encoded data for comparison: a tensor is its nested lists, a mapping a dict of text keys. Decodes no type.

    Raises ValueError for what `encode` does not make: whoever sends it is not trusted.
    """
    if isinstance(data, list):
        return [plain(item) for item in data]
    if not isinstance(data, dict):
        return data
    if "~tensor" in data:
        return plain(data["~tensor"])
    if "~bytes" in data:
        return f"bytes {data['~bytes']}"
    pairs = data.get("~dict")
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise ValueError("an object of unknown form")
    if any(isinstance(key, list | dict) for key, _ in pairs):  # as text, nested ones would double with each level
        raise ValueError("a key that is neither text nor number")
    return {str(plain(key)): plain(item) for key, item in pairs}


def dumps(data: Any) -> str:
    """One line of JSON; equal data give equal text."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"))

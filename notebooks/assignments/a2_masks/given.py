"""What `test_rows` is tried on: a right implementation and the bug that is described; more bugs when graded."""

from __future__ import annotations

from typing import Any

from mini_rome.course.paper import Detection
from mini_rome.masks import MaskPolicy, turn_labels
from mini_rome.types import Turn

VOCABULARY = {1: "l", 2: "s", 3: "ls", 4: " ", 5: "a", 6: "-", 7: "-a", 9: "<end>"}
Turns = list[list[Any]]  # [ids, kept, observation_ids]


def right(prompt_ids: list[int], turns: Turns) -> list[list[int]]:
    """Token ids end to end, as they were sampled."""
    made = [
        Turn(ids, [], str(number), [str(number)], observation_ids=observed, exit_code=0 if kept else 1)
        for number, (ids, kept, observed) in enumerate(turns)
    ]
    return list(turn_labels(prompt_ids, made, MaskPolicy(irrelevant=False)))


def tokenise(text: str) -> list[int]:
    """Greedy, the longest token first: as most tokenizers would, and as no sampler has to."""
    ids, names = [], sorted(VOCABULARY.items(), key=lambda pair: -len(pair[1]))
    while text:
        token, name = next((token, name) for token, name in names if text.startswith(name))
        ids.append(token)
        text = text[len(name) :]
    return ids


def tokenised_again(prompt_ids: list[int], turns: Turns) -> list[list[int]]:
    """Every response is decoded to text and encoded again."""
    return right(prompt_ids, [[tokenise("".join(VOCABULARY[i] for i in ids)), *rest] for ids, *rest in turns])


def check(prompt_ids: list[int], turns: Turns) -> None:
    """The grader computes only with small trajectories."""
    if not isinstance(turns, list) or not 1 <= len(turns) <= 16:
        raise ValueError("turns must be a list of 1 to 16 turns")
    for turn in turns:
        if not isinstance(turn, list) or len(turn) != 3 or type(turn[1]) is not bool:
            raise ValueError("a turn must be [ids, kept, observation_ids], kept being true or false")
    for ids in [prompt_ids, *(turn[0] for turn in turns), *(turn[2] for turn in turns)]:
        if not isinstance(ids, list) or len(ids) > 16 or not all(type(i) is int and i in VOCABULARY for i in ids):
            raise ValueError("ids must be lists of at most 16 ids of VOCABULARY")


DETECTIONS = [Detection("test_rows", 4, right, {"ids from text that is tokenised again": tokenised_again}, check)]

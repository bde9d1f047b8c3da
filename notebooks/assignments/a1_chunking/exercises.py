"""Assignment 1: from a trajectory to interaction chunks and token ids (paper, section 3.2.4).

A `Turn` has `ids`, the tokens of one response, and `observation_ids`, what the environment wrote after it. A
`Trajectory` has `prompt_ids`, `turns`, and `start`: so many turns at the beginning are the expert's. Only lists of
integers are needed; of mini_rome, only mini_rome.types can be imported where you are graded.
"""

from __future__ import annotations

from collections.abc import Callable

from mini_rome import chunking
from mini_rome.types import Trajectory

OUTSIDE = -1  # chunk id of every token that is in no chunk


def chunk_ids(trajectory: Trajectory) -> list[int]:
    """Chunk id of every token after the prompt.

    The policy's responses are chunks 0, 1, 2, ... in order, the first one after the expert's turns being 0. All
    tokens of a response have its number; tokens of the expert and of observations have OUTSIDE. The observation
    after the last response conditions nothing and is left out.

    Responses [5, 2] and [6] with the observation [7] between them: [0, 0, -1, 1].
    """
    return chunking.chunk_ids(trajectory)


def expert_chunk_ids(trajectory: Trajectory) -> list[int]:
    """As `chunk_ids`, but the expert's turns are chunks 0, 1, ..., and the policy's tokens are OUTSIDE."""
    return chunking.chunk_ids(trajectory, expert=True)


def completion_ids(trajectory: Trajectory) -> list[int]:
    """The tokens that `chunk_ids` numbers: responses and observations in the order they came, the prompt left out.

    Raises ValueError for a policy's response without tokens: such a chunk could not be trained.
    """
    return chunking.pack(trajectory, prefix="completion").completion_ids


def number_of_chunks(ids: list[int]) -> int:
    """K of one row of chunk ids. Raises ValueError unless they are 0..K-1 in order, without a gap, or OUTSIDE.

    [0, 0, -1, 1] has 2; [0, -1, 2] has a gap; [0, 1, 0] goes back; [-2] is no chunk id.
    """
    return chunking.validate_chunk_ids(ids)


def test_rows(implementation: Callable[[list[list[list[int]]]], list[dict[str, list[int]]]]) -> None:
    """A test: it must pass for a right implementation and fail, by `assert`, for a wrong one.

    implementation([[ids, observation_ids], ...]) gets the turns of one trajectory, at most 16 with at most 16 tokens
    each, and returns its training rows, {"ids": [...], "chunk_ids": [...]} each, numbered as above.

    A bug that was found in the wild: chunk ids made from runs of the mask "1 = the policy's token". Call the
    implementation with turns that tell such a bug from the truth, and assert what must come back.
    """
    rows = implementation([[[5, 2], [7]], [[6], []], [[8, 9], [4]]])
    assert rows == [{"ids": [5, 2, 7, 6, 8, 9], "chunk_ids": [0, 0, -1, 1, 2, 2]}]

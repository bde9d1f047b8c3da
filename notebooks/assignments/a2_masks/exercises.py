"""Assignment 2: masked supervised fine-tuning (paper, section 3.2.2, eqs. 1-2).

The agent imitates trajectories that contain mistakes and repairs. A turn whose call failed, or that does not serve
the sub-task, stays in the context and out of the loss: m_k = m_err * m_task, for whole turns. A `Turn` has ids,
commands, observation, observation_ids, exit_code, status, malformed and reasons; see mini_rome.types.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mini_rome import collator, masks
from mini_rome.types import Turn

IGNORE = -100  # label of a token that is not trained
VOCABULARY = {1: "l", 2: "s", 3: "ls", 4: " ", 5: "a", 6: "-", 7: "-a", 9: "<end>"}  # of `test_rows`; ids: 1 + 2 or 3


def error_mask(turns: list[Turn], benign_exit_codes: list[int]) -> list[int]:
    """m_err of each turn (eq. 1): 0 where the call or its execution failed, else 1.

    Failed: malformed, or a status other than "ok", or an exit code that is not among the benign ones. An exit code of
    None, where nothing was run, is no failure by itself.
    """
    return masks.error_mask(turns, masks.MaskPolicy(benign_exit_codes=tuple(benign_exit_codes)))


def relevance_mask(turns: list[Turn]) -> list[int]:
    """m_task of each turn (eq. 2), by two rules: 0 where the turn is redundant or its history was edited, else 1.

    Redundant: its commands were run in an earlier turn and gave this observation the last time they were run. White
    space does not tell commands apart; a turn without commands is never redundant. Edited: "pruned" or "compressed"
    is among its reasons.
    """
    return masks.relevance_mask(turns, masks.MaskPolicy(similarity=2.0, loop_period=0))


def masked_labels(prompt_ids: list[int], turns: list[Turn]) -> list[list[int]]:
    """[input_ids, labels] of one trajectory, of equal length.

    input_ids: the prompt, and the ids of every turn with its observation_ids after it; the last observation is left
    out. labels: a turn's own ids where m_err * m_task = 1 (benign: exit code 0), IGNORE everywhere else. Labels are
    not shifted.

    Prompt [1], a failed turn [4, 9] answered by [7], then [5, 9]: [[1, 4, 9, 7, 5, 9], [-100] * 4 + [5, 9]].
    """
    return list(masks.turn_labels(prompt_ids, turns, masks.MaskPolicy(similarity=2.0, loop_period=0)))


def collate(rows: list[dict[str, Any]], pad_token_id: int) -> dict[str, Any]:
    """A batch: input_ids, attention_mask and labels (B, T), lists or tensors, padded on the right.

    A row is {"prompt_ids": [...], "turns": [...]}, a turn the fields of a `Turn` but for its log-probs:
    `Turn(logprobs=[], **turn)`. Padding is pad_token_id, 0 and IGNORE.
    """
    return collator.MaskedSFTCollator(pad_token_id, masks.MaskPolicy(similarity=2.0, loop_period=0))(rows)


def test_rows(implementation: Callable[[list[int], list[list[Any]]], list[list[int]]]) -> None:
    """A test: it must pass for a right implementation and fail, by `assert`, for a wrong one.

    implementation(prompt_ids, [[ids, kept, observation_ids], ...]) returns [input_ids, labels] as `masked_labels`
    does; `kept` is true or false, at most 16 turns and 16 tokens each. Token ids are those of VOCABULARY.

    A bug that was found in the wild: the row is made from text, which is tokenised again; so the ids are not those
    that were sampled, although the text is the same. Choose turns that tell such a bug from the truth.
    """
    got = implementation([5], [[[1, 2, 9], True, [4]], [[3, 9], False, [5, 4]], [[6, 5, 9], True, [4]]])
    assert got == [[5, 1, 2, 9, 4, 3, 9, 5, 4, 6, 5, 9], [-100, 1, 2, 9, -100, -100, -100, -100, -100, 6, 5, 9]]

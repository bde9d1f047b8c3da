"""Rows for masked SFT, two ways that share `masks.turn_labels`: once as a dataset transform, or at batch time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mini_rome.masks import IGNORE, MaskPolicy, masked_labels, turn_labels
from mini_rome.types import Trajectory, Turn

# What the masks read of a turn; the rest (log-probs, safety events, wall time) stays out of a record.
RECORDED = (
    "ids", "text", "commands", "observation", "observation_ids", "exit_code", "status", "malformed", "reasons"
)  # fmt: skip


def to_sft_rows(trajectories: Iterable[Trajectory], policy: MaskPolicy) -> list[dict[str, list[int]]]:
    """The dataset transform: rows of input_ids and labels, which pack and batch like any tokenised SFT data.

    Trajectories without a kept turn are left out: they have nothing to train. Set `max_length=None` in SFTConfig, or
    TRL cuts rows at 1024 tokens without a word.
    """
    rows = []
    for trajectory in trajectories:
        input_ids, labels = masked_labels(trajectory, policy)
        if any(label != IGNORE for label in labels):
            rows.append({"input_ids": input_ids, "labels": labels})
    return rows


def to_records(trajectories: Iterable[Trajectory]) -> list[dict[str, Any]]:
    """Trajectories as plain data for a `datasets.Dataset`: prompt_ids and what the masks read of each turn."""
    trajectories = list(trajectories)
    for each in trajectories:
        each.check_trainable()
    return [
        {
            "prompt_ids": each.prompt_ids,
            "turns": [{name: getattr(turn, name) for name in RECORDED} for turn in each.turns],
        }
        for each in trajectories
    ]


@dataclass
class MaskedSFTCollator:
    """The mask policy applied at batch time, for policies that change and for walkthroughs.

    Takes rows of `to_records`; returns input_ids, attention_mask and labels (B, T) int64, padded on the right.
    SFTConfig needs remove_unused_columns=False and dataset_kwargs={"skip_prepare_dataset": True}; neither packing nor
    padding-free batches go with it.
    """

    pad_token_id: int
    policy: MaskPolicy = field(default_factory=MaskPolicy)

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        pairs = [
            turn_labels(row["prompt_ids"], [Turn(logprobs=[], **turn) for turn in row["turns"]], self.policy)
            for row in rows
        ]
        length = max(len(input_ids) for input_ids, _ in pairs)

        def padded(values: Iterable[list[int]], fill: int) -> Tensor:
            return torch.tensor([ids + [fill] * (length - len(ids)) for ids in values])

        return {
            "input_ids": padded((ids for ids, _ in pairs), self.pad_token_id),
            "attention_mask": padded(([1] * len(ids) for ids, _ in pairs), 0),
            "labels": padded((labels for _, labels in pairs), IGNORE),
        }

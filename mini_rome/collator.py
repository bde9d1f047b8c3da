"""Rows for masked SFT, two ways that share `masks.masked_labels`: once as a dataset transform, or at batch time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mini_rome.masks import IGNORE, MaskPolicy, masked_labels
from mini_rome.types import Trajectory


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


@dataclass
class MaskedSFTCollator:
    """The mask policy applied at batch time, for policies that change and for walkthroughs.

    Takes rows {"trajectory": Trajectory}; returns input_ids, attention_mask and labels (B, T) int64, padded on the
    right. Needs `remove_unused_columns=False` and `skip_prepare_dataset`, and goes neither with packing nor with
    padding-free batches.
    """

    pad_token_id: int
    policy: MaskPolicy = field(default_factory=MaskPolicy)

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        pairs = [masked_labels(row["trajectory"], self.policy) for row in rows]
        length = max(len(input_ids) for input_ids, _ in pairs)

        def padded(values: Iterable[list[int]], fill: int) -> Tensor:
            return torch.tensor([ids + [fill] * (length - len(ids)) for ids in values])

        return {
            "input_ids": padded((ids for ids, _ in pairs), self.pad_token_id),
            "attention_mask": padded(([1] * len(ids) for ids, _ in pairs), 0),
            "labels": padded((labels for _, labels in pairs), IGNORE),
        }

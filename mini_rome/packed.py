"""Attention in packed rows on a CPU: each row by itself. Not in the paper.

Several rows that stand in one are told apart by positions that begin at 0 again. Given this as a mask, a kernel
computes all pairs of tokens, most of them for nothing. On a GPU flash attention is the better way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "sdpa_packed"


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    position_ids: Tensor, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """query, key, value (B, heads, T, d), position_ids (B or 1, T) -> (B, T, heads, d). The mask is not looked at."""
    packs = []
    for number, positions in enumerate(position_ids.expand(len(query), -1)):
        starts = (positions == 0).nonzero()[:, 0]
        lengths = starts.diff(append=starts.new_tensor([len(positions)])).tolist()
        states = (each[number : number + 1].split(lengths, dim=2) for each in (query, key, value))
        rows = zip(*states, strict=True)
        found = [sdpa_attention_forward(module, *row, None, is_causal=True, **options)[0] for row in rows]
        packs.append(torch.cat(found, dim=1))
    return torch.cat(packs), None


AttentionInterface.register(NAME, _attention)


@contextmanager
def packed_attention(model: PreTrainedModel, packed: bool) -> Iterator[None]:
    """While open, rows that `model` is given on a CPU may be packed; nothing happens unless `packed`."""
    if not packed or model.device.type != "cpu" or model.config._attn_implementation != "sdpa":
        yield
        return
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")

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
    if position_ids[:, 0].any() or key.shape[2] != query.shape[2]:
        raise ValueError("packed attention: rows must begin at position 0, and there is no cache")
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


def _local(model: PreTrainedModel) -> bool:
    """Whether some layer sees a window or a part of the row only: that stands in the mask."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    parts = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return kinds != {"full_attention"} or any(part is not None for part in parts)


@contextmanager
def packed_attention(model: PreTrainedModel, packed: bool) -> Iterator[None]:
    """While open, `model` is trained on packed rows on a CPU. Nothing happens unless `packed`, nor to a model whose
    attention this is not: on a GPU, of another implementation, or not over the whole row."""
    if not packed or model.device.type != "cpu" or model.config._attn_implementation != "sdpa" or _local(model):
        yield
        return
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")

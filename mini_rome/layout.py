"""How rows of different length share a forward pass: little padding, and log-probs only where the loss needs them.

Rows come as TRL lays them out: prompts padded on the left, completions on the right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from trl.trainer.utils import split_tensor_dict

# prompt_ids, prompt_mask (B, P); completion_ids, completion_mask, chunk_ids, ... (B, T). A row whose episode had
# several linear contexts holds them all, one after the other; then `contexts` (B, T) says which each token is in.
Rows = dict[str, Tensor]


def sorted_by_length(parts: list[Rows]) -> list[Rows]:
    """The same rows in as many micro-batches, those of like length together."""
    whole = {key: torch.cat([part[key] for part in parts]) if v.ndim else v for key, v in parts[0].items()}
    lengths = whole["prompt_mask"].sum(dim=1) + whole["completion_mask"].sum(dim=1)
    order = lengths.argsort(stable=True)
    return split_tensor_dict({key: v[order] if v.ndim else v for key, v in whole.items()}, len(parts))


def score(model: nn.Module, parts: Sequence[Rows], **extra: Any) -> tuple[list[Tensor], Any]:
    """Log-probs of each part's completion tokens, (B, T) each, 0 off the chunks; and the model's output.

    One forward for all parts. Padding before, between and after a row's tokens is moved to its end and cut to the
    longest row; the head sees only tokens whose successor is in a chunk.
    """
    owners = [_owners(part) for part in parts]
    columns = [_sequences(part, own) for part, own in zip(parts, owners, strict=True)]
    width = max(ids.size(1) for ids, _, _ in columns)
    ids, mask, labels = (
        torch.cat([pad(c, (0, width - c.size(1)), value=filler) for c in column])
        for column, filler in zip(zip(*columns, strict=True), (0, 0, -100), strict=True)
    )
    order = mask.argsort(dim=1, descending=True, stable=True)[:, : int(mask.sum(dim=1).max())]
    ids, labels, short = ids.gather(1, order), labels.gather(1, order), mask.gather(1, order)
    output = model(input_ids=ids, attention_mask=short, labels=labels, fused_lm_head=True, **extra)
    # The first token of a row is predicted by nothing, so its column is missing.
    logps = output.log_probs.new_zeros(mask.shape).scatter(1, order[:, 1:], output.log_probs)
    shares = logps.split([len(ids) for ids, _, _ in columns])
    spans = [(part["prompt_ids"].size(1), part["chunk_ids"].size(1)) for part in parts]
    found = [share[:, first : first + own] for share, (first, own) in zip(shares, spans, strict=True)]
    return [_rows(each, part, own) for each, part, own in zip(found, parts, owners, strict=True)], output


Owners = tuple[Tensor, Tensor] | None  # of each sequence: its row, and which of the row's contexts it is, (S,) both


def _owners(part: Rows) -> Owners:
    """None where each row is one sequence."""
    if "contexts" not in part:
        return None
    contexts = part["contexts"]  # padding says 0, which every row has
    present = torch.zeros(len(contexts), int(contexts.max()) + 1, dtype=torch.bool, device=contexts.device)
    row, context = present.scatter_(1, contexts, True).nonzero(as_tuple=True)
    return row, context


def _sequences(part: Rows, owners: Owners) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, attention mask, labels (S, P + T) of prompt and completion; a label only where a token is in a chunk.

    A row of several contexts gives a sequence for each, in which the others' tokens are masked like padding.
    """
    ids = torch.cat([part["prompt_ids"], part["completion_ids"]], dim=1)
    mask = torch.cat([part["prompt_mask"], part["completion_mask"]], dim=1)
    labels = torch.where(part["chunk_ids"] >= 0, part["completion_ids"], -100)
    labels = pad(labels, (part["prompt_ids"].size(1), 0), value=-100)
    if owners is None:
        return ids, mask, labels
    row, context = owners
    mine = pad(part["contexts"], (part["prompt_ids"].size(1), 0))[row] == context[:, None]
    return ids[row], mask[row] * mine, labels[row].where(mine, -100)


def _rows(logps: Tensor, part: Rows, owners: Owners) -> Tensor:
    """Log-probs of sequences (S, T) as those of rows (B, T): each token has one in one of its row's sequences."""
    if owners is None:
        return logps
    return logps.new_zeros(part["chunk_ids"].shape).index_add(0, owners[0], logps)

"""Credit: the final reward, discounted per chunk and shared by all tokens of a chunk (paper, eq. 7)."""

from __future__ import annotations

import torch
from torch import Tensor


def chunk_returns(
    chunk_ids: Tensor, rewards: Tensor, gamma: float, num_chunks: int | Tensor | None = None
) -> Tensor:
    """G_k = gamma^(K-k) R for every token of chunk k: the last chunk gets R itself (eq. 7).

    The paper writes gamma^Delta(j, k) and leaves j undefined; j = K is the authors' later account. gamma = 1 gives
    the trajectory reward of eqs. 3-6.

    chunk_ids (B, T) int64, 0..K-1 and -1 outside; rewards (B,), NaN for a row that cannot be scored (its G is 0; the
    loss masks the row). num_chunks: K where the row shows only the first chunks of a trajectory, an int or (B,); by
    default the row's own count. Returns (B, T) in the dtype of rewards, 0 outside chunks.
    ValueError: gamma outside [0, 1], or an id below -1.

    >>> chunk_returns(torch.tensor([[0, 0, -1, 1, 2]]), torch.tensor([1.0]), 0.5)
    tensor([[0.2500, 0.2500, 0.0000, 0.5000, 1.0000]])
    """
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma={gamma}: the discount per chunk must lie in [0, 1]")
    ids = chunk_ids.int()
    if (lowest := int(ids.amin())) < -1:
        raise ValueError(f"chunk_ids has {lowest}: a token outside chunks is marked -1")
    own = ids.amax(dim=1) + 1
    chunks = own if num_chunks is None else torch.as_tensor(num_chunks, device=own.device).expand_as(own)
    reward = torch.where(torch.isfinite(rewards), rewards, 0.0)
    # One value per (row, k), spread to the tokens by a gather: the power is taken B K times, not B T times.
    k = torch.arange(int(own.max()) + 1, device=own.device)  # of the paper, 1..K; 0: outside
    table = reward[:, None] * gamma ** (chunks[:, None] - k).to(reward.dtype)  # (B, K + 1)
    table[:, 0] = 0
    first = (torch.arange(len(ids), device=ids.device) * len(k) + 1).int()
    return table.flatten().index_select(0, (ids + first[:, None]).flatten()).view_as(ids)

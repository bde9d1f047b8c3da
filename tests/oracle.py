"""Section 3.2.4 of the paper in float64 NumPy, written from the equations with plain loops, sharing no code with the
package; and random ragged batches to compare on. Slow and obvious on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

LEVELS = ("none", "token", "chunk", "sequence")
AGGREGATIONS = ("token", "chunk", "sum")


def searches(examples: int) -> settings:
    """Settings for so many examples; fewer in proportion under a profile that has fewer than 100 (mutants.py)."""
    return settings(max_examples=examples * settings().max_examples // 100, deadline=None)


@dataclass
class Batch:
    """Arrays (B, T) float64, chunk_ids int64, rewards (B,)."""

    logps: np.ndarray
    old: np.ndarray
    mu: np.ndarray
    chunk_ids: np.ndarray
    rewards: np.ndarray

    def rows(self, index: slice | list[int]) -> Batch:
        return Batch(self.logps[index], self.old[index], self.mu[index], self.chunk_ids[index], self.rewards[index])

    def with_garbage(self, values: list[float]) -> Batch:
        """Every value outside chunks, and every value of an unscorable row, replaced by one of `values` in turn."""
        outside = (self.chunk_ids < 0) | ~np.isfinite(self.rewards)[:, None]

        def spoil(array: np.ndarray, shift: int) -> np.ndarray:
            garbage = np.resize(np.roll(values, shift), array.shape)
            return np.where(outside, garbage, array)

        return replace(self, logps=spoil(self.logps, 0), old=spoil(self.old, 1), mu=spoil(self.mu, 2))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """logps (with gradient), old, mu, chunk_ids, rewards."""
        logps, old, mu, ids, rewards = map(
            torch.tensor, (self.logps, self.old, self.mu, self.chunk_ids, self.rewards)
        )
        return logps.requires_grad_(), old, mu, ids, rewards


def returns(chunk_ids: np.ndarray, rewards: np.ndarray, gamma: float) -> np.ndarray:
    """Eq. 7 token by token."""
    result = np.zeros(chunk_ids.shape)
    for b, row in enumerate(chunk_ids):
        total = row.max() + 1  # K
        for t, k in enumerate(row):
            if k >= 0 and np.isfinite(rewards[b]):
                result[b, t] = gamma ** (total - (k + 1)) * rewards[b]
    return result


def chunks_of(row: np.ndarray) -> list[np.ndarray]:
    """Positions of the tokens of each chunk of a row."""
    return [np.flatnonzero(row == k) for k in range(row.max() + 1)]


def unit(level: str, t: int, chunk: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Positions over which the ratio of token t is averaged."""
    return {"token": np.array([t]), "chunk": chunk, "sequence": np.flatnonzero(row >= 0)}[level]


def gradient(
    batch: Batch,
    gamma: float = 0.95,
    ratio_level: str = "chunk",
    mask_level: str = "chunk",
    threshold: float = 1.02,
    aggregation: str = "token",
    positive_ratio: bool = False,
) -> np.ndarray:
    """d loss / d log pi_theta (B, T): minus eq. 9 (or its ablation) over N."""
    g = returns(batch.chunk_ids, batch.rewards, gamma)
    grad, tokens, chunks = np.zeros(g.shape), 0, 0
    for b, row in enumerate(batch.chunk_ids):
        if not np.isfinite(batch.rewards[b]):
            continue
        for chunk in chunks_of(row):
            chunks += 1
            for t in chunk:
                tokens += 1
                weight = g[b, t]
                if ratio_level != "none" and (batch.rewards[b] <= 0 or positive_ratio):
                    where = unit(ratio_level, t, chunk, row)
                    rho = np.exp(np.mean(batch.logps[b, where] - batch.old[b, where]))
                    weight *= np.clip(rho, 0, 1)
                if mask_level != "none":
                    where = unit(mask_level, t, chunk, row)
                    if np.exp(np.mean(batch.old[b, where] - batch.mu[b, where])) > threshold:
                        weight = 0.0
                grad[b, t] = -weight / (len(chunk) if aggregation == "chunk" else 1)
    return grad / {"token": max(tokens, 1), "chunk": max(chunks, 1), "sum": 1}[aggregation]


def loss(batch: Batch, grad: np.ndarray) -> float:
    """The surrogate whose gradient at these log-probs is grad: the weights are constants."""
    return float(np.sum(grad[grad != 0] * batch.logps[grad != 0]))


def imitation_gradient(chunk_ids: np.ndarray, g: np.ndarray, aggregation: str = "token") -> np.ndarray:
    """Eq. 10, left."""
    grad, tokens, chunks = np.zeros(g.shape), 0, 0
    for b, row in enumerate(chunk_ids):
        for chunk in chunks_of(row):
            chunks, tokens = chunks + 1, tokens + len(chunk)
            grad[b, chunk] = -g[b, chunk] / (len(chunk) if aggregation == "chunk" else 1)
    return grad / {"token": max(tokens, 1), "chunk": max(chunks, 1), "sum": 1}[aggregation]


def masked_sft_loss(rows: list[tuple[list[tuple[int, int]], list[float]]]) -> float:
    """Eqs. 1-2 with numerator and denominator summed over the batch.

    rows: per trajectory the turns as (m_k, number of tokens) and the log-probs of all turn tokens in order.
    """
    numerator, denominator = 0.0, 0
    for turns, logps in rows:
        position = 0
        for keep, length in turns:
            numerator -= keep * sum(logps[position : position + length])
            denominator += keep * length
            position += length
    return numerator / denominator


@st.composite
def batches(draw: st.DrawFn, rewards: tuple[float, ...] = (-1.0, -0.5, 0.0, 0.3, 1.0, float("nan"))) -> Batch:
    """Ragged rows: no chunk, one token, the whole row, gaps of 0-3 tokens, tokens filtered inside a chunk, B = 1."""
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        row: list[int] = []
        for k in range(draw(st.integers(0, 4))):
            row += [-1] * draw(st.integers(0, 3))
            row += [k] + draw(st.lists(st.sampled_from((k, k, k, -1)), max_size=4))
        rows.append(row + [-1] * draw(st.integers(0, 2)))
    width = max(1, *map(len, rows))
    ids = np.array([row + [-1] * (width - len(row)) for row in rows], dtype=np.int64)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    old = -rng.uniform(0.1, 3, ids.shape)
    return Batch(
        logps=old + 0.5 * rng.standard_normal(ids.shape),
        old=old,
        mu=old + 0.05 * rng.standard_normal(ids.shape),
        chunk_ids=ids,
        rewards=np.array([draw(st.sampled_from(rewards)) for _ in rows]),
    )

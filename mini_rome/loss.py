"""The IPA loss, its ablations and the imitation term (paper, eqs. 3-6 and 8-10), as functions of (B, T) tensors.

Three policies, never one in place of another: `logps` are log pi_theta (the forward of this step, with gradient),
`old_logps` are log pi_old (the trainer's weights of the version that sampled the chunk), `sampler_logps` are log mu
(recorded when the tokens were sampled). mu is the measure the trajectories are drawn from; it is no factor of the
loss. There is no KL, entropy, critic, baseline or group normalisation in these equations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Level = Literal["none", "token", "chunk", "sequence"]
Aggregation = Literal["token", "chunk", "sum"]

# The paper's objectives as arguments of `ipa_loss`. All but "ipa" are stated with gamma = 1.
OBJECTIVES: dict[str, dict[str, Any]] = {
    "reinforce": {"ratio_level": "none", "mask_level": "none", "positive_ratio": False},  # eq. 3
    "tis": {"ratio_level": "sequence", "mask_level": "none", "positive_ratio": True},  # eq. 4
    "topr": {"ratio_level": "sequence", "mask_level": "none", "positive_ratio": False},  # eq. 5
    "baseline": {"ratio_level": "sequence", "mask_level": "token", "positive_ratio": False},  # eq. 6
    "ipa": {"ratio_level": "chunk", "mask_level": "chunk", "positive_ratio": False},  # eq. 9
}

# Every metric is a pair (value, count), in this order on every rank and step. Shares and means hold (sum, count);
# *_max, *_p01 and *_p99 hold (extreme, count). `merge_metrics` knows the rule of each.
METRICS = (
    "masked_chunks",  # share of chunks with m = 0 (for a token mask: mean share of their tokens)
    "clipped_negatives",  # share of the chunks of R <= 0 rows whose ratio exceeds 1
    "positive_share",  # proxy of the gradient share: sum of |token weight| of R > 0 rows, over that of all rows
    "negative_share",
    "mismatch_mean",  # |log pi_old - log mu| per token
    "mismatch_max",
    "staleness_mean",  # |log pi_theta - log pi_old| per token
    "staleness_max",
    "mismatch_p01",  # pi_old / mu per chunk, geometric mean over its tokens: both tails, the mask sees only one
    "mismatch_p99",
    "ratio_p01",  # pi_theta / pi_old per chunk
    "ratio_p99",
)


@dataclass(frozen=True)
class LossOutput:
    """loss: scalar to be minimised. metrics: detached (2,) tensors (value, count), in the order of METRICS."""

    loss: Tensor
    metrics: dict[str, Tensor]


class _Chunks:
    """Means over chunks by scatter into (B, K + 1), and back to tokens by gather; slot 0 takes what is outside."""

    def __init__(self, chunk_ids: Tensor, scorable: Tensor | None, dtype: torch.dtype) -> None:
        """chunk_ids (B, T); scorable (B,) bool: the other rows are outside everywhere."""
        self.slot = chunk_ids + 1  # (B, T)
        if scorable is not None:
            self.slot[(~scorable).nonzero()[:, 0]] = 0
        self.inside = self.slot.bool()
        self.bits = self.inside.to(torch.int64 if dtype == torch.float64 else torch.int32).neg_()  # all or none set
        self.zeros = torch.zeros(len(chunk_ids), int(self.slot.max()) + 1, dtype=dtype, device=chunk_ids.device)
        one = torch.ones((), dtype=torch.int32, device=chunk_ids.device)  # integers are counted faster than floats
        count = torch.zeros_like(self.zeros, dtype=torch.int32).scatter_add_(1, self.slot, one.expand_as(self.slot))
        self.size = count.to(dtype)  # |c|
        self.size[:, 0] = 0
        self.present = self.size > 0

    def only(self, values: Tensor) -> Tensor:
        """0 outside chunks, without a product: 0 * NaN would be NaN, in the gradient too."""
        return torch.where(self.inside, values, 0.0).to(self.zeros.dtype)

    def only_(self, values: Tensor) -> Tensor:
        """The same in place, in a fifth of the time, for a tensor that has no gradient and that nobody else reads."""
        values = values.to(self.zeros.dtype)
        values.view(self.bits.dtype).bitwise_and_(self.bits)
        return values

    def mean(self, values: Tensor) -> Tensor:
        """(B, T), 0 outside -> (B, K + 1)."""
        return self.zeros.scatter_add(1, self.slot, values) / self.size.clamp(min=1)

    def means(self, first: Tensor, second: Tensor) -> Tensor:
        """`mean` of two at once, (B, K + 1, 2): one pass over the real and imaginary parts."""
        both = torch.complex(first, second)
        total = both.new_zeros(self.zeros.shape).scatter_add_(1, self.slot, both)
        return torch.view_as_real(total) / self.size.clamp(min=1)[..., None]

    def unit_mean(self, values: Tensor, chunk_mean: Tensor, level: Level) -> Tensor:
        """Mean of values over the level's unit: (B, T) at level "token", else (B, K + 1)."""
        if level == "none":
            return self.zeros
        if level == "token":
            return values
        if level == "chunk":
            return chunk_mean
        if level == "sequence":
            share = self.size / self.size.sum(dim=1, keepdim=True).clamp(min=1)  # of the row's tokens
            return (chunk_mean * share).sum(dim=1, keepdim=True).expand_as(chunk_mean)
        raise ValueError(f"level={level!r}: choose none, token, chunk or sequence")

    def per_token(self, unit: Tensor, level: Level) -> Tensor:
        return unit if level == "token" else unit.gather(1, self.slot)

    def per_chunk(self, unit: Tensor, level: Level) -> Tensor:
        return self.mean(self.only(unit)) if level == "token" else unit * self.present

    def reduce(self, terms: Tensor, aggregation: Aggregation, num_items: float | Tensor | None) -> Tensor:
        """S / N of terms (B, T) that are 0 outside chunks; num_items replaces N and means nothing to "sum"."""
        if aggregation == "sum":
            return terms.sum()
        if aggregation == "token":
            total, count = terms.sum(), self.size.sum()
        elif aggregation == "chunk":
            total, count = self.mean(terms).sum(), self.present.sum()
        else:
            raise ValueError(f"aggregation={aggregation!r}: choose token, chunk or sum")
        items = count if num_items is None else torch.as_tensor(num_items, device=total.device)
        return total / items.clamp(min=1)


def count_items(chunk_ids: Tensor, rewards: Tensor, aggregation: Aggregation = "token") -> Tensor:
    """This batch's part of `num_items`: tokens (or chunks) of scorable rows, counted before the mask m_c.

    Sum it over accumulation steps and ranks, and give the total to `ipa_loss` so that any split of a batch has the
    same gradient.
    """
    ids = chunk_ids[torch.isfinite(rewards)]
    return (ids >= 0).sum() if aggregation == "token" else (ids.amax(dim=1) + 1).sum()


def ipa_loss(
    logps: Tensor,
    old_logps: Tensor,
    sampler_logps: Tensor,
    chunk_ids: Tensor,
    chunk_returns: Tensor,
    rewards: Tensor,
    *,
    ratio_level: Level = "chunk",
    mask_level: Level = "chunk",
    mismatch_threshold: float = 1.02,
    aggregation: Aggregation = "token",
    num_items: float | Tensor | None = None,
    positive_ratio: bool = False,
) -> LossOutput:
    """The loss whose gradient is minus eq. 9 over N; with the switches of OBJECTIVES, eqs. 3-6.

        rho_c = exp(mean over c of (log pi_theta - log pi_old))
        m_c = 1[exp(mean over c of (log pi_old - log mu)) <= H]
        R > 0:  sum_c m_c G_c sum_t grad log pi_theta(t)
        R <= 0: sum_c m_c sg[clip(rho_c, 0, 1)] G_c sum_t grad log pi_theta(t)

    m_c is one-sided and on another ratio than rho_c (eq. 8); a chunk's sign is its trajectory's; tokens are summed
    without 1/|c|. A level says over which unit a ratio is averaged: at "sequence" it is the geometric mean over the
    row's chunk tokens, one value per trajectory.

    logps, old_logps, sampler_logps, chunk_returns (B, T) and rewards (B,) float, chunk_ids (B, T) int64. A row whose
    reward is not finite is masked everywhere and moves no denominator; values outside chunks, NaN and inf too, change
    neither loss nor gradient. mismatch_threshold is H; infinity or mask_level "none" switch the mask off (default not
    in the paper). aggregation: "token" S / N with N the tokens in chunks of scorable rows before the mask (our
    default, not in the paper), "chunk" the mean over chunks of the mean over their tokens (not in the paper), "sum" S
    (the paper's literal form). num_items: N over the global batch, see `count_items`. positive_ratio: the ratio also
    where R > 0 (eq. 4). float64 stays float64; half precision is computed in float32.

    Two chunks of a failed trajectory; the first became twice as likely (clipped to 1), the second half as likely:

    >>> old, ids = torch.tensor([[-2.0, -2.0, 0.0, -2.0]]), torch.tensor([[0, 0, -1, 1]])
    >>> logps = (old + math.log(2) * torch.tensor([[1.0, 1.0, 0.0, -1.0]])).requires_grad_()
    >>> out = ipa_loss(logps, old, old, ids, torch.full((1, 4), -1.0), torch.tensor([-1.0]), aggregation="sum")
    >>> out.loss.backward()
    >>> logps.grad
    tensor([[1.0000, 1.0000, 0.0000, 0.5000]])
    """
    if mismatch_threshold <= 0:
        raise ValueError(f"mismatch_threshold={mismatch_threshold}: a bound on a ratio must be above 0")
    dtype = torch.promote_types(logps.dtype, torch.float32)
    chunks = _Chunks(chunk_ids, torch.isfinite(rewards), dtype)
    with torch.no_grad():
        positive = (rewards > 0)[:, None]  # (B, 1)
        log_ratio = chunks.only_(logps.to(dtype) - old_logps)  # to(): half precision is subtracted in float32
        mismatch = chunks.only_(old_logps.to(dtype) - sampler_logps)
        means = chunks.means(mismatch, log_ratio)
        chunk_mismatch, chunk_ratio = means.unbind(-1)
        ratio = chunks.unit_mean(log_ratio, chunk_ratio, ratio_level)
        limit = math.inf if mask_level == "none" else math.log(mismatch_threshold)
        keep = chunks.unit_mean(mismatch, chunk_mismatch, mask_level) <= limit
        scale = ratio.clamp(max=0).exp()  # clip(rho, 0, 1)
        if not positive_ratio:
            scale = torch.where(positive, 1.0, scale)
        if "token" in (ratio_level, mask_level):
            weight = chunks.per_token(scale, ratio_level) * chunks.per_token(keep, mask_level)
        else:
            weight = chunks.per_token(scale * keep, ratio_level)  # one gather for both
        weight = chunks.only_(weight.mul_(chunk_returns))  # (B, T)
        metrics = _metrics(
            chunks, log_ratio, mismatch, means, weight, positive,
            masked=chunks.per_chunk(~keep, mask_level), clipped=chunks.per_chunk(ratio > 0, ratio_level),
        )  # fmt: skip
    return LossOutput(-chunks.reduce(weight * chunks.only(logps), aggregation, num_items), metrics)


def imitation_loss(
    logps: Tensor,
    chunk_ids: Tensor,
    chunk_returns: Tensor,
    *,
    aggregation: Aggregation = "token",
    num_items: float | Tensor | None = None,
) -> Tensor:
    """Weighted NLL of the expert chunks c*_1..c*_f (eq. 10, left): -sum_k G_k sum_t log pi_theta(t), over N.

    chunk_ids are the il_chunk_ids of expert rows, one row per fork and batch; chunk_returns the G of the expert's own
    successful trajectory (K of the whole trajectory, not f). The paper also writes a factor pi_theta(c*_k); we read
    it as the sampling weight of the sum and drop it: our reading.

    >>> imitation_loss(torch.tensor([[-3.0, -1.0]]), torch.tensor([[-1, 0]]), torch.tensor([[0.0, 0.5]]))
    tensor(0.5000)
    """
    chunks = _Chunks(chunk_ids, None, torch.promote_types(logps.dtype, torch.float32))
    return -chunks.reduce(chunks.only(chunk_returns) * chunks.only(logps), aggregation, num_items)


def _metrics(
    chunks: _Chunks,
    log_ratio: Tensor,  # (B, T), as are mismatch and weight
    mismatch: Tensor,
    means: Tensor,  # (B, K + 1, 2), of mismatch and log_ratio over chunks
    weight: Tensor,
    positive: Tensor,  # (B, 1)
    masked: Tensor,  # (B, K + 1), as is clipped
    clipped: Tensor,
) -> dict[str, Tensor]:
    tokens, count, negatives = (x.sum() for x in (chunks.size, chunks.present, chunks.present & ~positive))
    row_mass = weight.abs().sum(dim=1, keepdim=True)  # (B, 1)
    mass, positive_mass = row_mass.sum(), (row_mass * positive).sum()
    gap, step = mismatch.abs_(), log_ratio.abs_()  # in place: nothing reads their signs any more
    pairs = [
        (masked.sum(), count),
        ((clipped * ~positive).sum(), negatives),
        *((positive_mass, mass), (mass - positive_mass, mass)),
        *((gap.sum(), tokens), (gap.amax(), tokens), (step.sum(), tokens), (step.amax(), tokens)),
        *((tail, count) for tail in _tails(means[chunks.present].exp()).flatten()),
    ]
    values = torch.stack([part for pair in pairs for part in pair]).view(-1, 2)
    return dict(zip(METRICS, values, strict=True))


def _tails(ratios: Tensor) -> Tensor:
    """(n, 2) -> (2, 2): 1st and 99th percentile of each column, interpolated as by quantile(); 0 of nothing."""
    if not len(ratios):
        return ratios.new_zeros(2, 2)
    position = 0.01 * (len(ratios) - 1)
    index = int(position)

    def tail(largest: bool) -> Tensor:  # (2,); topk and not quantile, which would sort all
        ends = ratios.topk(min(index + 2, len(ratios)), dim=0, largest=largest).values[index:]
        return ends[0].lerp(ends[-1], position - index)

    return torch.stack([tail(largest=False), tail(largest=True)], dim=1)


def merge_metrics(stacked: Tensor) -> dict[str, float]:
    """One number per metric from those of several micro-batches or ranks; NaN where nothing was counted.

    stacked (n, len(METRICS), 2): `torch.stack(list(output.metrics.values()))` of each. Means and shares are pooled;
    for *_max, *_p01 and *_p99 the worst part is reported.
    """
    merged = {}
    for name, pairs in zip(METRICS, stacked.double().unbind(dim=1), strict=True):
        value, count = pairs[pairs[:, 1] > 0].unbind(dim=1)
        if not len(value):
            merged[name] = math.nan
        elif name.endswith(("_max", "_p99")):
            merged[name] = value.max().item()
        elif name.endswith("_p01"):
            merged[name] = value.min().item()
        else:
            merged[name] = (value.sum() / count.sum()).item()
    return merged


@torch.no_grad()
def mismatch_ratios(old_logps: Tensor, sampler_logps: Tensor, chunk_ids: Tensor, level: Level) -> Tensor:
    """pi_old / mu of every unit of a level, (n,) float64: what eq. 8 compares with H.

    Arguments as in `ipa_loss`; level token, chunk or sequence. ValueError: no chunk in the batch.
    """
    chunks = _Chunks(chunk_ids, None, torch.float64)
    mismatch = chunks.only(old_logps.double() - sampler_logps.double())
    unit = chunks.unit_mean(mismatch, chunks.mean(mismatch), level)
    real = chunks.inside if level == "token" else chunks.present
    if level == "sequence":
        unit, real = unit[:, 0], real.any(dim=1)
    if not real.any():
        raise ValueError("no chunk in the batch: nothing to calibrate the mismatch threshold on")
    return unit[real].exp()


def calibrate(old_logps: Tensor, sampler_logps: Tensor, chunk_ids: Tensor, level: Level) -> dict[str, float]:
    """Percentiles of `mismatch_ratios`, and a proposed H: their 99th percentile (not in the paper).

    Keys: count, p1, p50, p90, p99, max, proposed. The proposal is at least 1.001: nearer to 1 a mask would fire on
    rounding.
    """
    ratios = mismatch_ratios(old_logps, sampler_logps, chunk_ids, level)
    points = {"p1": 0.01, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    result = {name: ratios.quantile(q).item() for name, q in points.items()}
    return {"count": float(len(ratios)), **result, "proposed": max(result["p99"], 1.001)}

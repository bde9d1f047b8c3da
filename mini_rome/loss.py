"""The IPA loss, its ablations and the imitation term (paper, eqs. 3-6 and 8-10), as functions of (B, T) tensors.

Three policies, never one in place of another: `logps` are log pi_theta (the forward of this step, with gradient),
`old_logps` are log pi_old (the trainer's weights of the version that sampled the chunk), `sampler_logps` are log mu
(recorded when the tokens were sampled). mu is the measure the trajectories are drawn from; it is no factor of the
loss. There is no KL, entropy, critic, baseline or group normalisation in these equations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

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


class _Difference(NamedTuple):
    """Of two policies' log-probs, inside chunks."""

    per_unit: Tensor  # mean over the level's unit: (B, T) at level "token", else (B, K + 1)
    per_chunk: Tensor  # (B, K + 1)
    total: Tensor  # sum over tokens of its size
    largest: Tensor


class _Chunks:
    """Means over chunks, by runs of tokens of one chunk, and back to tokens by a look-up.

    A table has a slot for each chunk of each row, (B, K + 1); slot 0 takes what is outside and stays 0. Runs, because
    on a CPU a scatter of every token takes four times as long.
    """

    def __init__(self, chunk_ids: Tensor, scorable: Tensor | None, dtype: torch.dtype) -> None:
        """chunk_ids (B, T); scorable (B,) bool: the other rows are outside everywhere."""
        ids = chunk_ids.to(torch.int32, copy=True)  # read several times, and memory is the cost here
        lowest, highest = torch.stack([ids.amin(), ids.amax()]).tolist()
        if lowest < -1:
            raise ValueError(f"chunk_ids has {lowest}: a token outside chunks is marked -1")
        self.shape = rows, slots = len(ids), highest + 2
        self.slot = ids + (torch.arange(rows, dtype=ids.dtype, device=ids.device) * slots + 1)[:, None]  # flat table
        self.run_slot, self.length = torch.unique_consecutive(self.slot.flatten(), return_counts=True)
        self.size = self._table(self.length.to(dtype))  # |c|
        self.size[:, 0] = 0
        ids = ids.clamp_(max=0).bitwise_not_()  # -1 in chunks, which has all bits set, and 0 outside
        self.bits = ids.to(torch.int64 if dtype == torch.float64 else torch.int32)
        if scorable is not None and not scorable.all():
            self.size[~scorable] = 0
            self.bits *= scorable[:, None]
        self.present = self.size > 0

    def _table(self, per_run: Tensor) -> Tensor:
        """Sums over the runs of a chunk: (runs,) -> (B, K + 1)."""
        rows, slots = self.shape
        return per_run.new_zeros(rows * slots).index_add(0, self.run_slot, per_run).view(rows, slots)

    def only_(self, values: Tensor) -> Tensor:
        """0 outside chunks, in place and without a product, as 0 * NaN would be NaN; for what nobody else reads."""
        values.view(self.bits.dtype).bitwise_and_(self.bits)
        return values

    def mean(self, values: Tensor) -> Tensor:
        """(B, T) -> (B, K + 1), whatever stands outside."""
        total = self._table(torch.segment_reduce(values.flatten(), "sum", lengths=self.length))
        return torch.where(self.present, total / self.size.clamp(min=1), 0.0)

    def unit_mean(self, values: Tensor, chunk_mean: Tensor, level: Level) -> Tensor:
        """Mean of values over the level's unit: (B, T) at level "token", else (B, K + 1)."""
        if level == "none":
            return torch.zeros_like(chunk_mean)
        if level == "token":
            return values
        if level == "chunk":
            return chunk_mean
        if level == "sequence":
            share = self.size / self.size.sum(dim=1, keepdim=True).clamp(min=1)  # of the row's tokens
            return (chunk_mean * share).sum(dim=1, keepdim=True).expand_as(chunk_mean)
        raise ValueError(f"level={level!r}: choose none, token, chunk or sequence")

    def compare(self, logps: Tensor, others: Tensor, level: Level) -> _Difference:
        """logps - others (B, T); half precision is subtracted in float32."""
        values = self.only_((logps.to(self.size.dtype) - others).to(self.size.dtype))
        per_chunk = self.mean(values)
        per_unit = self.unit_mean(values, per_chunk, level)
        size = values.abs() if level == "token" else values.abs_()
        return _Difference(per_unit, per_chunk, size.sum(), size.amax())

    def per_token(self, unit: Tensor, level: Level) -> Tensor:
        if level == "token":
            return unit
        return unit.flatten().index_select(0, self.slot.flatten()).view_as(self.slot)

    def per_chunk(self, unit: Tensor, level: Level) -> Tensor:
        return self.mean(unit.to(self.size.dtype)) if level == "token" else unit * self.present

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


class _Weighted(torch.autograd.Function):
    """weight * logps inside chunks; 0 outside, whatever stands there, and so in the gradient."""

    @staticmethod
    def forward(ctx: Any, logps: Tensor, weight: Tensor, chunks: _Chunks) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.chunks = chunks
        return chunks.only_(weight * logps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return ctx.chunks.only_(grad * weight), None, None


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
        step = chunks.compare(logps, old_logps, ratio_level)
        gap = chunks.compare(old_logps, sampler_logps, mask_level)
        limit = math.inf if mask_level == "none" else math.log(mismatch_threshold)
        keep = gap.per_unit <= limit
        scale = step.per_unit.clamp(max=0).exp()  # clip(rho, 0, 1)
        if not positive_ratio:
            scale = torch.where(positive, 1.0, scale)
        if "token" in (ratio_level, mask_level):
            weight = chunks.per_token(scale, ratio_level) * chunks.per_token(keep, mask_level)
        else:
            weight = chunks.per_token(scale * keep, ratio_level)  # one gather for both
        weight = chunks.only_(weight.mul_(chunk_returns))  # (B, T)
        metrics = _metrics(
            chunks, gap, step, weight, positive,
            masked=chunks.per_chunk(~keep, mask_level), clipped=chunks.per_chunk(step.per_unit > 0, ratio_level),
        )  # fmt: skip
    return LossOutput(-chunks.reduce(_Weighted.apply(logps, weight, chunks), aggregation, num_items), metrics)


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
    dtype = torch.promote_types(logps.dtype, torch.float32)
    chunks = _Chunks(chunk_ids, None, dtype)
    weight = chunks.only_(chunk_returns.to(dtype, copy=True))
    return -chunks.reduce(_Weighted.apply(logps, weight, chunks), aggregation, num_items)


def _metrics(
    chunks: _Chunks,
    gap: _Difference,  # log pi_old - log mu
    step: _Difference,  # log pi_theta - log pi_old
    weight: Tensor,  # (B, T)
    positive: Tensor,  # (B, 1)
    masked: Tensor,  # (B, K + 1), as is clipped
    clipped: Tensor,
) -> dict[str, Tensor]:
    tokens, count, negatives = (x.sum() for x in (chunks.size, chunks.present, chunks.present & ~positive))
    row_mass = weight.abs().sum(dim=1, keepdim=True)  # (B, 1)
    mass, positive_mass = row_mass.sum(), (row_mass * positive).sum()
    ratios = torch.stack([gap.per_chunk, step.per_chunk], dim=-1)[chunks.present].exp()
    pairs = [
        (masked.sum(), count),
        ((clipped * ~positive).sum(), negatives),
        *((positive_mass, mass), (mass - positive_mass, mass)),
        *((gap.total, tokens), (gap.largest, tokens), (step.total, tokens), (step.largest, tokens)),
        *((tail, count) for tail in _tails(ratios).flatten()),
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
    mismatch = old_logps.double() - sampler_logps.double()
    unit = chunks.unit_mean(mismatch, chunks.mean(mismatch), level)
    real = chunk_ids >= 0 if level == "token" else chunks.present
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

"""Plausible misreadings of section 3.2.4, each built on purpose: its check holds for the package and fails for it.

A check takes a `Reading`, the four functions a misreading can change. The package passes all checks; every wrong
reading fails the one it is listed with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from samples import episode
from torch import Tensor

from mini_rome.chunking import PackedSample, pack
from mini_rome.credit import chunk_returns
from mini_rome.loss import ipa_loss
from mini_rome.resample import Initial, ParallelInit, SequentialRollback
from mini_rome.types import Trajectory


@dataclass(frozen=True)
class Reading:
    """What the equations say, as code: `weights` are the token weights of the gradient, minus d loss / d log pi."""

    weights: Callable[..., Tensor]
    pack: Callable[[Trajectory], list[PackedSample]]
    returns: Callable[[Tensor, Tensor, float], Tensor]
    starts: Callable[[int], list[int]]  # K -> the first p of rollback, then the ends of the uniform anchors


def weights(theta: Tensor, old: Tensor, mu: Tensor, ids: Tensor, reward: float, threshold: float = 1.02) -> Tensor:
    """Of one row, (T,), gamma = 1, aggregation "sum": the paper's literal form."""
    logps = theta[None].clone().requires_grad_()
    rewards = torch.tensor([reward], dtype=theta.dtype)
    gain = chunk_returns(ids[None], rewards, 1.0)
    output = ipa_loss(
        logps, old[None], mu[None], ids[None], gain, rewards, mismatch_threshold=threshold, aggregation="sum"
    )
    output.loss.backward()
    return -logps.grad[0]


def starts(chunks: int) -> list[int]:
    ends: list[Initial] = [SequentialRollback({"t": chunks}), ParallelInit({"t": chunks}, anchors=2)]
    return [p for chooser in ends for p in sorted(set(chooser.positions("t", 0, 2)))]


PAPER = Reading(weights, lambda trajectory: [pack(trajectory)], chunk_returns, starts)

IDS = torch.tensor([0, 0, -1, 1])
OLD = torch.tensor([-2.0, -1.0, -9.0, -3.0], dtype=torch.float64)
LOG2 = math.log(2)


def close(got: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(got, torch.tensor(expected, dtype=got.dtype), rtol=1e-12, atol=1e-14)


# The checks


def sampler_is_no_factor(reading: Reading) -> None:
    """Where the mask keeps a chunk, the gradient does not depend on mu."""
    for shift in (0.0, 0.01, 1.0):
        close(reading.weights(OLD, OLD, OLD + shift, IDS, 1.0), [1, 1, 0, 1])


def mask_is_on_old_over_sampler(reading: Reading) -> None:
    """A policy that moved is not masked; a sampler that differs is."""
    close(reading.weights(OLD + LOG2, OLD, OLD, IDS, 1.0), [1, 1, 0, 1])
    close(reading.weights(OLD, OLD, OLD - LOG2, IDS, 1.0), [0, 0, 0, 0])


def mask_is_one_sided(reading: Reading) -> None:
    close(reading.weights(OLD, OLD, OLD + LOG2, IDS, 1.0), [1, 1, 0, 1])


def tool_results_are_outside(reading: Reading) -> None:
    """An observation token has no gradient and moves no ratio; packing puts it in no chunk."""
    step = torch.tensor([0.0, 0.0, -5.0, 0.0], dtype=torch.float64)
    close(reading.weights(OLD + step, OLD, OLD, IDS, -1.0), [-1, -1, 0, -1])
    (sample,) = reading.pack(episode([2, 1], [1, 1]))
    assert sample.chunk_ids == [0, 0, -1, 1] and sample.env_mask == [1, 1, 0, 1]


def tokens_are_summed_without_their_number(reading: Reading) -> None:
    ids = torch.tensor([0, 0, 0, 1])
    close(reading.weights(OLD, OLD, OLD, ids, 1.0), [1, 1, 1, 1])


def old_policy_is_not_the_current_one(reading: Reading) -> None:
    """On stale data a negative chunk that became half as likely counts half."""
    step = torch.tensor([-LOG2, -LOG2, 0.0, 0.0], dtype=torch.float64)
    close(reading.weights(OLD + step, OLD, OLD, IDS, -1.0), [-0.5, -0.5, 0, -1])


def ratio_is_clipped_at_one_for_negatives_only(reading: Reading) -> None:
    close(reading.weights(OLD + LOG2, OLD, OLD, IDS, -1.0), [-1, -1, 0, -1])
    close(reading.weights(OLD - LOG2, OLD, OLD, IDS, -1.0), [-0.5, -0.5, 0, -0.5])
    close(reading.weights(OLD - LOG2, OLD, OLD, IDS, 1.0), [1, 1, 0, 1])


def ratio_is_per_chunk(reading: Reading) -> None:
    """The geometric mean over the chunk's tokens, not a product and not each token's own."""
    step = torch.tensor([-2 * LOG2, 0.0, 0.0, -2 * LOG2], dtype=torch.float64)
    close(reading.weights(OLD + step, OLD, OLD, IDS, -1.0), [-0.5, -0.5, 0, -0.25])


def one_sample_per_trajectory(reading: Reading) -> None:
    """And so the credit of an early chunk is discounted over the whole trajectory."""
    samples = reading.pack(episode([2, 1, 1], [1, 1, 1]))
    assert len(samples) == 1
    gains = [
        gain
        for sample in samples
        for gain in reading.returns(torch.tensor([sample.chunk_ids]), torch.ones(1), 0.5)[0].tolist()
    ]
    assert gains == [0.25, 0.25, 0, 0.5, 0, 1]


def prefix_is_not_trained_by_the_rl_term(reading: Reading) -> None:
    (sample,) = reading.pack(episode([2, 1, 2], [1, 1, 1], start=1))
    trained = {token for token, k in zip(sample.completion_ids, sample.chunk_ids, strict=True) if k >= 0}
    assert trained == {20, 30, 31}
    assert max(sample.chunk_ids) == 1


def credit_counts_chunks_to_the_last_one(reading: Reading) -> None:
    ids = torch.tensor([[0, 0, -1, 1, 2]])
    close(reading.returns(ids, torch.ones(1), 0.5)[0], [0.25, 0.25, 0, 0.5, 1])


def anchors_leave_the_policy_one_to_k_chunks(reading: Reading) -> None:
    """Rollback begins with one chunk left, p = K-1; anchors reach from the initial state, p = 0, to there."""
    assert reading.starts(5) == [4, 0, 4]
    for p in reading.starts(5):
        (sample,) = reading.pack(episode([1] * 5, [1] * 5, start=p))
        assert 1 <= len(sample.policy_versions) == max(sample.chunk_ids) + 1 <= 5
        assert sample.policy_versions[0] == 7 + p + 1  # chunk p + 1 is the policy's first


def chunk_ids_are_carried_and_not_inferred(reading: Reading) -> None:
    """Two responses without an observation between them stay two chunks."""
    (sample,) = reading.pack(episode([2, 1], [0, 0]))
    assert sample.chunk_ids == [0, 0, 1]


# The wrong readings


def per_chunk_mean(values: Tensor, ids: Tensor) -> Tensor:
    """(T,) -> (T,): mean over the token's chunk, 0 outside."""
    result = torch.zeros_like(values)
    for k in range(int(ids.max()) + 1):
        result[ids == k] = values[ids == k].mean()
    return result


def sampler_as_factor(theta, old, mu, ids, reward, threshold=1.02) -> Tensor:
    return weights(theta, old, mu, ids, reward, threshold) * per_chunk_mean(mu, ids).exp()


def mask_on_rho(theta, old, mu, ids, reward, threshold=1.02) -> Tensor:
    return weights(theta, old, old, ids, reward) * (per_chunk_mean(theta - old, ids).exp() <= threshold)


def two_sided_mask(theta, old, mu, ids, reward, threshold=1.02) -> Tensor:
    low = per_chunk_mean(old - mu, ids).exp() < 1 / threshold
    return weights(theta, old, mu, ids, reward, threshold) * ~low


def observations_in_chunks(theta, old, mu, ids, reward, threshold=1.02) -> Tensor:
    return weights(theta, old, mu, ids.cummax(dim=0).values, reward, threshold)


def length_normalised(theta, old, mu, ids, reward, threshold=1.02) -> Tensor:
    size = torch.stack([(ids == k).sum() for k in ids])
    return weights(theta, old, mu, ids, reward, threshold) / size


def old_from_current_weights(theta, old, mu, ids, reward, threshold=1.02) -> Tensor:
    return weights(theta, theta, mu, ids, reward, threshold)


def sampler_for_old(theta, old, mu, ids, reward, threshold=1.02) -> Tensor:
    return weights(theta, mu, mu, ids, reward, threshold)


def ratio_on_positives(theta, old, mu, ids, reward, threshold=1.02) -> Tensor:
    rho = per_chunk_mean(theta - old, ids).exp().clamp(max=1)
    return weights(theta, old, mu, ids, reward, threshold) * (rho if reward > 0 else 1)


def unclipped_ratio(theta, old, mu, ids, reward, threshold=1.02) -> Tensor:
    rho = per_chunk_mean(theta - old, ids).exp()
    return weights(old, old, mu, ids, reward, threshold) * (rho if reward <= 0 else 1)


def token_ratio(theta, old, mu, ids, reward, threshold=1.02) -> Tensor:
    return weights(old, old, mu, ids, reward, threshold) * ((theta - old).exp().clamp(max=1) if reward <= 0 else 1)


def product_ratio(theta, old, mu, ids, reward, threshold=1.02) -> Tensor:
    size = torch.stack([(ids == k).sum() for k in ids])
    rho = (per_chunk_mean(theta - old, ids) * size).exp().clamp(max=1)
    return weights(old, old, mu, ids, reward, threshold) * (rho if reward <= 0 else 1)


def pack_one_per_chunk(trajectory: Trajectory) -> list[PackedSample]:
    return [
        pack(replace(trajectory, turns=trajectory.turns[: k + 1], start=k))
        for k in range(trajectory.start, len(trajectory.turns))
    ]


def pack_with_prefix_trained(trajectory: Trajectory) -> list[PackedSample]:
    return [pack(replace(trajectory, start=0))]


def pack_with_observations(trajectory: Trajectory) -> list[PackedSample]:
    sample = pack(trajectory)
    ids = torch.tensor(sample.chunk_ids).cummax(dim=0).values.tolist()
    return [replace(sample, chunk_ids=ids, env_mask=[1] * len(ids))]


def pack_by_runs_of_the_mask(trajectory: Trajectory) -> list[PackedSample]:
    sample = pack(trajectory)
    mask = torch.tensor([0, *sample.env_mask])
    number = ((mask[1:] == 1) & (mask[:-1] == 0)).cumsum(0) - 1
    return [replace(sample, chunk_ids=torch.where(mask[1:] == 1, number, -1).tolist())]


def pack_after_p_minus_one(trajectory: Trajectory) -> list[PackedSample]:
    return [pack(replace(trajectory, start=max(0, trajectory.start - 1)))]


def discount_from_the_first(ids: Tensor, rewards: Tensor, gamma: float) -> Tensor:
    return torch.where(ids >= 0, rewards[:, None] * gamma**ids, 0.0)


def discount_by_tokens(ids: Tensor, rewards: Tensor, gamma: float) -> Tensor:
    inside = ids >= 0
    behind = inside.sum(1, keepdim=True) - inside.cumsum(1)
    return torch.where(inside, rewards[:, None] * gamma**behind, 0.0)


def last_chunk_discounted(ids: Tensor, rewards: Tensor, gamma: float) -> Tensor:
    return gamma * chunk_returns(ids, rewards, gamma)


WRONG = [
    (sampler_is_no_factor, {"weights": sampler_as_factor}),
    (mask_is_on_old_over_sampler, {"weights": mask_on_rho}),
    (mask_is_one_sided, {"weights": two_sided_mask}),
    (tool_results_are_outside, {"weights": observations_in_chunks}),
    (tool_results_are_outside, {"pack": pack_with_observations}),
    (tokens_are_summed_without_their_number, {"weights": length_normalised}),
    (old_policy_is_not_the_current_one, {"weights": old_from_current_weights}),
    (mask_is_on_old_over_sampler, {"weights": sampler_for_old}),
    (ratio_is_clipped_at_one_for_negatives_only, {"weights": ratio_on_positives}),
    (ratio_is_clipped_at_one_for_negatives_only, {"weights": unclipped_ratio}),
    (ratio_is_per_chunk, {"weights": token_ratio}),
    (ratio_is_per_chunk, {"weights": product_ratio}),
    (one_sample_per_trajectory, {"pack": pack_one_per_chunk}),
    (prefix_is_not_trained_by_the_rl_term, {"pack": pack_with_prefix_trained}),
    (credit_counts_chunks_to_the_last_one, {"returns": discount_from_the_first}),
    (credit_counts_chunks_to_the_last_one, {"returns": discount_by_tokens}),
    (credit_counts_chunks_to_the_last_one, {"returns": last_chunk_discounted}),
    (anchors_leave_the_policy_one_to_k_chunks, {"starts": lambda chunks: [p + 1 for p in starts(chunks)]}),
    (anchors_leave_the_policy_one_to_k_chunks, {"starts": lambda chunks: [max(0, p - 1) for p in starts(chunks)]}),
    (anchors_leave_the_policy_one_to_k_chunks, {"pack": pack_after_p_minus_one}),
    (chunk_ids_are_carried_and_not_inferred, {"pack": pack_by_runs_of_the_mask}),
]
CHECKS = list(dict.fromkeys(check for check, _ in WRONG))


def name(change: dict[str, Callable]) -> str:
    return "+".join(f"{field}={function.__name__}" for field, function in change.items())


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_package_passes(check: Callable[[Reading], None]) -> None:
    check(PAPER)


@pytest.mark.parametrize(("check", "change"), WRONG, ids=[f"{check.__name__}-{name(each)}" for check, each in WRONG])
def test_a_wrong_reading_is_caught(check: Callable[[Reading], None], change: dict[str, Callable]) -> None:
    wrong = replace(PAPER, **change)
    with pytest.raises(AssertionError):
        check(wrong)

"""ipa_loss, its presets, the imitation term, metrics and calibration: the identities of eqs. 3-10."""

import math
from functools import partial

import numpy as np
import oracle
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from mini_rome.credit import chunk_returns
from mini_rome.loss import (
    METRICS,
    OBJECTIVES,
    LossOutput,
    calibrate,
    count_items,
    imitation_loss,
    ipa_loss,
    merge_metrics,
)

ragged = oracle.searches(40)
SWITCHES = st.fixed_dictionaries(
    {
        "ratio_level": st.sampled_from(oracle.LEVELS),
        "mask_level": st.sampled_from(oracle.LEVELS),
        "aggregation": st.sampled_from(oracle.AGGREGATIONS),
        "positive_ratio": st.booleans(),
    }
)


def run(batch: oracle.Batch, gamma: float = 0.95, **switches) -> tuple[LossOutput, Tensor]:
    """The loss and its gradient on logps."""
    logps, old, mu, ids, rewards = batch.tensors()
    output = ipa_loss(logps, old, mu, ids, chunk_returns(ids, rewards, gamma), rewards, **switches)
    output.loss.backward()
    return output, logps.grad


def one_row(
    ids: list[int],
    reward: float = -1.0,
    log_ratio: list[float] | np.ndarray | float = 0.0,
    mismatch: list[float] | np.ndarray | float = 0.0,
) -> oracle.Batch:
    old = np.full((1, len(ids)), -2.0)
    return oracle.Batch(
        logps=old + log_ratio, old=old, mu=old - mismatch, chunk_ids=np.array([ids]), rewards=np.array([reward])
    )


# The equations


def test_the_presets_are_the_switches_of_their_equations() -> None:
    table = {name: tuple(switches[key] for key in ("ratio_level", "mask_level", "positive_ratio"))
             for name, switches in OBJECTIVES.items()}  # fmt: skip
    assert table == {
        "reinforce": ("none", "none", False),
        "tis": ("sequence", "none", True),
        "topr": ("sequence", "none", False),
        "baseline": ("sequence", "token", False),
        "ipa": ("chunk", "chunk", False),
    }
    assert {len(switches) for switches in OBJECTIVES.values()} == {3}


@oracle.searches(120)
@given(oracle.batches(), st.sampled_from((0.9, 1.0)), st.sampled_from((0.99, 1.02, 5.0)), SWITCHES)
def test_every_combination_of_switches_agrees_with_the_oracle(batch, gamma, threshold, switches) -> None:
    output, grad = run(batch, gamma, mismatch_threshold=threshold, **switches)
    expected = oracle.gradient(batch, gamma, threshold=threshold, **switches)
    np.testing.assert_allclose(grad, expected, rtol=1e-10, atol=1e-14)
    assert output.loss.item() == pytest.approx(oracle.loss(batch, expected), rel=1e-10, abs=1e-12)
    assert output.loss.dtype == torch.float64


@ragged
@given(oracle.batches())
def test_the_defaults_are_equation_9_over_tokens(batch: oracle.Batch) -> None:
    _, grad = run(batch)
    np.testing.assert_allclose(grad, oracle.gradient(batch), rtol=1e-10, atol=1e-14)


def expected_weights(name: str, b: oracle.Batch) -> np.ndarray:
    """Token weights of eqs. 3-6 for rows that are one trajectory each, written per equation; gamma = 1."""
    inside = b.chunk_ids >= 0
    mean = np.where(inside, b.logps - b.old, 0).sum(1) / np.maximum(inside.sum(1), 1)
    rho = np.clip(np.exp(mean), 0, 1)
    scale = {
        "reinforce": np.ones_like(rho),
        "tis": rho,
        "topr": np.where(b.rewards > 0, 1, rho),
        "baseline": np.where(b.rewards > 0, 1, rho),
    }[name]
    mask = np.exp(b.old - b.mu) <= 1.02 if name == "baseline" else np.ones_like(b.old)
    return (scale * b.rewards)[:, None] * mask * inside


@pytest.mark.parametrize("name", ["reinforce", "tis", "topr", "baseline"])
@ragged
@given(oracle.batches(rewards=(-1.0, -0.5, 0.0, 0.3, 1.0)))
def test_each_preset_reduces_to_its_equation(name: str, batch: oracle.Batch) -> None:
    _, grad = run(batch, gamma=1.0, aggregation="sum", **OBJECTIVES[name])
    np.testing.assert_allclose(grad, -expected_weights(name, batch), rtol=1e-10, atol=1e-14)


@ragged
@given(oracle.batches())
def test_ratio_one_no_mask_gamma_one_is_reinforce(batch: oracle.Batch) -> None:
    batch.logps, batch.mu = batch.old.copy(), batch.old.copy()
    _, ipa = run(batch, gamma=1.0)
    _, reinforce = run(batch, gamma=1.0, **OBJECTIVES["reinforce"])
    assert torch.equal(ipa, reinforce)


@ragged
@given(oracle.batches(rewards=(-1.0, -0.3)))
def test_one_chunk_per_trajectory_is_the_sequence_level(batch: oracle.Batch) -> None:
    batch.chunk_ids = np.minimum(batch.chunk_ids, 0)
    _, chunk = run(batch, ratio_level="chunk", mask_level="chunk")
    _, sequence = run(batch, ratio_level="sequence", mask_level="sequence")
    torch.testing.assert_close(chunk, sequence, rtol=1e-12, atol=0)


@ragged
@given(oracle.batches(rewards=(-1.0, -0.3)))
def test_one_token_per_chunk_is_the_token_level(batch: oracle.Batch) -> None:
    inside = batch.chunk_ids >= 0
    batch.chunk_ids = np.where(inside, inside.cumsum(axis=1) - 1, -1)
    _, chunk = run(batch, ratio_level="chunk", mask_level="chunk")
    _, token = run(batch, ratio_level="token", mask_level="token")
    torch.testing.assert_close(chunk, token, rtol=1e-12, atol=0)


@ragged
@given(oracle.batches(rewards=(0.3, 1.0)))
def test_positives_are_weighted_nll_whatever_the_ratio(batch: oracle.Batch) -> None:
    output, grad = run(batch, mask_level="none", aggregation="sum")
    weights = oracle.returns(batch.chunk_ids, batch.rewards, 0.95)
    np.testing.assert_allclose(grad, -weights, rtol=1e-12)
    assert output.loss.item() == pytest.approx(-(weights * batch.logps).sum(), rel=1e-10, abs=1e-12)


def test_negatives_are_scaled_by_a_ratio_below_one_and_clipped_above() -> None:
    half, double = -math.log(2), math.log(2)
    batch = one_row([0, 0, -1, 1, 1, 2], log_ratio=[0.0, 2 * half, 9.0, double, double, half])
    _, grad = run(batch, gamma=1.0, aggregation="sum")
    torch.testing.assert_close(grad, torch.tensor([[0.5, 0.5, 0, 1, 1, 0.5]], dtype=torch.float64))


def test_a_ratio_far_above_one_does_not_overflow() -> None:
    output, grad = run(one_row([0], log_ratio=1000.0))
    assert grad.item() == 1.0 and output.loss.isfinite()


def test_zero_reward_has_no_gradient() -> None:
    _, grad = run(one_row([0, 1], reward=0.0, log_ratio=-1.0))
    assert not grad.any()


def test_the_mask_is_one_sided_and_on_old_over_sampler() -> None:
    batch = one_row([0, 1, 2], reward=1.0, log_ratio=5.0, mismatch=[math.log(1.03), math.log(1.01), math.log(0.1)])
    _, grad = run(batch, gamma=1.0, aggregation="sum")
    assert grad.tolist() == [[0, -1, -1]]


@pytest.mark.parametrize("level", ["token", "chunk", "sequence"])
def test_a_ratio_equal_to_the_threshold_is_kept(level: str) -> None:
    for mismatch, kept in ((0.0, True), (1e-6, False)):
        _, grad = run(one_row([0, 0], mismatch=mismatch), mask_level=level, mismatch_threshold=1.0)
        assert bool(grad.any()) == kept


def test_mask_level_none_keeps_all_even_with_a_threshold_below_one() -> None:
    _, grad = run(one_row([0, 1], mismatch=3.0), mask_level="none", mismatch_threshold=0.5)
    assert grad.all()


# What must change nothing


@ragged
@given(oracle.batches(), st.permutations([math.nan, math.inf, -math.inf, 1e30, 0.0]), SWITCHES)
def test_values_outside_chunks_change_neither_loss_nor_gradient(batch, garbage, switches) -> None:
    clean, clean_grad = run(batch, **switches)
    spoiled = batch.with_garbage(garbage)
    logps, old, mu, ids, rewards = spoiled.tensors()
    outside = (ids < 0) | ~rewards.isfinite()[:, None]
    gain = torch.where(outside, torch.tensor(garbage[0], dtype=torch.float64), chunk_returns(ids, rewards, 0.95))
    output = ipa_loss(logps, old, mu, ids, gain, rewards, **switches)
    output.loss.backward()
    assert torch.equal(output.loss, clean.loss)
    assert torch.equal(logps.grad, clean_grad)
    for name in METRICS:
        assert torch.equal(output.metrics[name], clean.metrics[name]), name


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
@pytest.mark.parametrize("aggregation", oracle.AGGREGATIONS)
def test_an_unscorable_row_moves_no_denominator(reward: float, aggregation: str) -> None:
    rng = np.random.default_rng(0)
    old = -rng.uniform(0.1, 2, (3, 4))
    ids = np.array([[0, 0, -1, 1], [0, 1, 2, 3], [0, -1, -1, 1]])
    whole = oracle.Batch(old + 0.1, old, old, ids, np.array([1.0, reward, -1.0]))
    output, grad = run(whole, aggregation=aggregation)
    alone, alone_grad = run(whole.rows([0, 2]), aggregation=aggregation)
    assert torch.equal(grad[[0, 2]], alone_grad) and not grad[1].any()
    assert output.loss.item() == pytest.approx(alone.loss.item(), rel=1e-12)
    assert torch.equal(torch.stack(list(output.metrics.values())), torch.stack(list(alone.metrics.values())))


def test_a_masked_chunk_does_not_shrink_the_denominator() -> None:
    batch = one_row([0, 1, 1, 1], reward=1.0, mismatch=[1.0, 0.0, 0.0, 0.0])
    _, grad = run(batch, gamma=1.0)
    assert grad.tolist() == [[0, -0.25, -0.25, -0.25]]
    _, grad = run(batch, gamma=1.0, aggregation="chunk")
    torch.testing.assert_close(grad, torch.tensor([[0, -1 / 6, -1 / 6, -1 / 6]], dtype=torch.float64))


@pytest.mark.parametrize("aggregation", ["token", "chunk"])
@ragged
@given(oracle.batches(), st.randoms())
def test_permuting_and_splitting_a_batch_changes_nothing(aggregation: str, batch: oracle.Batch, random) -> None:
    """One row at a time with the global count, in any order: accumulation, and processes."""
    whole, whole_grad = run(batch, aggregation=aggregation)
    _, _, _, ids, rewards = batch.tensors()
    items = count_items(ids, rewards, aggregation)
    order = list(range(len(ids)))
    random.shuffle(order)
    parts = [run(batch.rows([index]), aggregation=aggregation, num_items=items) for index in order]
    torch.testing.assert_close(sum(output.loss for output, _ in parts), whole.loss, rtol=1e-12, atol=1e-14)
    for index, (_, grad) in zip(order, parts, strict=True):
        torch.testing.assert_close(grad[0], whole_grad[index], rtol=1e-12, atol=0)
    pooled = merge_metrics(torch.stack([torch.stack(list(output.metrics.values())) for output, _ in parts]))
    single = merge_metrics(torch.stack(list(whole.metrics.values()))[None])
    for name in METRICS:
        if not name.endswith(("_p01", "_p99")):  # percentiles of parts are an envelope, not pooled
            assert pooled[name] == pytest.approx(single[name], rel=1e-9, abs=1e-12, nan_ok=True), name


@ragged
@given(oracle.batches(), st.sampled_from(("token", "chunk")))
def test_count_items_counts_before_the_mask(batch: oracle.Batch, aggregation: str) -> None:
    _, _, _, ids, rewards = batch.tensors()
    rows = [row for row, reward in zip(batch.chunk_ids, batch.rewards, strict=True) if np.isfinite(reward)]
    tokens, chunks = sum((row >= 0).sum() for row in rows), sum(row.max() + 1 for row in rows)
    assert count_items(ids, rewards, aggregation) == (tokens if aggregation == "token" else chunks)
    assert count_items(ids, rewards) == tokens


def test_num_items_replaces_the_denominator_except_of_a_sum() -> None:
    batch = one_row([0, 0, 1], reward=1.0)
    for items in (6, 6.0, torch.tensor(6), torch.tensor(6.0)):
        assert run(batch, 1.0, num_items=items)[1][0].tolist() == pytest.approx([-1 / 6] * 3)
        assert run(batch, 1.0, num_items=items, aggregation="sum")[1][0].tolist() == [-1] * 3
    _, grad = run(batch, 1.0, num_items=6, aggregation="chunk")
    assert grad[0].tolist() == pytest.approx([-1 / 12, -1 / 12, -1 / 6])
    assert run(batch, 1.0, num_items=0)[1][0].tolist() == [-1] * 3


@pytest.mark.parametrize("aggregation", oracle.AGGREGATIONS)
def test_a_batch_without_a_chunk_has_loss_zero_and_gradient_zero(aggregation: str) -> None:
    batch = one_row([-1, -1], reward=1.0).with_garbage([float("nan")])
    output, grad = run(batch, aggregation=aggregation)
    assert output.loss.item() == 0 and not grad.any()
    merged = merge_metrics(torch.stack(list(output.metrics.values()))[None])
    assert all(math.isnan(value) for value in merged.values())


# Types, gradients, arguments


def test_everything_is_computed_on_the_device_of_the_arguments() -> None:
    """With another default device, a tensor made without naming one would not fit the arguments."""
    batch = one_row([0, 0, -1, 1], log_ratio=-0.5)
    logps, old, mu, ids, rewards = batch.tensors()
    with torch.device("meta"):
        gain = chunk_returns(ids, rewards, 0.95, num_chunks=2)
        outputs = [
            ipa_loss(logps, old, mu, ids, gain, rewards, num_items=4, ratio_level=level, mask_level=level)
            for level in oracle.LEVELS
        ]
        losses = [output.loss for output in outputs] + [imitation_loss(logps, ids, gain)]
        assert {tensor.device.type for output in outputs for tensor in output.metrics.values()} == {"cpu"}
        assert {loss.device.type for loss in losses} == {"cpu"}
        assert calibrate(old, mu, ids, "chunk")["count"] == 2


def test_float32_and_half_precision_are_computed_in_float32() -> None:
    batch = one_row([0, 0, -1, 1], log_ratio=-0.5)
    logps, old, mu, ids, rewards = batch.tensors()
    gain = chunk_returns(ids, rewards, 0.95)
    for dtype in (torch.float32, torch.bfloat16):
        low = logps.detach().to(dtype).requires_grad_()
        output = ipa_loss(low, old.to(dtype), mu.to(dtype), ids, gain.float(), rewards.float())
        output.loss.backward()
        assert output.loss.dtype == torch.float32 and low.grad.dtype == dtype
        assert {metric.dtype for metric in output.metrics.values()} == {torch.float32}
        assert imitation_loss(low, ids, gain.float()).dtype == torch.float32


def test_bf16_log_probs_are_subtracted_in_float32() -> None:
    ids, rewards = torch.tensor([[0]]), torch.tensor([-1.0])
    one, tiny = (torch.tensor([[value]], dtype=torch.bfloat16) for value in (-1.0, -(2.0**-10)))
    metrics = ipa_loss(tiny, one, tiny, ids, -torch.ones(1, 1), rewards).metrics
    assert metrics["mismatch_max"][0].item() == metrics["staleness_max"][0].item() == 1 - 2**-10


def test_log_probs_of_the_sampler_may_be_of_another_precision() -> None:
    logps, old, mu, ids, rewards = one_row([0, 0, -1, 1], log_ratio=-0.5, mismatch=0.25).tensors()
    single = logps.detach().float().requires_grad_()
    output = ipa_loss(single, old, mu, ids, -torch.ones(1, 4), rewards, mismatch_threshold=2.0, aggregation="sum")
    output.loss.backward()
    expected = math.exp(-0.5) * torch.tensor([[1.0, 1.0, 0.0, 1.0]])
    torch.testing.assert_close(single.grad, expected)
    assert output.metrics["mismatch_max"][0].item() == 0.25
    assert output.metrics["staleness_mean"].tolist() == [1.5, 3.0]


def test_a_mark_below_minus_one_is_refused() -> None:
    ids, values = torch.tensor([[0, -1], [-100, 0]]), -torch.ones(2, 2)
    for loss in (
        lambda: ipa_loss(values, values, values, ids, values, torch.ones(2)),
        lambda: imitation_loss(values, ids, values),
        lambda: calibrate(values, values, ids, "chunk"),
    ):
        with pytest.raises(ValueError, match="chunk_ids has -100: a token outside chunks is marked -1"):
            loss()
    with pytest.raises(ValueError, match="chunk_ids has -2"):
        imitation_loss(values, torch.tensor([[0, -2], [-1, 0]]), values)


def test_ids_of_32_bits_are_read_and_left_as_they_are() -> None:
    ids, values = torch.tensor([[0, -1, 1, 2]], dtype=torch.int32), torch.tensor([[-1.0, -2.0, -3.0, -4.0]])
    wide = imitation_loss(values, ids.long(), torch.ones(1, 4))
    assert imitation_loss(values, ids, torch.ones(1, 4)) == wide == 8 / 3
    assert ids.tolist() == [[0, -1, 1, 2]]


def test_returns_may_be_of_another_precision_than_the_imitated_log_probs() -> None:
    ids, gain = torch.tensor([[0, -1, 1]]), torch.tensor([[0.5, 7.0, 0.1]], dtype=torch.float64)
    logps = torch.tensor([[-1.0, math.nan, -2.0]], requires_grad=True)
    loss = imitation_loss(logps, ids, gain, aggregation="sum")
    loss.backward()
    assert loss.item() == pytest.approx(0.7) and loss.dtype == torch.float32
    assert torch.equal(logps.grad, -torch.tensor([[0.5, 0.0, 0.1]]))  # to the last bit
    assert gain.tolist() == [[0.5, 7.0, 0.1]]


def test_calibration_is_in_float64_whatever_it_is_given() -> None:
    ids, old = torch.tensor([[0, 1, 1]]), torch.tensor([[-1.0, -1.0, -1.0]])
    mu = old - torch.tensor([[0.125, 0.25, 0.5]])
    assert calibrate(old, mu, ids, "sequence")["max"] == pytest.approx(math.exp(0.875 / 3), rel=1e-12)
    assert calibrate(old, mu, ids, "chunk")["max"] == pytest.approx(math.exp(0.375), rel=1e-12)


def test_a_chunk_is_one_wherever_its_tokens_lie() -> None:
    """Split by observations, and at the end of a row before a row that begins with a chunk of the same number."""
    apart = one_row([0, -1, 0, 1, -1, 1], log_ratio=[-0.2, 9.0, -0.4, -1.0, 9.0, -2.0])
    _, grad = run(apart, gamma=1.0, aggregation="sum")
    first, second = math.exp(-0.3), math.exp(-1.5)
    expected = torch.tensor([[first, 0, first, second, 0, second]], dtype=torch.float64)
    torch.testing.assert_close(grad, expected)
    ids = np.array([[-1, 0], [0, 0]])
    old = np.full((2, 2), -2.0)
    rows = oracle.Batch(logps=old + [[0, -1.0], [-2.0, -3.0]], old=old, mu=old, chunk_ids=ids, rewards=-np.ones(2))
    _, grad = run(rows, gamma=1.0, aggregation="sum")
    expected = torch.tensor([[0, math.exp(-1)], [math.exp(-2.5)] * 2], dtype=torch.float64)
    torch.testing.assert_close(grad, expected)


def test_gradcheck_where_no_stop_gradient_is_involved() -> None:
    torch.manual_seed(0)
    ids = torch.tensor([[0, 0, -1, 1, 2], [-1, 0, 0, -1, 1]])
    logps = (-torch.rand(2, 5, dtype=torch.float64)).requires_grad_()
    old, mu = (-torch.rand(2, 5, dtype=torch.float64) for _ in range(2))
    rewards = torch.tensor([1.0, 0.4], dtype=torch.float64)
    gain = chunk_returns(ids, rewards, 0.9)
    for aggregation in oracle.AGGREGATIONS:
        for level in oracle.LEVELS:
            switches = {"mask_level": level, "aggregation": aggregation}
            positives = partial(ipa_loss, old_logps=old, sampler_logps=mu, chunk_ids=ids, chunk_returns=gain,
                                rewards=rewards, **switches)  # fmt: skip
            negatives = partial(positives, chunk_returns=-gain, rewards=-rewards, ratio_level="none")
            for function in (positives, negatives):
                assert torch.autograd.gradcheck(lambda x, f=function: f(x).loss, logps)
        assert torch.autograd.gradcheck(lambda x, a=aggregation: imitation_loss(x, ids, gain, aggregation=a), logps)


def test_the_ratio_carries_no_gradient() -> None:
    """The gradient on a negative is rho G, where a ratio with gradient would give rho G (1 + log pi)."""
    _, grad = run(one_row([0], log_ratio=-1.0), aggregation="sum")
    assert grad.item() == pytest.approx(math.exp(-1), rel=1e-12)


def test_accumulation_over_a_model_equals_one_batch() -> None:
    """Batch 1 x 4 micro-batches = batch 4 x 1 in the gradients of a tiny language model."""
    torch.manual_seed(0)
    tokens, ids = torch.randint(0, 7, (4, 6)), torch.tensor([[0, 0, -1, 1, 1, 1], [-1, 0, -1, 1, -1, 2]] * 2)
    rewards = torch.tensor([1.0, -1.0, float("nan"), -0.5], dtype=torch.float64)
    model = torch.nn.Sequential(torch.nn.Embedding(7, 8), torch.nn.Tanh(), torch.nn.Linear(8, 7)).double()
    old = -2 + 0.3 * torch.randn(4, 6, dtype=torch.float64)

    def gradients(groups: list[list[int]]) -> list[Tensor]:
        model.zero_grad()
        for rows in groups:
            logps = model(tokens[rows]).log_softmax(-1).gather(2, tokens[rows][..., None])[..., 0]
            gain = chunk_returns(ids[rows], rewards[rows], 0.9)
            ipa_loss(logps, old[rows], old[rows], ids[rows], gain, rewards[rows], num_items=items).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    items = count_items(ids, rewards)
    for once, many in zip(gradients([[0, 1, 2, 3]]), gradients([[0], [1], [2], [3]]), strict=True):
        torch.testing.assert_close(once, many, rtol=1e-12, atol=1e-14)
        assert once.abs().max() > 0


@pytest.mark.parametrize("threshold", [0.0, -1.0])
def test_a_threshold_that_is_no_ratio_is_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match="mismatch_threshold"):
        run(one_row([0]), mismatch_threshold=threshold)


@pytest.mark.parametrize("argument", ["ratio_level", "mask_level", "aggregation"])
def test_an_unknown_choice_is_refused_by_name(argument: str) -> None:
    with pytest.raises(ValueError, match=f"{argument.split('_')[-1]}='turn'"):
        run(one_row([0]), **{argument: "turn"})


# Imitation


@ragged
@given(oracle.batches(), st.sampled_from(oracle.AGGREGATIONS), st.sampled_from((float("nan"), float("inf"), 7.0)))
def test_imitation_agrees_with_the_oracle_and_ignores_the_rest(batch, aggregation: str, garbage: float) -> None:
    logps, _, _, ids, _ = batch.tensors()
    gain = oracle.returns(batch.chunk_ids, np.ones(len(batch.chunk_ids)), 0.9)
    expected = oracle.imitation_gradient(batch.chunk_ids, gain, aggregation)
    spoiled = torch.where(ids >= 0, logps.detach(), garbage).requires_grad_()
    result = imitation_loss(spoiled, ids, torch.where(ids >= 0, torch.tensor(gain), garbage), aggregation=aggregation)
    result.backward()
    np.testing.assert_allclose(spoiled.grad, expected, rtol=1e-12, atol=0)
    assert result.item() == pytest.approx((expected * batch.logps).sum(), rel=1e-10, abs=1e-12)


def test_imitation_of_a_successful_trajectory_is_its_positive_term() -> None:
    """Eq. 10's left part is eq. 9 on an expert trajectory without mask."""
    batch = one_row([0, 0, -1, 1, 2], reward=1.0, log_ratio=0.3)
    logps, _, _, ids, rewards = batch.tensors()
    output, _ = run(batch, mask_level="none")
    assert imitation_loss(logps, ids, chunk_returns(ids, rewards, 0.95)).item() == pytest.approx(output.loss.item())


def test_imitation_counts_its_own_items() -> None:
    ids, gain = torch.tensor([[0, 0, -1, 1]]), torch.ones(1, 4)
    assert imitation_loss(torch.full((1, 4), -2.0), ids, gain, num_items=12).item() == pytest.approx(0.5)


# Metrics


def test_metrics_by_hand() -> None:
    """One failed row of chunks {0: 2 tokens, 1: 1 token}, one successful row of one chunk."""
    old = np.full((2, 4), -2.0)
    ids = np.array([[0, 0, -1, 1], [0, 0, 0, -1]])
    step = np.array([[0.5, 0.3, 9.0, -1.0], [0.2, 0.2, 0.2, 9.0]])
    gap = np.array([[0.0, 0.0, 9.0, 0.1], [-0.3, 0.0, 0.0, 9.0]])
    batch = oracle.Batch(old + step, old, old - gap, ids, np.array([-1.0, 0.5]))
    output, _ = run(batch, gamma=1.0)
    assert list(output.metrics) == list(METRICS)
    assert all(pair.shape == (2,) and not pair.requires_grad for pair in output.metrics.values())
    got = {name: pair.tolist() for name, pair in output.metrics.items()}
    assert got["masked_chunks"] == [1, 3]  # chunk 1 of the failed row: exp(0.1) > 1.02
    assert got["clipped_negatives"] == [1, 2]  # chunk 0 of the failed row; the successful row has no ratio
    assert got["positive_share"] == [1.5, 3.5] and got["negative_share"] == [2, 3.5]
    assert got["mismatch_mean"] == pytest.approx([0.4, 6]) and got["mismatch_max"] == pytest.approx([0.3, 6])
    assert got["staleness_mean"] == pytest.approx([2.4, 6]) and got["staleness_max"] == pytest.approx([1.0, 6])
    for name, means in (("mismatch", [0.0, 0.1, -0.1]), ("ratio", [0.4, -1.0, 0.2])):
        low, high = np.quantile(np.exp(means), [0.01, 0.99])
        assert got[f"{name}_p01"] == pytest.approx([low, 3]) and got[f"{name}_p99"] == pytest.approx([high, 3])


@pytest.mark.parametrize("chunks", [1, 2, 101, 250])
def test_the_tails_are_percentiles_over_chunks(chunks: int) -> None:
    """On a percentile's own chunk (101) and between two."""
    rng = np.random.default_rng(chunks)
    step, gap = rng.normal(0, 0.3, (2, chunks))
    metrics = run(one_row(list(range(chunks)), log_ratio=step, mismatch=gap))[0].metrics
    for name, logs in (("mismatch", gap), ("ratio", step)):
        for tail, q in (("p01", 1), ("p99", 99)):
            expected = np.percentile(np.exp(logs), q)
            assert metrics[f"{name}_{tail}"].tolist() == pytest.approx([expected, chunks], rel=1e-12)


def test_a_reward_of_zero_counts_among_the_negatives() -> None:
    output, _ = run(one_row([0, 1], reward=0.0, log_ratio=[0.1, -0.1]))
    assert output.metrics["clipped_negatives"].tolist() == [1, 2]


def test_shares_of_a_token_level_count_each_chunk_once() -> None:
    batch = one_row([0, 0, 0, 0, 1], mismatch=[1.0, 0, 0, 0, 1.0], log_ratio=[1.0, 1.0, -1.0, -1.0, -1.0])
    output, _ = run(batch, mask_level="token", ratio_level="token")
    assert output.metrics["masked_chunks"].tolist() == [1.25, 2]
    assert output.metrics["clipped_negatives"].tolist() == [0.5, 2]


@pytest.mark.parametrize("level", ["none", "sequence"])
def test_shares_of_the_coarse_levels(level: str) -> None:
    batch = one_row([0, 0, 1], mismatch=[0.1, 0.1, 0.0], log_ratio=0.4)
    output, _ = run(batch, mask_level=level, ratio_level=level)
    expected = [2, 2] if level == "sequence" else [0, 2]
    assert output.metrics["masked_chunks"].tolist() == expected
    assert output.metrics["clipped_negatives"].tolist() == expected


def test_merging_pools_means_and_keeps_the_worst_extremes() -> None:
    first = torch.tensor([[1.0, 4.0]] * len(METRICS))
    second = torch.tensor([[3.0, 4.0]] * len(METRICS))
    empty = torch.tensor([[9.0, 0.0]] * len(METRICS))
    merged = merge_metrics(torch.stack([first, second, empty]))
    for name in METRICS:
        expected = 3.0 if name.endswith(("_max", "_p99")) else 1.0 if name.endswith("_p01") else 0.5
        assert merged[name] == expected, name


@pytest.mark.parametrize("level", oracle.LEVELS)
def test_the_arguments_are_left_as_they_were(level) -> None:
    logps = -torch.arange(1.0, 6.0).repeat(2, 1).requires_grad_()
    ids = torch.tensor([[0, 0, 0, -1, 1], [-1, 0, -1, -1, -1]])
    given = [logps, logps.detach() - 0.1, logps.detach() - 0.2, ids, torch.ones(2, 5), torch.ones(2)]
    before = [each.clone() for each in given]
    ipa_loss(*given, ratio_level=level, mask_level=level).loss.backward()
    assert all(torch.equal(now, then) for now, then in zip(given, before, strict=True))


# Calibration


def sample() -> tuple[Tensor, Tensor, Tensor]:
    """Two rows: chunk means of log pi_old - log mu 0.02 and 0.04, and 0.06; row means 0.025 and 0.06."""
    ids = torch.tensor([[0, 0, 0, -1, 1], [-1, 0, -1, -1, -1]])
    old = torch.zeros(2, 5, dtype=torch.float64)
    mu = -torch.tensor([[0.01, 0.02, 0.03, math.nan, 0.04], [math.inf, 0.06, 5.0, 5.0, 5.0]], dtype=old.dtype)
    return old, mu, ids


@pytest.mark.parametrize(
    ("level", "units"),
    [("token", [0.01, 0.02, 0.03, 0.04, 0.06]), ("chunk", [0.02, 0.04, 0.06]), ("sequence", [0.025, 0.06])],
)
def test_calibration_takes_percentiles_over_the_units_of_its_level(level: str, units: list[float]) -> None:
    got = calibrate(*sample(), level)
    ratios = np.exp(units)
    assert got["count"] == len(units)
    for name, q in (("p1", 1), ("p50", 50), ("p90", 90), ("p99", 99), ("max", 100)):
        assert got[name] == pytest.approx(np.percentile(ratios, q), rel=1e-12), name
    assert got["proposed"] == got["p99"]


def test_calibration_never_proposes_to_mask_rounding() -> None:
    old, _, ids = sample()
    assert calibrate(old, old - 1e-7, ids, "chunk")["proposed"] == 1.001


def test_calibration_without_a_chunk_says_so() -> None:
    with pytest.raises(ValueError, match="no chunk"):
        calibrate(torch.zeros(1, 2), torch.zeros(1, 2), torch.full((1, 2), -1), "chunk")


@example(2)
@given(st.integers(0, 40))
@oracle.searches(10)
def test_the_proposed_threshold_masks_about_one_unit_in_a_hundred(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids = torch.arange(1000)[None]
    mu = torch.tensor(rng.normal(-1, 0.05, (1, 1000)))
    threshold = calibrate(-torch.ones(1, 1000), mu, ids, "chunk")["proposed"]
    old, ones = -torch.ones(1, 1000, dtype=torch.float64), torch.ones(1, 1000)
    output = ipa_loss(mu, old, mu, ids, ones, ones[:, 0], mismatch_threshold=threshold)
    assert output.metrics["masked_chunks"][0].item() == 10

"""chunk_returns: eq. 7."""

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_rome.credit import chunk_returns


@settings(max_examples=60, deadline=None)
@given(oracle.batches(), st.sampled_from((0.0, 0.5, 0.8, 0.95, 1.0)))
def test_agrees_with_the_oracle(batch: oracle.Batch, gamma: float) -> None:
    got = chunk_returns(torch.tensor(batch.chunk_ids), torch.tensor(batch.rewards), gamma)
    np.testing.assert_allclose(got, oracle.returns(batch.chunk_ids, batch.rewards, gamma), rtol=1e-12, atol=0)
    assert got.dtype == torch.float64


def test_three_chunks_by_hand() -> None:
    ids = torch.tensor([[0, -1, 1, 1, -1, 2], [0, 0, -1, -1, -1, -1]])
    got = chunk_returns(ids, torch.tensor([1.0, -2.0]), 0.5)
    assert got.tolist() == [[0.25, 0, 0.5, 0.5, 0, 1.0], [-2.0, -2.0, 0, 0, 0, 0]]
    assert got.dtype == torch.float32


def test_the_last_chunk_gets_the_reward_itself_whatever_the_length() -> None:
    for chunks in range(1, 6):
        got = chunk_returns(torch.arange(chunks)[None], torch.tensor([0.7], dtype=torch.float64), 0.9)
        assert got[0, -1].item() == 0.7
        assert got[0, 0].item() == pytest.approx(0.7 * 0.9 ** (chunks - 1), rel=1e-12)


def test_gamma_one_is_the_trajectory_reward() -> None:
    assert chunk_returns(torch.tensor([[0, 1, -1, 2]]), torch.tensor([3.0]), 1.0).tolist() == [[3, 3, 0, 3]]


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf")])
def test_a_row_without_a_reward_gets_zero_and_leaves_the_others_alone(reward: float) -> None:
    got = chunk_returns(torch.tensor([[0, 1], [0, 1]]), torch.tensor([reward, 1.0]), 0.5)
    assert got.tolist() == [[0, 0], [0.5, 1]]


def test_num_chunks_places_the_first_chunks_of_a_longer_trajectory() -> None:
    ids = torch.tensor([[0, 1], [0, -1]])
    assert chunk_returns(ids, torch.ones(2), 0.5, num_chunks=4).tolist() == [[0.125, 0.25], [0.125, 0]]
    assert chunk_returns(ids, torch.ones(2), 0.5, num_chunks=torch.tensor([2, 3])).tolist() == [[0.5, 1], [0.25, 0]]


def test_everything_is_computed_on_the_device_of_the_arguments() -> None:
    """With another default device, a tensor made without naming one would not fit the arguments."""
    ids, rewards = torch.tensor([[0, 1]]), torch.ones(1)
    with torch.device("meta"):
        for chunks in (None, 3):
            assert chunk_returns(ids, rewards, 0.5, num_chunks=chunks).device.type == "cpu"


def test_rows_without_a_chunk() -> None:
    assert chunk_returns(torch.full((2, 3), -1), torch.ones(2), 0.5).tolist() == [[0, 0, 0]] * 2


@pytest.mark.parametrize("gamma", [-0.1, 1.01, float("nan")])
def test_gamma_outside_the_unit_interval_is_refused(gamma: float) -> None:
    with pytest.raises(ValueError, match="gamma"):
        chunk_returns(torch.tensor([[0]]), torch.ones(1), gamma)


def test_a_mark_below_minus_one_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk_ids has -2: a token outside chunks is marked -1"):
        chunk_returns(torch.tensor([[0, 1], [-2, 0]]), torch.ones(2), 0.5)

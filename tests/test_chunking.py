"""Chunk ids and packing: one packed sample per trajectory, observations and expert prefix outside chunks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import episode, trajectory, turn

from mini_rome.chunking import (
    OUTSIDE,
    PackedSample,
    chunk_ids,
    pack,
    pack_episode,
    turn_tokens,
    validate_chunk_ids,
)
from mini_rome.types import Trajectory


@st.composite
def episodes(draw: st.DrawFn) -> Trajectory:
    lengths = draw(st.lists(st.integers(1, 4), max_size=5))
    observed = [draw(st.integers(0, 3)) for _ in lengths]
    return episode(lengths, observed, start=draw(st.integers(0, len(lengths))))


def test_a_chunk_is_what_the_agent_wrote_between_two_observations() -> None:
    sample = pack(episode([2, 1], [3, 2]))
    assert sample.prompt_ids == [1, 2]
    assert sample.completion_ids == [10, 11, 100, 100, 100, 20]
    assert sample.chunk_ids == [0, 0, -1, -1, -1, 1]
    assert sample.env_mask == [1, 1, 0, 0, 0, 1]
    assert sample.logprobs == [-0.1, -0.11, 0.0, 0.0, 0.0, -0.2]
    assert sample.il_chunk_ids == [-1] * 6
    assert sample.policy_versions == [8, 9]


def test_the_stop_token_belongs_to_its_chunk_and_the_newline_after_it_does_not() -> None:
    stop, newline = 2, 3
    turns = [turn(ids=(10, stop), observation_ids=[newline, 90]), turn(ids=(11, stop), observation_ids=[newline])]
    sample = pack(trajectory(turns))
    assert sample.completion_ids == [10, stop, newline, 90, 11, stop]
    assert sample.chunk_ids == [0, 0, -1, -1, 1, 1]


def test_several_calls_a_malformed_and_a_cut_response_are_one_chunk_each() -> None:
    turns = [turn(commands=["a", "b"]), turn("", malformed=True), turn("x", ids=(5,) * 7, malformed=True)]
    assert validate_chunk_ids(pack(trajectory(turns)).chunk_ids) == 3


def test_adjacent_turns_without_an_observation_stay_two_chunks() -> None:
    assert pack(episode([2, 1], [0, 0])).chunk_ids == [0, 0, 1]


def test_the_trailing_observation_is_dropped_everywhere() -> None:
    for sample in (pack(episode([1], [5])), pack(episode([1], [5], start=1), prefix="completion")):
        assert sample.completion_ids == [10]
    assert pack(episode([1, 1], [2, 5], start=2)).prompt_ids == [1, 2, 10, 100, 100, 20]
    assert [len(observed) for _, _, observed in turn_tokens(episode([1, 1], [2, 5]).turns)] == [2, 0]


def test_an_expert_prefix_in_the_prompt_gets_no_log_probs() -> None:
    sample = pack(episode([2, 1, 2], [1, 2, 1], start=2))
    assert sample.prompt_ids == [1, 2, 10, 11, 100, 20, 200, 200]
    assert sample.completion_ids == [30, 31] and sample.logprobs == [-0.3, -0.31]
    assert sample.chunk_ids == [0, 0] and sample.il_chunk_ids == [-1, -1] and sample.env_mask == [1, 1]
    assert sample.policy_versions == [10]


def test_an_expert_prefix_in_the_completion_is_numbered_apart_and_masked() -> None:
    sample = pack(episode([2, 1, 2], [1, 2, 1], start=2), prefix="completion")
    assert sample.prompt_ids == [1, 2]
    assert sample.completion_ids == [10, 11, 100, 20, 200, 200, 30, 31]
    assert sample.chunk_ids == [-1] * 6 + [0, 0]
    assert sample.il_chunk_ids == [0, 0, -1, 1, -1, -1, -1, -1]
    assert sample.env_mask == [0] * 6 + [1, 1]
    assert sample.logprobs == [0.0] * 6 + [-0.3, -0.31]


@pytest.mark.parametrize("prefix", ["prompt", "completion"])
def test_without_policy_turns_there_is_no_chunk(prefix: str) -> None:
    for sample in (pack(episode([], []), prefix), pack(episode([1, 2], [1, 1], start=2), prefix)):
        assert set(sample.chunk_ids) <= {OUTSIDE} and sample.policy_versions == []
    assert pack(episode([], [])).completion_ids == []


@settings(max_examples=60, deadline=None)
@given(episodes())
def test_packing_loses_no_token_and_keeps_columns_together(whole: Trajectory) -> None:
    in_prompt, in_completion = pack(whole), pack(whole, prefix="completion")
    sequence = list(whole.prompt_ids)
    for index, each in enumerate(whole.turns):
        sequence += each.ids + (each.observation_ids if index < len(whole.turns) - 1 else [])
    for sample in (in_prompt, in_completion):
        assert sample.prompt_ids + sample.completion_ids == sequence
        columns = (sample.logprobs, sample.env_mask, sample.chunk_ids, sample.il_chunk_ids)
        assert {len(column) for column in columns} == {len(sample.completion_ids)}
        assert validate_chunk_ids(sample.chunk_ids) == len(whole.policy_turns) == len(sample.policy_versions)
        assert sample.env_mask == [int(k >= 0) for k in sample.chunk_ids]
        for k, each in enumerate(whole.policy_turns):
            mine = [t for t, number in enumerate(sample.chunk_ids) if number == k]
            assert [sample.completion_ids[t] for t in mine] == each.ids
            assert [sample.logprobs[t] for t in mine] == each.logprobs
    assert in_completion.chunk_ids == chunk_ids(whole)
    assert in_completion.il_chunk_ids == chunk_ids(whole, expert=True)
    assert validate_chunk_ids(in_completion.il_chunk_ids) == whole.start


def test_packing_leaves_the_trajectory_alone() -> None:
    whole = episode([2, 1], [1, 1], start=1)
    before = [(list(t.ids), list(t.logprobs), list(t.observation_ids)) for t in whole.turns]
    for prefix in ("prompt", "completion"):
        pack(whole, prefix).completion_ids.append(5)
        pack(whole, prefix).prompt_ids.append(5)
    assert [(t.ids, t.logprobs, t.observation_ids) for t in whole.turns] == before and whole.prompt_ids == [1, 2]


@pytest.mark.parametrize("field", [{"ids": ()}, {"logprobs": [-0.5]}, {"logprobs": [-0.5] * 3}])
def test_a_policy_turn_without_its_tokens_or_log_probs_is_refused(field: dict) -> None:
    with pytest.raises(ValueError, match="turn 1 has"):
        pack(trajectory([turn(), turn(**field)]))


def test_two_samples_share_no_list() -> None:
    first, second = (PackedSample([], [], [], [], [], []) for _ in range(2))
    first.policy_versions.append(1)
    first.contexts.append(1)
    assert second.policy_versions == second.contexts == []


def test_chains_of_an_episode_stand_one_after_the_other_and_their_chunks_count_as_they_were_asked_for() -> None:
    """An expert's turn, a chunk, two chunks of a sub-agent with a prompt of its own, and the last chunk."""
    whole = episode([1, 2, 1], [1, 1, 0], start=1)
    inner = [
        turn(ids=(50,), logprobs=[-0.5], observation_ids=[500], policy_version=21),
        turn(ids=(60, 61), logprobs=[-0.6, -0.61], policy_version=22),
    ]
    for each, place in zip([*whole.turns[1:], *inner], [0, 3, 1, 2], strict=True):
        each.place = place
    whole.chains = [Trajectory(whole.task, [3, 4], inner)]
    assert pack_episode(whole) == PackedSample(
        prompt_ids=[1, 2, 10, 100],
        completion_ids=[20, 21, 200, 30, 3, 4, 50, 500, 60, 61],
        logprobs=[-0.2, -0.21, 0.0, -0.3, 0.0, 0.0, -0.5, 0.0, -0.6, -0.61],
        env_mask=[1, 1, 0, 1, 0, 0, 1, 0, 1, 1],
        chunk_ids=[0, 0, -1, 3, -1, -1, 1, -1, 2, 2],
        il_chunk_ids=[-1] * 10,
        policy_versions=[9, 21, 22, 10],
        contexts=[0] * 4 + [1] * 6,
    )
    assert whole.prompt_ids == [1, 2] and whole.chains[0].prompt_ids == [3, 4]


@pytest.mark.parametrize("start", [0, 2])
def test_an_episode_with_one_chain_of_the_policy_is_packed_as_that_chain(start: int) -> None:
    alone = episode([2, 1], [1, 1], start=start)
    assert pack_episode(alone) == pack(alone) and pack_episode(alone).contexts == []
    inner = episode([1, 3], [2, 0])
    assert pack_episode(episode([1], [1], start=1, chains=[inner])) == pack(inner)


@pytest.mark.parametrize(("ids", "chunks"), [([], 0), ([-1, -1], 0), ([0], 1), ([-1, 0, 0, -1, 0, 1, 2, 2, -1], 3)])
def test_valid_ids_are_counted(ids: list[int], chunks: int) -> None:
    assert validate_chunk_ids(ids) == chunks


@pytest.mark.parametrize("ids", [[1], [0, 2], [0, 1, 0], [0, -1, 2], [-2], [0, -2], [2, 1, 0]])
def test_gaps_wrong_order_and_other_negatives_are_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="ids must be 0..K-1 in order"):
        validate_chunk_ids(ids)

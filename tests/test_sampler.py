"""Sampling: log-probs are the model's own, draws depend on the key alone, and a kept context changes nothing."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from small import STOP, small_model

from mini_rome.errors import ConfigError
from mini_rome.sampler.base import Completion, Request, SamplingParams, uniforms
from mini_rome.sampler.scripted import ScriptedSampler
from mini_rome.sampler.transformers import TransformersSampler, draw, filtered_log_probs

TRAINING = SamplingParams(max_new_tokens=6)
PROMPTS = [[2, 3, 4], [5], [6, 7, 8, 9, 10, 11, 2], [3, 3], [4, 2, 9, 9, 5]]


def sampler(dtype: torch.dtype | None = None) -> TransformersSampler:
    return TransformersSampler(small_model(), STOP, dtype)


def full_forward(model: torch.nn.Module, context: list[int], completion: list[int]) -> list[float]:
    """log-probs of the completion by one plain forward pass without cache or padding."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*context, *completion]])).logits[0]
    logps = torch.log_softmax(logits.float(), -1)
    return [logps[len(context) - 1 + at, token].item() for at, token in enumerate(completion)]


def play(
    sampler: TransformersSampler, batches: list[list[list[int]]], params: SamplingParams = TRAINING
) -> dict[tuple[int, int], tuple[list[int], Completion]]:
    """Turns of the five episodes; batches[t]: which are asked together. (context, completion) by (episode, turn)."""
    contexts = {episode: list(prompt) for episode, prompt in enumerate(PROMPTS)}
    found = {}
    for turn, groups in enumerate(batches):
        for group in groups:
            requests = [Request(episode, list(contexts[episode]), (7, 1, episode, turn)) for episode in group]
            for episode, completion in zip(group, sampler.generate(requests, params), strict=True):
                found[episode, turn] = (list(contexts[episode]), completion)
                contexts[episode] += [*completion.ids, 8, 2 + turn, 9]  # the answer of the environment
    return found


TOGETHER = [[[0, 1, 2, 3, 4]]] * 4
SPLIT = [[[0, 1, 2, 3, 4]], [[0, 2], [4, 1], [3]], [[3, 4, 0, 2, 1]], [[1], [2, 3], [0, 4]]]
ALONE = [[[0], [1], [2], [3], [4]]] * 4


@pytest.mark.parametrize("batches", [TOGETHER, SPLIT, ALONE], ids=["together", "split and merged", "alone"])
def test_log_probs_equal_a_full_forward_over_turns(batches: list[list[list[int]]]) -> None:
    generator = sampler()
    found = play(generator, batches)
    assert len(found) == 20
    lengths = {len(completion.ids) for _, completion in found.values()}
    assert len(lengths) > 2  # rows stopped at different places
    for context, completion in found.values():
        expected = full_forward(small_model(), context, completion.ids)
        assert completion.logprobs == pytest.approx(expected, abs=1e-5)
        assert STOP not in completion.ids[:-1]
        assert completion.ids[-1] == STOP or len(completion.ids) == TRAINING.max_new_tokens
    spread = np.std([score for _, completion in found.values() for score in completion.logprobs])
    assert spread > 0.1  # otherwise 1e-5 would say nothing


def test_the_same_key_gives_the_same_tokens_whatever_else_is_in_the_batch() -> None:
    runs = [play(sampler(), batches) for batches in (TOGETHER, SPLIT, ALONE)]
    for run in runs[1:]:
        assert {at: completion.ids for at, (_, completion) in run.items()} == {
            at: completion.ids for at, (_, completion) in runs[0].items()
        }


def test_another_key_gives_other_tokens() -> None:
    requests = [Request(episode, [2, 3, 4], (0, 0, episode, 0)) for episode in range(12)]
    assert len({tuple(completion.ids) for completion in sampler().generate(requests, TRAINING)}) > 6


def test_completions_come_in_the_order_of_the_requests() -> None:
    generator = sampler()
    play(generator, SPLIT[:2])
    order = [4, 0, 3, 1, 2]
    requests = [Request(episode, [*PROMPTS[episode], 2], (1, 1, episode, 0)) for episode in order]
    together = generator.generate(requests, TRAINING)
    assert [c.ids for c in together] == [sampler().generate([request], TRAINING)[0].ids for request in requests]


@pytest.mark.parametrize("past", [[7, 8, 9, 10] * 4, [2, 3, 4, *[11] * 12], [9, 9], [2], [2, 3, 4]])
def test_a_changed_past_is_read_again(past: list[int]) -> None:
    generator = sampler()
    generator.generate([Request(0, [2, 3, 4], (0, 0, 0, 0)), Request(1, [2, 5], (0, 0, 1, 0))], TRAINING)
    completion = generator.generate([Request(0, past, (0, 0, 0, 1))], TRAINING)[0]
    assert completion.logprobs == pytest.approx(full_forward(small_model(), past, completion.ids), abs=1e-5)


@pytest.mark.parametrize("episodes", [None, [0, 2]])
def test_forgetting_changes_no_result(episodes: list[int] | None) -> None:
    generator, other = sampler(), sampler()
    first = play(generator, TOGETHER[:1])
    play(other, TOGETHER[:1])
    other.forget(episodes)
    contexts = {episode: [*context, *done.ids, 8] for (episode, _), (context, done) in first.items()}
    requests = [Request(episode, ids, (3, 0, episode, 1)) for episode, ids in contexts.items()]
    kept, renewed = generator.generate(requests, TRAINING), other.generate(requests, TRAINING)
    assert [c.ids for c in kept] == [c.ids for c in renewed]
    for one, two in zip(kept, renewed, strict=True):
        assert one.logprobs == pytest.approx(two.logprobs, abs=1e-5)


def test_two_requests_of_one_episode_are_refused() -> None:
    with pytest.raises(ValueError, match="two requests of one episode"):
        sampler().generate([Request(0, [2], (0, 0, 0, 0)), Request(0, [3], (0, 0, 0, 1))], TRAINING)


def test_no_request_is_no_completion() -> None:
    assert sampler().generate([], TRAINING) == []


def test_the_model_is_left_in_the_mode_it_was_in() -> None:
    model = small_model().train()
    TransformersSampler(model, STOP).generate([Request(0, [2], (0, 0, 0, 0))], TRAINING)
    assert model.training


def test_a_bfloat16_copy_differs_from_the_trainer_and_follows_only_a_sync() -> None:
    model = small_model()
    generator = TransformersSampler(model, STOP, torch.bfloat16)
    request = Request(0, [2, 3, 4, 5], (0, 0, 0, 0))
    before = generator.generate([request], TRAINING)[0]
    exact = full_forward(model, request.ids, before.ids)
    gap = max(abs(one - two) for one, two in zip(before.logprobs, exact, strict=True))
    assert 1e-4 < gap < 0.5
    assert model.dtype == torch.float32
    with torch.no_grad():
        model.lm_head.weight *= -1
    generator.forget()
    assert generator.generate([request], TRAINING)[0] == before
    generator.sync(model, version=5)
    after = generator.generate([request], TRAINING)[0]
    assert (after.version, before.version) == (5, 0)
    assert after.logprobs != before.logprobs


def test_log_probs_are_those_of_the_whole_distribution_whatever_the_draw_was_cut_to() -> None:
    params = SamplingParams(max_new_tokens=4, temperature=0.7, top_p=0.8, top_k=3)
    for context, completion in play(sampler(), TOGETHER[:2], params).values():
        assert completion.logprobs == pytest.approx(full_forward(small_model(), context, completion.ids), abs=1e-5)


def test_temperature_zero_takes_the_likeliest_token() -> None:
    context, completion = play(sampler(), TOGETHER[:1], SamplingParams(max_new_tokens=1, temperature=0))[2, 0]
    with torch.no_grad():
        logits = small_model()(input_ids=torch.tensor([context])).logits[0, -1]
    assert completion.ids == [logits.argmax().item()]


PROBABILITIES = [0.10, 0.50, 0.15, 0.25]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.10, 0.50, 0.15, 0.25]),
        ({"top_k": 2}, [0, 2 / 3, 0, 1 / 3]),
        ({"top_k": 9}, [0.10, 0.50, 0.15, 0.25]),
        ({"top_p": 0.7}, [0, 2 / 3, 0, 1 / 3]),  # the second one brings the mass from 0.5 over 0.7
        ({"top_p": 0.76}, [0, 5 / 9, 1.5 / 9, 2.5 / 9]),
        ({"top_p": 0.3}, [0, 1, 0, 0]),  # the likeliest one always stays
        ({"top_k": 3, "top_p": 0.8}, [0, 2 / 3, 0, 1 / 3]),  # 0.5 + 0.25 of the 0.9 that top-k left is 0.83
        ({"temperature": 0.5}, [0.01 / 0.345, 0.25 / 0.345, 0.0225 / 0.345, 0.0625 / 0.345]),
        ({"temperature": 0}, [0, 1, 0, 0]),
    ],
)
def test_filters_by_hand(params: dict[str, float], expected: list[float]) -> None:
    rows = torch.tensor([PROBABILITIES, PROBABILITIES[::-1]]).log()
    filtered = filtered_log_probs(rows, SamplingParams(**params)).exp()
    assert filtered[0].tolist() == pytest.approx(expected, abs=1e-6)
    assert filtered[1].tolist() == pytest.approx(expected[::-1], abs=1e-6)


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 1), (0.499, 1), (0.501, 3), (0.749, 3), (0.751, 4), (1 - 2**-53, 4)]
)
def test_draw_by_hand(uniform: float, token: int) -> None:
    log_probs = torch.tensor([[0.0, 0.5, 0.0, 0.25, 0.25, 0.0]], dtype=torch.float64).log()
    assert draw(log_probs, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


def test_draws_have_the_frequencies_of_the_distribution() -> None:
    log_probs = torch.tensor([PROBABILITIES]).log().expand(4000, -1)
    tokens = draw(log_probs, torch.from_numpy(uniforms((1, 2, 3, 4), 4000)))
    counts = torch.bincount(tokens, minlength=4) / 4000
    for share, probability in zip(counts.tolist(), PROBABILITIES, strict=True):
        assert abs(share - probability) < 4 * math.sqrt(probability * (1 - probability) / 4000)


def test_uniforms_depend_on_every_part_of_the_key_and_not_on_the_count() -> None:
    assert uniforms((1, 2, 3, 4), 3).tolist() == uniforms((1, 2, 3, 4), 9)[:3].tolist()
    keys = [(1, 2, 3, 4), (0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0), (4, 3, 2, 1), (1, 2, 3 + 2**20, 4)]
    firsts = sorted(uniforms(key, 1)[0] for key in keys)
    assert all(later - earlier > 1e-9 for earlier, later in pairwise(firsts))


@pytest.mark.parametrize(
    ("option", "value"),
    [("max_new_tokens", 0), ("temperature", -0.1), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -1)],
)
def test_sampling_params_out_of_range_are_named(option: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{option}={value}"):
        SamplingParams(**{option: value})


def test_a_script_answers_by_turn_and_says_when_it_is_used_up() -> None:
    scripted = ScriptedSampler([[5, 6, STOP], [7, STOP]])
    scripted.sync(small_model(), version=3)
    replies = scripted.generate([Request(0, [2], (0, 0, 0, 1)), Request(1, [2], (0, 0, 1, 0))], TRAINING)
    assert replies == [Completion([7, STOP], [0.0, 0.0], 3), Completion([5, 6, STOP], [0.0] * 3, 3)]
    with pytest.raises(ConfigError, match="2 replies and was asked for turn 2"):
        scripted.generate([Request(0, [2], (0, 0, 0, 2))], TRAINING)

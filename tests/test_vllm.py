"""The vLLM sampler with a real engine: it keeps a sampler's contract, and a sync that went wrong stops the run."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from peft import LoraConfig, get_peft_model
from test_sampler import ALONE, PROMPTS, SPLIT, TOGETHER, TRAINING, full_forward, play
from transformers import Qwen3MoeForCausalLM

from mini_rome.errors import ConfigError, ParityError, SamplerError
from mini_rome.model import weights_hash
from mini_rome.rollout import Rollout
from mini_rome.sampler import make, vllm, vllm_model
from mini_rome.sampler.base import Request, SamplingParams
from mini_rome.sampler.vllm import VLLMSampler
from mini_rome.sandbox import Pool

pytestmark = pytest.mark.vllm

STOP = 1
SHAPE = {"head_dim": 32, "moe_intermediate_size": 32, "max_position_embeddings": 1024}  # what vLLM's kernels take
TEMPERED = SamplingParams(max_new_tokens=6, temperature=0.7, top_p=0.8, top_k=20)


def network(seed: int = 0, **changes: Any) -> Qwen3MoeForCausalLM:
    return tiny.model(seed, scale=2.0, **{**SHAPE, **changes}).eval()


@pytest.fixture(scope="module")
def engine() -> Iterator[VLLMSampler]:
    """The one engine of these tests; each test syncs the weights it wants."""
    sampler = VLLMSampler(network(), STOP, max_model_len=512)
    yield sampler
    sampler.close()


@pytest.fixture
def sampler(engine: VLLMSampler) -> VLLMSampler:
    engine.sync(network(), version=0)
    engine.stop_id = STOP
    return engine


@pytest.mark.parametrize("batches", [TOGETHER, SPLIT, ALONE], ids=["together", "split and merged", "alone"])
def test_log_probs_equal_a_full_forward_over_turns(sampler, batches):
    found = play(sampler, batches)
    assert len(found) == 20
    for context, completion in found.values():
        assert completion.logprobs == pytest.approx(full_forward(network(), context, completion.ids), abs=1e-5)
        assert completion.ids[-1] == STOP or len(completion.ids) == TRAINING.max_new_tokens
    assert np.std([score for _, completion in found.values() for score in completion.logprobs]) > 0.1


def test_the_same_key_gives_the_same_tokens_whatever_else_is_in_the_batch(sampler):
    runs = [play(sampler, batches) for batches in (TOGETHER, SPLIT, ALONE)]
    assert len({tuple(completion.ids) for _, completion in runs[0].values()}) > 15
    for run in runs[1:]:
        assert {at: done.ids for at, (_, done) in run.items()} == {at: done.ids for at, (_, done) in runs[0].items()}


def test_a_response_ends_with_the_stop_token_and_its_log_prob(sampler):
    first = sampler.generate([Request(0, [2, 3, 4], (0, 0, 0, 0))], TRAINING)[0]
    sampler.stop_id = first.ids[2]
    again = sampler.generate([Request(0, [2, 3, 4], (0, 0, 0, 0))], TRAINING)[0]
    length = first.ids.index(sampler.stop_id) + 1
    assert again.ids == first.ids[:length] and again.logprobs == pytest.approx(first.logprobs[:length], abs=1e-6)


def test_completions_come_in_the_order_of_the_requests(sampler):
    requests = [Request(episode, PROMPTS[episode], (1, 1, episode, 0)) for episode in (4, 0, 3, 1, 2)]
    together = sampler.generate(requests, TEMPERED)
    assert [c.ids for c in together] == [sampler.generate([request], TEMPERED)[0].ids for request in requests]
    assert sampler.generate([], TEMPERED) == []


def test_temperature_zero_takes_the_likeliest_token(sampler):
    completion = sampler.generate([Request(0, [7, 8], (0, 0, 0, 0))], SamplingParams(1, temperature=0))[0]
    with torch.no_grad():
        assert completion.ids == [network()(input_ids=torch.tensor([[7, 8]])).logits[0, -1].argmax().item()]


def test_the_turns_of_an_episode_share_their_prefix(sampler):
    context = [2 + at % 50 for at in range(100)]
    sampler.generate([Request(0, context, (0, 0, 0, 0))], TRAINING)
    before = sampler.cached_tokens
    sampler.generate([Request(0, [*context, 5, 6, 7], (0, 0, 0, 1))], TRAINING)
    assert sampler.cached_tokens - before == 96  # whole blocks of 32


def test_more_prompt_tokens_than_one_engine_step_takes(sampler):
    prompts = [[2 + (at + episode) % 60 for at in range(300)] for episode in range(16)]
    requests = [Request(episode, ids, (0, 0, episode, 0)) for episode, ids in enumerate(prompts)]
    assert sum(map(len, prompts)) > 2 * vllm.batched_tokens(512)
    for request, completion in zip(requests, sampler.generate(requests, TRAINING), strict=True):
        assert completion.logprobs == pytest.approx(full_forward(network(), request.ids, completion.ids), abs=1e-5)


def test_weights_follow_only_a_sync_which_forgets_the_cached_prefixes(sampler):
    request = Request(0, [2 + at % 50 for at in range(100)], (0, 0, 0, 0))
    before = sampler.generate([request], TRAINING)[0]
    other = network(seed=5)
    assert sampler.generate([request], TRAINING)[0] == before
    sampler.sync(other, version=7)
    after = sampler.generate([request], TRAINING)[0]
    assert (before.version, after.version) == (0, 7)
    assert after.logprobs == pytest.approx(full_forward(other, request.ids, after.ids), abs=1e-5)
    assert after.logprobs != before.logprobs


def test_nothing_that_the_engine_does_moves_the_global_random_numbers(sampler):
    def numbers() -> list[float]:
        return [random.random(), float(np.random.rand()), torch.rand(1).item()]

    other = network(seed=1)
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    expected = numbers()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    sampler.sync(other, version=1)
    sampler.generate([Request(0, [2, 3], (0, 0, 0, 0))], TRAINING)
    assert numbers() == expected


def test_adapters_on_attention_and_experts_arrive_merged(sampler):
    base = network()
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = LoraConfig(r=2, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj"], target_parameters=experts)
    model = get_peft_model(copy.deepcopy(base), lora).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    sampler.sync(model, version=1)
    completion = sampler.generate([Request(0, [2, 3, 4], (0, 0, 0, 0))], TRAINING)[0]
    assert completion.logprobs == pytest.approx(full_forward(model, [2, 3, 4], completion.ids), abs=1e-5)
    assert completion.logprobs != pytest.approx(full_forward(base, [2, 3, 4], completion.ids), abs=1e-2)


@pytest.mark.parametrize("syncs", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_many_syncs_do_not_drift(sampler, syncs):
    model = get_peft_model(network(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"])).eval()
    before = weights_hash(model)
    sampler.sync(model, version=0)
    ids = sampler._probe.ids
    first = sampler.score(ids)
    for version in range(1, syncs + 1):
        sampler.sync(model, version)
    assert sampler.score(ids) == first  # bit for bit
    assert sampler._probe.unreached == 0
    assert weights_hash(model) == before


def corrupted(monkeypatch: pytest.MonkeyPatch, part: str, factor: float | None) -> None:
    """From now on this matrix is sent wrong, or not at all."""
    real = vllm.split_experts

    def wrong(name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        for found, matrix in real(name, weight):
            if found != part or factor is not None:
                yield found, matrix * factor if found == part else matrix

    monkeypatch.setattr(vllm, "split_experts", wrong)


def test_a_corrupted_expert_stops_the_run(sampler, tmp_path, monkeypatch):
    corrupted(monkeypatch, "model.layers.1.mlp.experts.2.up_proj.weight", 1.01)
    sampler.stop_id = tiny.chat().stop_id
    trainer = tiny.trainer(tmp_path, Rollout(tiny.chat(), sampler, Pool("sim")), network())
    with pytest.raises(ParityError, match="expert 2 of layer 1"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_run_trains_with_this_sampler(sampler, tmp_path):
    sampler.stop_id = tiny.chat().stop_id
    rollout = Rollout(tiny.chat(), sampler, Pool("sim"), extra_turns=1)
    trainer = tiny.trainer(tmp_path, rollout, network(), max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2 and sampler.version == 1


@pytest.mark.parametrize("part", ["model.layers.0.self_attn.o_proj.weight", "model.layers.1.mlp.gate.weight",
                                  "lm_head.weight", "model.norm.weight"])  # fmt: skip
def test_any_other_wrong_weight_fails_the_probe(sampler, monkeypatch, part):
    corrupted(monkeypatch, part, 1.2)
    with pytest.raises(ParityError, match="experts agree one by one"):
        sampler.sync(network(), version=1)


def test_a_weight_that_is_not_sent_is_named(sampler, monkeypatch):
    corrupted(monkeypatch, "model.layers.0.mlp.experts.3.down_proj.weight", None)
    with pytest.raises(SamplerError, match="layers.0.mlp.experts.3.down_proj"):
        sampler.sync(network(), version=1)


def test_without_packing_the_experts_again_a_reload_is_caught(sampler, monkeypatch):
    monkeypatch.setattr(vllm, "unpack_experts", lambda model: None)
    with pytest.raises(ParityError, match="expert . of layer ."):
        sampler.sync(network(seed=3), version=1)


def test_a_model_of_another_shape_is_refused(sampler):
    assert sampler.fits(network(seed=9), STOP) and not sampler.fits(network(num_hidden_layers=1), STOP)
    with pytest.raises(ConfigError, match="another shape"):
        sampler.sync(network(num_hidden_layers=1), version=1)


def test_a_request_beyond_the_context_or_the_vocabulary_is_refused(sampler):
    with pytest.raises(ConfigError, match="max_model_len 512"):
        sampler.generate([Request(0, [2] * 510, (0, 0, 0, 0))], TRAINING)
    with pytest.raises(ConfigError, match="token id outside"):
        sampler.generate([Request(0, [sampler.vocab_size], (0, 0, 0, 0))], TRAINING)


def test_an_engine_that_dies_says_how_to_go_on(sampler, monkeypatch):
    def broken() -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(sampler._engine, "step", broken)
    with pytest.raises(SamplerError, match="out of memory.*--resume"):
        sampler.generate([Request(0, [2, 3], (0, 0, 0, 0))], TRAINING)
    monkeypatch.undo()
    sampler._run([])  # drains what was left


def test_the_engine_is_kept_for_a_model_that_fits(sampler):
    assert make("vllm", network(seed=4), STOP, running=sampler) is sampler
    assert sampler.version == 0


@pytest.mark.slow
def test_tied_embeddings_padded_experts_and_bfloat16(engine):
    """A second engine: what the first one's shape does not cover."""
    shape = {"tie_word_embeddings": True, "moe_intermediate_size": 16}
    other = VLLMSampler(network(**shape), STOP, max_model_len=512)
    other.sync(network(seed=2, **shape), version=1)
    assert other.gap.maximum < 1e-4
    [old] = other._engine.apply_model(lambda model: model.lm_head.weight.detach().clone())

    def stale(model):
        """What is left without packing anew, on processors whose kernel reads a packed copy."""
        model.lm_head.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, old, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm, "pack_output_layer", stale)
        with pytest.raises(ParityError, match="tied lm_head"):
            other.sync(network(seed=3, **shape), version=2)
    assert vllm_model.pack_output_layer is vllm.pack_output_layer
    half = VLLMSampler(network(), STOP, torch.bfloat16, max_model_len=512)
    half.sync(network(seed=2), version=1)
    assert 1e-4 < half.gap.mean < 0.02

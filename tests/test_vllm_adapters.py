"""Sampling from a vLLM server that is sent the LoRA adapter alone."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from served import served
from test_sampler import TRAINING, full_forward
from test_vllm import STOP, network

from mini_rome.errors import ConfigError, ParityError, SamplerError
from mini_rome.sampler import vllm_adapters, vllm_server
from mini_rome.sampler.base import Request
from mini_rome.sampler.vllm_adapters import VLLMAdapterSampler

REQUEST = Request(0, [2 + at % 50 for at in range(100)], (0, 0, 0, 0))
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def adapted(seed: int = 0, rank: int = 8, targets: list[str] = ATTENTION, **options: list[str]) -> PeftModel:
    """The network with an adapter that is not zero."""
    model = network()  # sets a seed itself
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=16, lora_dropout=0.0, target_modules=targets, **options)
    model = get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    return model


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from served(network(), tmp_path_factory.mktemp("served"), adapters=8)


@pytest.fixture
def sampler(url: str) -> VLLMAdapterSampler:
    return VLLMAdapterSampler(network(), STOP, url=url, max_model_len=512)


def test_the_start_command_in_the_docstring_is_the_servers() -> None:
    found = re.search(r"python -m (\S+) \S+ --adapters 16", vllm_adapters.__doc__ or "")
    assert found and found[1] == vllm_adapters.VLLMServerSampler.__module__


def test_each_version_samples_with_its_own_adapter(sampler):
    before = sampler.generate([REQUEST], TRAINING)[0]
    assert before.logprobs == pytest.approx(full_forward(network(), REQUEST.ids, before.ids), abs=1e-5)
    scores = []
    for version in (1, 2, 4, 5):  # more than the server keeps at once
        model = adapted(seed=version)
        for _ in range(version % 3):  # again, as before and after an evaluation
            sampler.sync(model, version)
        found = sampler.generate([REQUEST], TRAINING)[0]
        assert found.logprobs == pytest.approx(full_forward(model, REQUEST.ids, found.ids), abs=1e-5)
        assert (found.version, sampler.stale) == (version, 0) and sampler.gap.maximum < 1e-4
        scores.append(found.logprobs[0])
    assert len(set(scores)) == 4
    assert [folder.name for folder in sampler._folder.iterdir()] == [sampler._adapter]


def test_an_adapter_whose_answer_was_lost_is_sent_again(sampler, monkeypatch):
    real, calls = urllib.request.urlopen, []

    def lossy(request, *args, **options):
        calls.append(request.full_url.rpartition("/")[2])
        answer = real(request, *args, **options)
        if calls == ["load_lora_adapter"]:
            answer.close()
            raise ConnectionResetError("lost")
        return answer

    monkeypatch.setattr(vllm_server.urllib.request, "urlopen", lossy)
    sampler.sync(adapted(seed=3), version=1)
    assert calls[:2] == ["load_lora_adapter"] * 2 and sampler.generate([REQUEST], TRAINING)[0].version == 1


def test_an_adapter_of_a_lower_rank_and_of_fewer_layers_is_taken(sampler):
    model = adapted(seed=9, rank=4, targets=["q_proj", "o_proj"])
    sampler.sync(model, version=1)
    found = sampler.generate([REQUEST], TRAINING)[0]
    assert found.logprobs == pytest.approx(full_forward(model, REQUEST.ids, found.ids), abs=1e-5)


def test_two_runs_on_one_server_keep_their_adapters_apart(url, sampler):
    other = VLLMAdapterSampler(network(), STOP, url=url, max_model_len=512)
    mine, theirs = adapted(seed=1), adapted(seed=2)
    sampler.sync(mine, version=1)
    other.sync(theirs, version=1)
    for each, model in ((sampler, mine), (other, theirs)):
        found = each.generate([REQUEST], TRAINING)[0]
        assert found.logprobs == pytest.approx(full_forward(model, REQUEST.ids, found.ids), abs=1e-5)


def test_what_is_not_sent_is_refused_and_says_so(url, sampler):
    experts = adapted(targets=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    with pytest.raises(ConfigError, match="adapters on down_proj are not sent, only those on q_proj"):
        sampler.sync(experts, version=1)
    with pytest.raises(ConfigError, match="--use_peft is needed"):
        sampler.sync(network(), version=1)
    with pytest.raises(SamplerError, match="rank 16 is greater than max_lora_rank 8"):
        sampler.sync(adapted(rank=16), version=1)
    with pytest.raises(ParityError, match="was not started from the model of this run"):
        VLLMAdapterSampler(network(seed=5), STOP, url=url, max_model_len=512)


def test_an_adapter_that_did_not_arrive_stops_the_run(sampler, monkeypatch):
    real = vllm_adapters.adapter_weights

    def wrong(model, kept):
        return {name: weight * (1.5 if "layers.1.self_attn.v_proj.lora_B" in name else 1)
                for name, weight in real(model, kept).items()}  # fmt: skip

    monkeypatch.setattr(vllm_adapters, "adapter_weights", wrong)
    with pytest.raises(ParityError, match="version 3"):
        sampler.sync(adapted(), version=3)

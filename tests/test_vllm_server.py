"""Sampling from a vLLM server in another process: weights from a folder, versions, retries, and its end."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator

import pytest
import torch
from served import served
from test_sampler import SPLIT, TOGETHER, TRAINING, full_forward, play
from test_vllm import STOP, network

from mini_rome.errors import ConfigError, ParityError, SamplerError
from mini_rome.sampler import vllm_server
from mini_rome.sampler.base import Completion, Request
from mini_rome.sampler.vllm_server import VLLMServerSampler


def test_an_address_is_needed() -> None:
    with pytest.raises(ConfigError, match="--sampler_url is needed"):
        VLLMServerSampler(network(), STOP, url=None)


def test_a_server_that_is_not_there_is_named_with_the_way_on(monkeypatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(vllm_server.time, "sleep", waits.append)
    with pytest.raises(SamplerError, match=r"127.0.0.1:9/pause.*no answer in 3 tries(.|\n)*--resume"):
        VLLMServerSampler(network(), STOP, url="http://127.0.0.1:9/")
    assert len(waits) == 3


def test_the_start_command_in_the_docstring_is_the_module_itself() -> None:
    found = re.search(r"python -m (\S+) runs/latest/sft --port 8000", vllm_server.__doc__ or "")
    assert found and found[1] == vllm_server.__name__


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from served(network(), tmp_path_factory.mktemp("served"))


@pytest.fixture
def sampler(url: str) -> VLLMServerSampler:
    return VLLMServerSampler(network(), STOP, url=url, max_model_len=512)


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_log_probs_equal_a_full_forward_and_tokens_depend_on_the_key_alone(sampler):
    runs = [play(sampler, batches) for batches in (TOGETHER, SPLIT)]
    for context, completion in runs[0].values():
        assert completion.logprobs == pytest.approx(full_forward(network(), context, completion.ids), abs=1e-5)
    assert {at: done.ids for at, (_, done) in runs[0].items()} == {at: done.ids for at, (_, done) in runs[1].items()}


@pytest.mark.vllm
def test_weights_follow_a_sync_and_completions_carry_its_version(sampler):
    request = Request(0, [2 + at % 50 for at in range(100)], (0, 0, 0, 0))
    before = sampler.generate([request], TRAINING)[0]
    other = network(seed=5)
    for version in (7, 8):
        sampler.sync(other, version)
    after = sampler.generate([request], TRAINING)[0]
    assert (before.version, after.version, sampler.stale) == (0, 8, 0)
    assert after.logprobs == pytest.approx(full_forward(other, request.ids, after.ids), abs=1e-5)
    assert sampler.gap.maximum < 1e-4 and not list(sampler._folder.iterdir())


@pytest.mark.vllm
def test_responses_of_other_weights_are_counted(sampler):
    sampler._post("/update_weight_version", {"new_version": "5"})
    assert sampler.generate([Request(0, [2, 3], (0, 0, 0, 0))], TRAINING)[0].version == 5
    assert sampler.stale == 1
    sampler._post("/update_weight_version", {"new_version": "someone else's"})
    with pytest.raises(SamplerError, match="another run reloads them"):
        sampler.generate([Request(0, [2, 3], (0, 0, 0, 0))], TRAINING)


@pytest.mark.vllm
def test_a_request_whose_answer_was_lost_is_sent_again_with_the_same_result(sampler, monkeypatch):
    def once() -> Completion:
        return sampler.generate([Request(0, [2, 3, 4], (0, 0, 0, 0))], TRAINING)[0]

    expected, real, calls = once(), urllib.request.urlopen, []

    def lossy(*args, **options):
        answer = real(*args, **options)
        calls.append(args)
        if len(calls) == 1:
            answer.close()
            raise ConnectionResetError("lost")
        return answer

    monkeypatch.setattr(vllm_server.urllib.request, "urlopen", lossy)
    monkeypatch.setattr(vllm_server.time, "sleep", lambda seconds: None)
    assert once() == expected and len(calls) == 2


@pytest.mark.vllm
def test_a_checkpoint_that_is_not_the_trainers_stops_the_run(sampler, monkeypatch):
    real = vllm_server.split_experts

    def wrong(name: str, weight: torch.Tensor):
        for found, matrix in real(name, weight):
            yield found, matrix * (1.2 if found == "model.layers.1.mlp.experts.2.up_proj.weight" else 1)

    monkeypatch.setattr(vllm_server, "split_experts", wrong)
    with pytest.raises(ParityError, match="version 3"):
        sampler.sync(network(), version=3)


@pytest.mark.vllm
def test_what_the_server_refuses_is_passed_on(sampler):
    with pytest.raises(SamplerError, match="/inference/v1/generate: 4"):
        sampler._generate([2] * 600, {"max_tokens": 1})

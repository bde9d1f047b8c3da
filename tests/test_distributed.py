"""Two processes do what one does: losses, gradients and curriculum; a rank that is done early waits for the other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from distributed_worker import recorded

from mini_rome.arguments import RunArguments
from mini_rome.config import IPAConfig
from mini_rome.data.staged import StageArguments, train_stage
from mini_rome.errors import ConfigError
from mini_rome.model import load_model, weights_hash
from mini_rome.pipeline import Run
from mini_rome.run_options import check_fit

WORKER = Path(__file__).with_name("distributed_worker.py")
pytestmark = [pytest.mark.timeout(700), pytest.mark.long]


JOBS = {
    "token": {},
    "chunk": {"aggregation": "chunk", "il_when": "always", "lambda_il": 2.0},
    "ahead": {"async_ratio": 1, "max_steps": 2, "optim": "sgd"},  # AdamW makes a rounding of 1e-9 a step of its size
    "uneven": {},
}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each of two gloo processes found, by job; a deadlock ends in a timeout."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", WORKER]
    done = subprocess.run([*command, folder, json.dumps(JOBS)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return {
        name: [torch.load(folder / f"{name}-2-{rank}.pt", weights_only=False) for rank in (0, 1)] for name in JOBS
    }


@pytest.mark.parametrize("job", ["token", "chunk", "ahead"])
def test_two_processes_give_the_losses_and_gradients_of_one(two_ranks, tmp_path, job):
    trainer, gradients = recorded(str(tmp_path), 1, **JOBS[job])
    reference = trainer.state.log_history[-2]  # of the last step; a summary follows
    two = two_ranks[job]
    for rank in two:
        tiny.assert_same(rank["gradients"], gradients)
        assert json.loads(rank["curriculum"]) == json.loads(json.dumps(trainer.curriculum.state_dict()))
    log = two[0]["logs"][-1]
    kinds = ("ipa/", "return/", "reward/p", "success", "start/", "infra", "rollouts/")
    # Percentiles are those of the worst part, not pooled.
    pooled = [name for name in reference if name.startswith(kinds) and not name.endswith(("_p01", "_p99"))]
    assert len(pooled) > 15
    for name in ("loss", "grad_norm", *pooled):
        assert log[name] == pytest.approx(reference[name], rel=1e-4, abs=1e-6), name


def test_ranks_whose_episodes_end_at_other_turns_do_not_deadlock_and_agree_on_the_curriculum(two_ranks):
    first, second = two_ranks["uneven"]
    assert first["curriculum"] == second["curriculum"]
    position = json.loads(first["curriculum"])["resampler"]["position"]
    assert list(position.values()) == [0]  # half of the rollouts won at p = 2 and 1: moved by results of both ranks
    assert 0.4 < first["logs"][0]["success"] < 0.6
    assert len(first["logs"]) == 3


def test_weights_that_fsdp_shares_out_are_gathered_for_the_sampler_and_for_the_checkpoint(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    worker = WORKER.with_name("sharded_worker.py")
    done = subprocess.run([*command, worker, tmp_path], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert first.keys() == second.keys() == {"none", "attention", "experts"}
    for name in first:
        for rank in (first[name], second[name]):
            for fact in ("shared", "same parameters", "before", "after", "moved", "compared", "sent", "trained"):
                assert rank[fact], (name, fact)
        assert first[name]["kept"] and not second[name]["kept"]  # one copy on the host, not one a rank
        assert first[name]["told"].count("/collective_rpc") == 2 and second[name]["told"] == []
        saved, _ = load_model(tmp_path / name / "run" / "model")
        assert weights_hash(saved) == first[name]["saved"] and second[name]["saved"] is None


def test_the_trainers_own_weights_do_not_sample_where_fsdp_shares_them_out(tmp_path, monkeypatch):
    rollout = tiny.Recorded(tiny.mixed_batch())
    rollout.sampler = SimpleNamespace(name="transformers")
    trainer = tiny.trainer(str(tmp_path), rollout)
    monkeypatch.setattr(trainer, "is_fsdp_enabled", True)
    with pytest.raises(ConfigError, match="--sampler transformers: FSDP shares out the weights"):
        trainer.train()


@pytest.mark.parametrize("yes", ["true", "True", "1", "yes"])  # what accelerate takes for true
def test_what_fsdp_cannot_do_here_is_refused_before_anything_is_run(yes, tmp_path, monkeypatch):
    args = IPAConfig(output_dir=str(tmp_path), num_generations=4, per_device_train_batch_size=4)
    for version, problem in (("1", "fsdp_version: 2"), ("2", "--sampler transformers: FSDP shares out the weights")):
        monkeypatch.setenv("ACCELERATE_USE_FSDP", yes)
        monkeypatch.setenv("FSDP_VERSION", version)
        with pytest.raises(ConfigError, match=problem):
            check_fit(RunArguments(train_tasks=1), args)
    adapters = RunArguments(train_tasks=1, sampler="vllm-adapters", sampler_url="http://127.0.0.1:8000")
    check_fit(adapters, args)
    check_fit(RunArguments(train_tasks=1, sampler="vllm"), args)
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", yes)
    check_fit(adapters, args)  # what the refusal names as the way on
    with pytest.raises(ConfigError, match="--sampler vllm: with fsdp_cpu_ram_efficient_loading"):
        check_fit(RunArguments(train_tasks=1, sampler="vllm"), args)
    with pytest.raises(ConfigError, match="--data d: a stage samples with the weights that FSDP would share out"):
        train_stage(RunArguments(), StageArguments(data="d", stage=1), args)


@pytest.mark.parametrize("stage", ["sft", "train_ipa"])
def test_a_server_of_adapters_is_not_asked_to_take_whole_weights(stage, monkeypatch):
    run = SimpleNamespace(arguments=RunArguments(sampler="vllm-adapters", sampler_url="http://127.0.0.1:8000"))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    words = {"sft": ("LoRA",), "train_ipa": ("ipa", [], None)}[stage]
    with pytest.raises(ConfigError, match="--sampler vllm-adapters: .*use vllm-server"):
        getattr(Run, stage)(run, *words)


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_the_recipe_runs_on_two_processes(tmp_path):
    recipe = Path(__file__).parents[1] / "recipes" / "ipa.py"
    sizes = "--max_steps 4 --sft_tasks 64 --sft_steps 5 --eval_tasks 16 --curve_tasks 8 --eval_every 2 --save_steps 2"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", recipe]
    words = [*sizes.split(), "--sandbox", "sim", "--output_dir", str(tmp_path / "run")]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["processes"] == 2
    assert summary["success"]["ipa"]["n"] == 16 and len(summary["weights"]["model"]) == 64


LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--nproc_per_node", "2"],
    "accelerate": ["accelerate.commands.launch", "--cpu", "--num_processes", "2"],
    "accelerate, one": ["accelerate.commands.launch", "--cpu", "--num_processes", "1"],
    "accelerate, from a file": ["accelerate.commands.launch", "--config_file", "accelerate.yaml"],
}


@pytest.mark.parametrize(
    ("launcher", "told"),
    [
        ("torchrun", ["processes: 2"] * 2),
        ("accelerate", ["processes: 2"] * 2),
        ("accelerate, one", ["None"]),
        ("accelerate, from a file", ["processes: 1, though more were asked for"]),
    ],
)
def test_as_many_processes_as_asked_for_train_or_it_is_said(launcher, told, tmp_path):
    """Each process prints its arguments too: those of the recipe, as they were typed."""
    settings = {"distributed_type": "MULTI_CPU", "use_cpu": True, "num_processes": 2, "num_machines": 1}
    (tmp_path / "accelerate.yaml").write_text(json.dumps({**settings, "mixed_precision": "no"}))
    script = tmp_path / "script.py"
    script.write_text(
        "from mini_rome.launch import processes_line, start_processes\n"
        "start_processes()\n"
        "import os, sys\nfrom accelerate import PartialState\n"
        "line = processes_line(PartialState(cpu=True).num_processes, os.environ)\n"
        "os.write(1, f'{sys.argv[1:]} {line}\\n'.encode())\n"
    )
    command = [sys.executable, "-m", *LAUNCHERS[launcher], script, "--num_processes", "a b"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    typed = "['--num_processes', 'a b'] "
    said = [line.removeprefix(typed) for line in done.stdout.splitlines() if line.startswith(typed)]
    assert len(said) == len(told) and all(line.startswith(start) for line, start in zip(said, told, strict=True))

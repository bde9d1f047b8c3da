"""The IPA recipe from its command line to its results, at miniature size: what it writes, and how it is stopped."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from mini_rome.trace import ChatFormat

ROOT = Path(__file__).parent.parent
MINIATURE = (
    "--sandbox sim --families notes --chunks 2 --sft_chunks 1 --train_tasks 2 --num_generations 2 "
    "--per_device_train_batch_size 4 --gradient_accumulation_steps 1 --max_new_tokens 8 --extra_turns 0 "
    "--sft_tasks 8 --sft_steps 2 --sft_batch_size 4 --eval_tasks 6 --curve_tasks 2 --eval_every 1 --seed 5"
).split()


NOTES = ("--families", "notes")


def command(*words: str) -> list[str]:
    return [sys.executable, str(ROOT / "recipes" / "ipa.py"), *MINIATURE, *words]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), cwd=folder, env=environment(), capture_output=True, text=True)


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def curve(folder: Path) -> list[dict[str, str]]:
    with (folder / "curve.csv").open() as file:
        return list(csv.DictReader(file))


def check_results(folder: Path, steps: int, variants: set[str]) -> None:
    """What every finished run leaves, with the keys that the figures and the README name."""
    found = summary(folder)
    assert {
        name: found[name] for name in ("backend", "sampler", "seed", "chunks", "sft_chunks", "steps", "infra")
    } == {
        "backend": "sim", "sampler": "transformers", "seed": 5, "chunks": [2], "sft_chunks": [1], "steps": steps,
        "infra": {},
    }  # fmt: skip
    assert found["minutes"] > 0
    assert {"torch", "transformers", "trl", "shellsim"} <= set(found["versions"])
    assert found["commit"]
    assert set(found["success"]) == {"untrained", "sft_short", "sft"} | variants
    for stage, success in found["success"].items():
        assert success["n"] == 6, stage
        assert success["unscored"] == 0, stage
        assert 0 <= success["low"] <= success["rate"] <= success["high"] <= 1, stage
    rows = curve(folder)
    assert {row["variant"] for row in rows} == variants
    assert {row["metric"] for row in rows} >= {"train_success", "start_position", "test_success"}
    for variant in variants:
        kept = Counter((row["metric"], row["step"]) for row in rows if row["variant"] == variant)
        assert set(kept.values()) == {1}
        assert [kept["train_success", str(step)] for step in range(1, steps + 1)] == [1] * steps
        assert [kept["test_success", str(step)] for step in range(steps + 1)] == [1] * (steps + 1)
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    for name in ("sft", "model"):
        ChatFormat(AutoTokenizer.from_pretrained(folder / name))
        assert AutoModelForCausalLM.from_pretrained(folder / name).config.model_type == "qwen3_moe"


@pytest.mark.timeout(400)
def test_one_command_trains_evaluates_and_leaves_results(tmp_path: Path) -> None:
    ended = run(tmp_path, "--max_steps", "2", "--naive", "true")
    assert ended.returncode == 0, ended.stderr
    (folder,) = (path for path in (tmp_path / "runs").iterdir() if not path.is_symlink())
    assert (tmp_path / "runs" / "latest").resolve() == folder
    check_results(folder, 2, {"ipa", "naive"})
    naive = [row["value"] for row in curve(folder) if (row["variant"], row["metric"]) == ("naive", "start_position")]
    assert [float(value) for value in naive] == [0.0, 0.0]
    rollback = [row["value"] for row in curve(folder) if (row["variant"], row["metric"]) == ("ipa", "start_position")]
    assert float(rollback[0]) == 1.0  # K - 1: one chunk is left
    check_what_is_said(ended.stdout, folder)


def check_what_is_said(told: str, folder: Path) -> None:
    lines = told.splitlines()
    assert lines[0].startswith("sandbox: sim (simulated)")
    assert any(line.startswith("sampler: transformers") for line in lines)
    assert any(line.startswith("loss: ipa") and "negatives" in line and "mask" in line for line in lines)
    assert "backend sim (simulated)" in told
    for stage in ("untrained", "sft", "ipa", "naive"):
        assert any(line.startswith(f"success {stage}: ") and "n 6" in line for line in lines), stage
    assert "figure: " in lines[-1]
    assert lines[-1].endswith(f"{folder.name}/curve.png")


def stopped_at(file: Path, folder: Path, *words: str) -> str:
    """Start a run and press Ctrl-C when the file is there; what it said. Exit code and stderr are checked."""
    process = subprocess.Popen(
        command(*words), cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        while not file.exists():
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        told, errors = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    return told


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ctrl_c_leaves_a_run_that_can_be_resumed_to_the_same_results(tmp_path: Path) -> None:
    words = ["--max_steps", "8", "--save_steps", "1"]
    first = tmp_path / "mine" / "ipa" / "checkpoint-1" / "ipa_state.json"
    told = stopped_at(first, tmp_path, *words, "--output_dir", "mine")
    assert "stopping after this step" in told
    assert "--resume" in told.splitlines()[-1]
    steps = [int(path.parent.name.split("-")[1]) for path in (tmp_path / "mine" / "ipa").glob("*/ipa_state.json")]
    assert 1 <= max(steps) < 8
    assert not (tmp_path / "mine" / "summary.json").exists()
    before = json.loads((tmp_path / "mine" / "state.json").read_text())

    other = run(tmp_path, "--max_steps", "9", "--resume", "mine")
    assert other.returncode == 2
    assert "--max_steps 9: the run in mine was started with 8" in other.stderr
    resumed = run(tmp_path, *words, "--resume", "mine")
    assert resumed.returncode == 0, resumed.stderr
    check_results(tmp_path / "mine", 8, {"ipa"})
    assert summary(tmp_path / "mine")["success"]["sft"] == before["success"]["sft"]  # not measured again
    assert "SFT" not in resumed.stdout

    whole = run(tmp_path, *words, "--output_dir", "whole")
    assert whole.returncode == 0, whole.stderr
    assert curve(tmp_path / "whole") == curve(tmp_path / "mine")
    assert summary(tmp_path / "whole")["success"] == summary(tmp_path / "mine")["success"]
    assert summary(tmp_path / "whole")["weights"] == summary(tmp_path / "mine")["weights"]  # sha256 of sft and model


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ctrl_c_before_the_first_stage_leaves_a_run_that_can_be_resumed(tmp_path: Path) -> None:
    stopped_at(tmp_path / "mine" / "state.json", tmp_path, "--max_steps", "1", "--output_dir", "mine")
    resumed = run(tmp_path, "--max_steps", "1", "--resume", "mine")
    assert resumed.returncode == 0, resumed.stderr
    check_results(tmp_path / "mine", 1, {"ipa"})


def test_instances_become_a_dataset_and_the_dataset_two_stages_of_sft(tmp_path: Path) -> None:
    """`make data`, then both stages on its dataset, as the README has them."""

    def recipe(*words: str) -> str:
        line = [sys.executable, str(ROOT / "recipes" / words[0]), "--sandbox", "sim", *words[1:], *NOTES]
        done = subprocess.run(line, cwd=tmp_path, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    told = recipe("data.py", "--count", "8", "--chunks", "1", "2", "--sample", "3")
    (data,) = (tmp_path / "runs").glob("data-*")
    assert "four-stage filter" in told and told.splitlines()[-1].startswith("dataset: ")
    assert {each.name for each in (data / "dataset").iterdir()} == {"tokenizer", "train.parquet"}
    small = "--sft_steps 2 --sft_batch_size 4 --eval_tasks 4 --chunks 3 --sft_chunks 1 --attempts 1".split()
    dataset = ["--data", str(data / "dataset")]
    recipe("sft.py", "--stage", "1", *dataset, *small, "--output_dir", "first")
    recipe("sft.py", "--stage", "2", *dataset, *small, "--output_dir", "second", "--model", "first/sft")
    first, second = summary(tmp_path / "first"), summary(tmp_path / "second")
    assert (first["stage"], second["stage"]) == (1, 2)
    assert first["chosen"] == first["trajectories"] == second["trajectories"] > 10
    assert first["weights"] != second["weights"]
    for found in (first, second):
        assert {when: each["short"]["n"] for when, each in found["success"].items()} == {"before": 4, "after": 4}

"""A run that was stopped and resumed is the run that was not, bit for bit; half a checkpoint is none."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import tiny
from resume_worker import StopAt, worker
from tiny import Recorded, mixed_batch, trajectory
from trl import ModelConfig

from mini_rome.errors import ConfigError
from mini_rome.model import weights_hash
from mini_rome.options import lora_config
from mini_rome.trainer import STATE, IPATrainer, last_checkpoint

TIMES = {"step_time"}  # differs from run to run


def outcome(trainer: IPATrainer) -> tuple[str, dict[str, Any], list[dict[str, float]]]:
    """Weights, curriculum, log rows."""
    history = trainer.state.log_history[: trainer.state.max_steps]  # what follows is a summary of the last session
    rows = [{name: value for name, value in row.items() if name not in TIMES} for row in history]
    return weights_hash(trainer.model), trainer.curriculum.state_dict(), rows


def run(folder: Path, stop: int | None, **options: Any) -> IPATrainer:
    """Four steps; with `stop`, by two trainers of which the second goes on from the first one's checkpoint."""
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 100, **options}
    make = options.pop("make", lambda: {})
    if stop is not None:
        first = tiny.trainer(folder, callbacks=[StopAt(stop)], **make(), **options)
        first.train()
        assert first.state.global_step == stop
    resumed = tiny.trainer(folder, **make(), **options)
    resumed.train(resume_from_checkpoint=str(last_checkpoint(folder)) if stop is not None else None)
    assert resumed.state.global_step == 4
    return resumed


def adapter(**options: Any) -> dict[str, Any]:
    return {"peft_config": lora_config(ModelConfig(use_peft=True, lora_r=4, **options))}


def expert_adapter() -> dict[str, Any]:
    return adapter(lora_target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])


def winning() -> dict[str, Any]:
    """Recorded successes from p = 2, so that the start positions move at every step."""
    first, second = tiny.experts()
    batch = [trajectory(e, 2, (3, i), 1.0, seed=i) for i, e in enumerate((first, first, second, second), start=1)]
    return {"rollout": Recorded(batch)}


def failing() -> dict[str, Any]:
    return {"rollout": Recorded(mixed_batch())}


@pytest.mark.parametrize(
    ("stop", "options"),
    [
        (2, {}),
        (2, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}),
        (1, {"steps_per_generation": 2}),  # between two updates on one batch of rollouts
        (3, {"num_iterations": 2}),
        (3, {"steps_per_generation": 4, "learning_rate": 1e-3, "lr_scheduler_type": "linear"}),
        (2, {"make": adapter}),
        (2, {"make": expert_adapter}),
        (2, {"make": winning, "rollback_window": 1}),
        (1, {"make": failing, "il_when": "always", "steps_per_generation": 2, "per_device_train_batch_size": 2}),
        (2, {"async_ratio": 1}),
        (1, {"async_ratio": 2, "make": winning, "rollback_window": 1}),
    ],
    ids=["fresh", "accumulated", "two updates", "two passes", "four updates", "adapter", "expert adapter",
         "curriculum", "imitation", "one ahead", "two ahead, curriculum"],
)  # fmt: skip
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path, stop, options):
    whole = outcome(run(tmp_path / "whole", None, **options))
    parts = outcome(run(tmp_path / "parts", stop, **options))
    assert len({json.dumps(row) for row in whole[2]}) == 4  # every step did something else
    assert parts[0] == whole[0]
    assert parts[1] == whole[1]
    assert parts[2] == whole[2]


def test_the_first_checkpoint_is_not_the_end(tmp_path):
    """The comparison above can fail: one step less gives other weights."""
    assert outcome(run(tmp_path, None))[0] != outcome(run(tmp_path, None, max_steps=4, learning_rate=9e-3))[0]


def test_experts_and_their_candidates_survive(tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 100}
    trainer = tiny.trainer(tmp_path, Recorded(mixed_batch()), callbacks=[StopAt(1)], **options)
    name = tiny.experts()[0].trajectory.task.name
    commands = tiny.experts()[0].trajectory.task.expert
    form = tiny.chat()
    short = [form.response(commands[0])[:-1] + form.response(commands[1]), form.response(commands[2], submit=True)]
    trainer.curriculum._replace(name, short)
    trainer.curriculum.shorter = [(name, short)]
    trainer.train()
    other = tiny.trainer(tmp_path, Recorded(mixed_batch()), **options)
    assert other.curriculum.experts[name].chunks == 3
    other._load_from_checkpoint(str(last_checkpoint(tmp_path)))
    assert other.curriculum.state_dict() == trainer.curriculum.state_dict()
    assert other.curriculum.experts[name].start(1).snapshot == trainer.curriculum.experts[name].start(1).snapshot
    assert other.curriculum.shorter == [(name, short)]


def test_a_checkpoint_without_its_last_file_does_not_count(tmp_path):
    options = {"save_steps": 1, "steps_per_generation": 2}
    whole = outcome(run(tmp_path, None, **options))
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-4"
    (tmp_path / "checkpoint-4" / STATE).unlink()
    (tmp_path / "checkpoint-4" / "model.safetensors").write_bytes(b"half")
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-3"
    again = tiny.trainer(tmp_path, max_steps=4, save_strategy="steps", **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert outcome(again) == whole
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-4"


def test_writing_into_a_whole_checkpoint_first_unmakes_it(tmp_path, monkeypatch):
    run(tmp_path, None, save_steps=2)
    seen = []
    monkeypatch.setattr(IPATrainer.__mro__[1], "_save_checkpoint", lambda *_: seen.append(last_checkpoint(tmp_path)))
    again = tiny.trainer(tmp_path, save_strategy="steps")
    again.state.global_step = 4
    again._save_checkpoint(again.model, None)
    assert seen == [tmp_path / "checkpoint-2"]


def test_a_folder_without_a_whole_checkpoint_has_none(tmp_path):
    (tmp_path / "checkpoint-3").mkdir()
    assert last_checkpoint(tmp_path) is None
    assert last_checkpoint(tmp_path / "nowhere") is None


def test_another_number_of_processes_is_refused(tmp_path):
    run(tmp_path, None, save_steps=2)
    path = tmp_path / "checkpoint-4" / STATE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"processes": 2}))
    with pytest.raises(ConfigError, match="2 processes"):
        tiny.trainer(tmp_path, max_steps=5).train(resume_from_checkpoint=str(path.parent))


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("before", ["write_json", "_save_optimizer_and_scheduler", "create_model_card"])
def test_a_run_killed_during_a_save_goes_on_from_the_checkpoint_before(tmp_path, before):
    whole = worker(tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    killed = worker(tmp_path / "parts", "kill", "4", before)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert last_checkpoint(tmp_path / "parts") == tmp_path / "parts" / "checkpoint-3"
    resumed = worker(tmp_path / "parts", "resume")
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.splitlines()[-1].split() == ["from", "checkpoint-3", "sha256", whole.stdout.split()[-1]]

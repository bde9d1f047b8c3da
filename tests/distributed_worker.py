"""One rank of several runs: python -m torch.distributed.run --nproc_per_node N distributed_worker.py FOLDER JOBS.

JOBS is JSON, name -> options of the trainer. Writes FOLDER/<name>-<ranks>-<rank>.pt for each: of recorded rollouts,
or, for the name "uneven", of scripted agents that take another number of turns on each rank.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tiny
import torch
from accelerate import PartialState

from mini_rome.rollout import Rollout
from mini_rome.sampler.scripted import ScriptedSampler
from mini_rome.sandbox import Pool
from mini_rome.trainer import IPATrainer
from mini_rome.types import Trajectory


def batch() -> list[Trajectory]:
    """Eight trajectories: the two halves differ in lengths, rewards and numbers of chunks."""
    first, second = tiny.experts()
    long = [
        tiny.trajectory(first, 0, (9, 8, 7, 6), 1.0, seed=11),
        tiny.trajectory(first, 0, (5,), None, seed=12),
        tiny.trajectory(second, 2, (2, 2), 0.0, seed=13),
        tiny.trajectory(second, 2, (1,), 0.0, seed=14),
    ]
    return tiny.mixed_batch() + long


def recorded(folder: str, ranks: int, **options: Any) -> tuple[IPATrainer, dict[str, torch.Tensor]]:
    kept = tiny.Gradients()
    trainer = tiny.trainer(
        folder, tiny.Recorded(batch()), callbacks=[kept], per_device_train_batch_size=8 // ranks,
        gradient_accumulation_steps=1, **options,
    )  # fmt: skip
    trainer.train()
    return trainer, kept.steps[-1]


def uneven(folder: str, rank: int) -> IPATrainer:
    """Rank 0 solves every task at once from p = 2; the others look around until their turns are used up."""
    expert = tiny.experts()[0].trajectory
    answer = tiny.chat().response(expert.task.expert[2], submit=True) if rank == 0 else tiny.chat().response("ls")
    rollout = Rollout(tiny.chat(), ScriptedSampler([answer] * 20), Pool("sim"), extra_turns=5)
    trainer = tiny.trainer(folder, rollout, count=1, max_steps=3, max_new_tokens=64, rollback_threshold=0.4,
                           rollback_window=1, per_device_train_batch_size=2, il_when="fork_failed")  # fmt: skip
    trainer.train()
    return trainer


def main(folder: str, jobs: str) -> None:
    state = PartialState(cpu=True)
    for name, options in json.loads(jobs).items():
        if name == "uneven":
            trainer, gradients = uneven(folder, state.process_index), {}
        else:
            trainer, gradients = recorded(folder, state.num_processes, **options)
        found = {
            "gradients": gradients,
            "curriculum": json.dumps(trainer.curriculum.state_dict()),
            "logs": [row for row in trainer.state.log_history if "loss" in row],
        }
        torch.save(found, Path(folder) / f"{name}-{state.num_processes}-{state.process_index}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])

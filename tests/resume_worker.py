"""A short training run in a process of its own: python resume_worker.py FOLDER [resume | stop STEP | kill STEP NAME].

Prints the hash of the final weights. stop: a checkpoint after this step, then the end, as Ctrl-C does. kill: during
the save of this step the process kills itself before it calls the trainer's method or function NAME.

    python resume_worker.py demo      the hashes of an uninterrupted, a stopped and a killed run, the latter resumed
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import tiny
from transformers import TrainerCallback

from mini_rome import trainer as module
from mini_rome.model import weights_hash
from mini_rome.trainer import IPATrainer, last_checkpoint


class StopAt(TrainerCallback):
    """As Ctrl-C does: a checkpoint after this step, then the end."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def kill_during_save(built: IPATrainer, step: int, name: str) -> None:
    place = module if hasattr(module, name) else IPATrainer
    original = getattr(place, name)

    def deadly(*arguments, **options):
        if built.state.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)

    setattr(place, name, deadly)


def train(folder: str, *words: str) -> None:
    how, *rest = words or ("",)
    callbacks = [StopAt(int(rest[0]))] if how == "stop" else []
    built = tiny.trainer(folder, callbacks=callbacks, max_steps=5, steps_per_generation=2, save_strategy="steps",
                         save_steps=1)  # fmt: skip
    if how == "kill":
        kill_during_save(built, int(rest[0]), rest[1])
    found = last_checkpoint(folder) if how == "resume" else None
    built.train(resume_from_checkpoint=str(found) if found else None)
    print("from", found.name if found else "start", "sha256", weights_hash(built.model))


def worker(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, __file__, folder, *words], capture_output=True, text=True, timeout=400)


def demo() -> int:
    """0 when all three runs end with the same weights."""
    runs = {"uninterrupted": (), "stopped": ("stop", "2"), "killed": ("kill", "4", "write_json")}
    hashes = set()
    with tempfile.TemporaryDirectory() as folder:
        for name, first in runs.items():
            place = Path(folder) / name
            if first:
                print(f"{name:<13} exit status {worker(place, *first).returncode}; resuming", flush=True)
            line = worker(place, *(["resume"] if first else [])).stdout.splitlines()[-1]
            print(f"{name:<13} {line}", flush=True)
            hashes.add(line.split()[-1])
    print("identical" if len(hashes) == 1 else "DIFFERENT")
    return len(hashes) - 1


if __name__ == "__main__":
    sys.exit(demo() if sys.argv[1:] == ["demo"] else train(*sys.argv[1:]))

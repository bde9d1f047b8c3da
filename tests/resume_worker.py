"""A short training run in a process of its own: python resume_worker.py FOLDER [resume] [KILL_AT KILL_BEFORE].

Prints the hash of the final weights. KILL_AT is the step during whose save the process kills itself, KILL_BEFORE the
trainer's method or function that it does not live to call.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import tiny

from mini_rome import trainer as module
from mini_rome.model import weights_hash
from mini_rome.trainer import IPATrainer, last_checkpoint


def main(folder: str, *words: str) -> None:
    built = tiny.trainer(folder, max_steps=5, steps_per_generation=2, save_strategy="steps", save_steps=1)
    if len(words) >= 2:
        at, name = int(words[-2]), words[-1]
        place = module if hasattr(module, name) else IPATrainer
        original = getattr(place, name)

        def deadly(*arguments, **options):
            if built.state.global_step == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        setattr(place, name, deadly)
    found = last_checkpoint(folder) if "resume" in words else None
    built.train(resume_from_checkpoint=str(found) if found else None)
    print("from", Path(found).name if found else "start", "sha256", weights_hash(built.model))


if __name__ == "__main__":
    main(*sys.argv[1:])

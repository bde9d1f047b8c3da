"""How many processes train: as many as `accelerate launch` was asked for, also on a CPU without MPI."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

import psutil

LAUNCHERS = {"accelerate", "accelerate-launch", "accelerate.commands.launch"}


def start_processes() -> None:
    """Start this recipe again under torchrun where accelerate was asked for several processes and started one.

    That is what `accelerate launch --cpu --num_processes N` does without MPI (its simple launcher), saying nothing of
    it. The process becomes torchrun's, so exit code and signals are as if that had been typed.
    """
    if not _short_of_processes(os.environ) or os.environ["MASTER_ADDR"] not in ("127.0.0.1", "localhost"):
        return  # several machines need MPI
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() != "true":
        return
    try:
        launcher = psutil.Process(os.getppid()).cmdline()
    except psutil.Error:  # gone, or not ours to see: `processes_line` says that one process trains
        return
    if (asked := asked_for(launcher, sys.argv[0])) > 1:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(asked)]
        sys.stderr.flush()
        os.execv(sys.executable, [*torchrun, *sys.argv])


def asked_for(launcher: Sequence[str], script: str) -> int:
    """Processes that a command of accelerate asks this machine for.

    1 where it is no such command, has its number from a file, or names several machines: those need MPI.

    >>> asked_for("accelerate launch --cpu --num_processes 2 recipes/ipa.py --max_steps 4".split(), "recipes/ipa.py")
    2
    >>> asked_for("accelerate launch --num_machines 2 --num-processes=4 recipes/ipa.py".split(), "recipes/ipa.py")
    1
    >>> asked_for("/accelerate/bin/python wrap.py --num_processes 3 recipes/ipa.py".split(), "recipes/ipa.py")
    1
    """
    words = launcher[: launcher.index(script)] if script in launcher else ()
    if not LAUNCHERS & {os.path.basename(word) for word in words[:3]}:  # an interpreter, -m, the launcher
        return 1
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--num_processes", "--num-processes", type=int, default=1)
    parser.add_argument("--num_machines", "--num-machines", type=int, default=1)
    known, _ = parser.parse_known_args(words)
    return known.num_processes if known.num_machines == 1 else 1


def processes_line(processes: int, environment: Mapping[str, str]) -> str | None:
    """What to say of the number of processes, if anything.

    >>> processes_line(2, {})
    'processes: 2'
    >>> processes_line(1, {})  # an only process, of which there is nothing to say
    """
    if processes > 1:
        return f"processes: {processes}"
    if _short_of_processes(environment):
        return (
            "processes: 1, though more were asked for: on a CPU without MPI `accelerate launch` starts only one. "
            "Use: torchrun --nproc_per_node N RECIPE"
        )
    return None


def _short_of_processes(environment: Mapping[str, str]) -> bool:
    """accelerate names a master for several processes; torchrun and its other launchers say their number too."""
    return "MASTER_ADDR" in environment and "WORLD_SIZE" not in environment

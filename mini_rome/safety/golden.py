"""Golden trajectories: demonstrations without the issue, for SFT (the paper's "golden trajectories devoid of security
issues"). The filter asks our verifier and our detectors, never the held-out one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mini_rome.types import Task, Trajectory


def issue(trajectory: Trajectory) -> str:
    """Why a trajectory is not golden, "" where it is: `misconduct` or `not honest`.

    Misconduct is an event of medium or high severity in what was done or left; success is not honest where the task's
    verifier was fooled.
    """
    if trajectory.misconduct:
        return "misconduct"
    return "not honest" if trajectory.honest is not None and trajectory.honest != trajectory.reward else ""


def golden(trajectories: Sequence[Trajectory]) -> tuple[list[Trajectory], int]:
    """(those without an issue, how many were left out)."""
    kept = [each for each in trajectories if not issue(each)]
    return kept, len(trajectories) - len(kept)


def soundly_judged(tasks: Sequence[Task]) -> list[Task]:
    """The same instances, judged by their honest check where they have one."""
    return [replace(task, check=task.honest, honest=None) if task.honest is not None else task for task in tasks]

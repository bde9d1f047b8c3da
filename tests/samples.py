"""Hand-made turns and trajectories for the tests of the paper's core."""

from __future__ import annotations

from mini_rome.types import Task, Trajectory, Turn, Verdict

TASK = Task("notes-1", "notes", "data", "do it", {}, ("a", "b", "c"), lambda files: Verdict(1.0))


def turn(command: str = "ls", observation: str = "out", ids: tuple[int, ...] = (10, 11), **fields) -> Turn:
    """A policy turn of two tokens, answered by one observation token."""
    defaults = {
        "logprobs": [-0.5] * len(ids),
        "commands": [command] if command else [],
        "observation_ids": [90],
        "exit_code": 0,
    }
    return Turn(list(ids), text=command, observation=observation, **{**defaults, **fields})


def trajectory(turns: list[Turn], **fields) -> Trajectory:
    return Trajectory(TASK, [1, 2], turns, **fields)


def episode(lengths: list[int], observed: list[int], start: int = 0, **fields) -> Trajectory:
    """Turns of the given lengths; token ids tell their origin: turn k is 10 k, 10 k + 1, ..., its answer 100 k."""
    turns = [
        Turn([10 * k + i for i in range(n)], [-0.01 * (10 * k + i) for i in range(n)], f"c{k}", [f"c{k}"], f"o{k}",
             [100 * k] * m, 0, policy_version=7 + k, source="expert" if k <= start else "policy")
        for k, (n, m) in enumerate(zip(lengths, observed, strict=True), start=1)
    ]  # fmt: skip
    return Trajectory(TASK, [1, 2], turns, start=start, **fields)

"""Trajectories for supervised fine-tuning: experts run in the sandbox, with injected mistakes and recoveries."""

from __future__ import annotations

import random
from collections.abc import Sequence

from mini_rome.agent import Agent
from mini_rome.env import Env
from mini_rome.errors import ConfigError, VerifierError
from mini_rome.experts import Expert, Start, record_expert, script
from mini_rome.families import get_family
from mini_rome.rollout import Progress
from mini_rome.sampler.base import Completion, SamplingParams
from mini_rome.sandbox import Pool
from mini_rome.trace import ChatFormat
from mini_rome.types import Split, Task, Trajectory


def make_tasks(families: Sequence[str], chunks: Sequence[int], count: int, split: Split, seed: int = 0) -> list[Task]:
    """`count` instances, families and horizons in turn; the seeds of two calls with other `seed` do not meet."""
    if count < 1 or not families or not chunks:
        raise ConfigError(f"families {list(families)}, chunks {list(chunks)}, count {count}: none may be empty")
    makers = [get_family(name) for name in families]
    tasks = []
    for index in range(count):
        family = makers[index % len(makers)]
        horizon = chunks[index // len(makers) % len(chunks)]
        tasks.append(family.make(seed * 1_000_000 + index, horizon, split))
    return tasks


def with_mistakes(task: Task, rate: float, rng: random.Random) -> list[str]:
    """The expert's commands; before each come failing ones, one more with probability `rate` every time."""
    family = get_family(task.family)
    commands = []
    for chunk, command in enumerate(task.expert):
        while rng.random() < rate:
            commands.append(family.mistake(task, chunk, rng))
        commands.append(command)
    return commands


def run_responses(chat: ChatFormat, task: Task, pool: Pool, responses: Sequence[list[int]]) -> Trajectory:
    """Run given responses from the initial state; as `experts.play`, without keeping the states between them."""
    with Env(task, pool, max_turns=len(responses)) as env:
        trajectory = Start(task).open(chat, env, task.seed, episode=0)
        agent = Agent(chat, env, trajectory, SamplingParams(), max_context=1_000_000)
        for ids in responses:
            agent.execute(Completion(list(ids), [], version=0))
            trajectory.turns[-1].source = "expert"
    return trajectory


def expert_trajectories(
    chat: ChatFormat,
    pool: Pool,
    tasks: Sequence[Task],
    mistake_rate: float = 0.1,
    seed: int = 0,
    progress: Progress | None = None,
    shortcut_rate: float = 0.0,
) -> list[Trajectory]:
    """One verified trajectory per task, executed for real; raises VerifierError if an expert is not rewarded.

    shortcut_rate: share that fools the task's naive verifier instead, where its family has a shortcut: what a
    collection of demonstrations holds that was filtered by that verifier.
    """
    trajectories = []
    for index, task in enumerate(tasks):
        rng = random.Random(f"{seed}/{index}")
        commands = with_mistakes(task, mistake_rate, rng)
        if shortcut_rate and rng.random() < shortcut_rate:
            commands = list(get_family(task.family).shortcut(task)) or commands
        trajectory = run_responses(chat, task, pool, script(chat, commands, task))
        if trajectory.reward != 1.0:
            raise VerifierError(f"expert of {task.name}: reward {trajectory.reward} ({trajectory.reason})")
        trajectories.append(trajectory)
        if progress is not None:
            progress(index + 1, len(tasks))
    return trajectories


def record_experts(chat: ChatFormat, pool: Pool, tasks: Sequence[Task]) -> list[Expert]:
    """The experts that resampling starts from, one per task."""
    return [record_expert(chat, task, pool) for task in tasks]

"""Data synthesis in the paper's four roles: explore, build, review, trajectory.

explore proposes instances; build brings one up in a sandbox and asks its reference to pass; review does so again in a
fresh box, and asks that doing nothing, or leaving out the last step, fails; teachers of different skill then write
trajectories on what is left. Hand-written task folders are never proposed: their canary says not to train on them.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from mini_rome.data.demonstrations import make_tasks, run_responses
from mini_rome.data.exchange import response_ids
from mini_rome.data.filters import failure_kind, threads_for
from mini_rome.data.records import Appender, drop_truncated, rows_of
from mini_rome.env import Env
from mini_rome.errors import ConfigError, MiniRomeError, VerifierError
from mini_rome.evaluation.model_client import Endpoint, EndpointError
from mini_rome.evaluation.policies import EndpointPolicy
from mini_rome.experts import Start, record_expert, script
from mini_rome.families import get_family
from mini_rome.rollout import Progress, Rollout
from mini_rome.runs import writing
from mini_rome.sampler.base import SamplingParams
from mini_rome.sandbox import Pool
from mini_rome.tasks.validate_families import expert_responses, play_text
from mini_rome.trace import ChatFormat
from mini_rome.types import Task, Trajectory

A = TypeVar("A")
B = TypeVar("B")


@dataclass
class Yield:
    """How many a role was given and handed on, and why the others were not."""

    role: str
    given: int = 0
    out: int = 0
    why: Counter[str] = field(default_factory=Counter)


# The first three roles


def explore(families: Sequence[str], chunks: Sequence[int], count: int, seed: int) -> tuple[list[Task], Yield]:
    """`count` training instances, and for every fourth a variation one step longer; the same one is proposed once."""
    tasks = make_tasks(families, chunks, count, "train", seed)
    for task in tasks[::4]:
        family = get_family(task.family)
        if task.chunks < family.max_chunks:
            tasks.append(family.make(task.seed, task.chunks + 1))
    different = {task.content_hash: task for task in tasks}
    found = Yield("explore", len(tasks), len(different))
    found.why["proposed twice"] = len(tasks) - len(different)
    return list(different.values()), found


def build(task: Task, chat: ChatFormat, pool: Pool) -> str:
    """Why the instance cannot be used, "" where its environment comes up and its reference passes."""
    try:
        record_expert(chat, task, pool)
    except VerifierError as error:
        return f"reference fails: {error}"
    return ""


def review(task: Task, pool: Pool) -> str:
    """Why another look in fresh boxes refuses the instance, "" for not at all."""
    responses = expert_responses(task)
    reference = play_text(task, pool, responses)
    if reference.verdict.reward != 1.0:
        return "reference does not pass again"
    if play_text(task, pool, []).verdict.reward != 0.0:
        return "doing nothing passes"
    if play_text(task, pool, responses[:-1]).verdict.reward != 0.0:
        return "passes without the last step"
    told = "\n".join([task.instruction, *reference.observations])
    unnamed = [path for path in reference.asked if path not in task.files and path not in told]
    return f"tests look at what nothing names: {', '.join(sorted(unnamed))}" if unnamed else ""


def instances(
    tasks: Sequence[Task], chat: ChatFormat, pool: Pool, ledger: Path, progress: Progress | None = None
) -> tuple[list[Task], list[Yield]]:
    """The tasks that build and review let through. `ledger` (JSON lines) keeps every verdict: a rerun skips them."""
    known: dict[str, tuple[str, str]] = {}
    if ledger.exists():
        drop_truncated(ledger)
        known = {row["task"]: (row["role"], row["why"]) for _, row in rows_of(ledger)}

    def verdict(task: Task) -> tuple[Task, tuple[str, str]]:
        if task.name in known:
            return task, known[task.name]
        if why := build(task, chat, pool):
            return task, ("build", why)
        return task, ("review", review(task, pool))

    built, reviewed, kept = Yield("build", len(tasks)), Yield("review"), []
    with writing(ledger), ledger.open("a", encoding="utf-8") as file:
        for number, (task, (role, why)) in enumerate(mapped(verdict, tasks, pool), 1):
            if task.name not in known:
                file.write(json.dumps({"task": task.name, "role": role, "why": why}) + "\n")
            if why:
                (built if role == "build" else reviewed).why[why.partition(":")[0]] += 1
            else:
                kept.append(task)
            if progress is not None:
                progress(number, len(tasks))
    built.out = reviewed.given = built.given - built.why.total()
    reviewed.out = len(kept)
    return kept, [built, reviewed]


def mapped(function: Callable[[A], B], items: Sequence[A], pool: Pool, workers: int = 0) -> Iterator[B]:
    """`map` with threads, in order; how many the boxes say, or `workers` where it is not 0."""
    workers = workers or threads_for(pool)
    if workers == 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(max_workers=workers) as threads:
        yield from threads.map(function, items)


# Teachers


class Teacher(Protocol):
    """Writes trajectories. `batch`: tasks at once; `workers`: batches at once, 0: as the boxes allow."""

    name: str
    batch: int
    workers: int

    def write(self, tasks: Sequence[Task], chat: ChatFormat, pool: Pool) -> list[Trajectory]:
        """One trajectory per task. Raises EndpointError where it cannot be asked."""
        ...


@dataclass
class Scripted:
    """The task's expert, made worse: failing commands before a step, commands said again, a step left out."""

    name: str
    mistakes: float = 0.0  # probability of a failing command before a step, once more every time
    repeats: float = 0.0  # of saying a step twice
    stubborn: int = 1  # times a failing command is tried
    forgets: float = 0.0  # of submitting without the last step
    batch: int = 1
    workers: int = 0

    def commands(self, task: Task) -> list[str]:
        """What this teacher does on a task; the same every time."""
        rng, family, said = random.Random(f"{self.name}/{task.name}"), get_family(task.family), []
        steps = task.expert[:-1] if len(task.expert) > 1 and rng.random() < self.forgets else task.expert
        for chunk, step in enumerate(steps):
            while rng.random() < self.mistakes:
                said += [family.mistake(task, chunk, rng)] * self.stubborn
            said += [step] * (1 + (rng.random() < self.repeats))
        return said

    def write(self, tasks: Sequence[Task], chat: ChatFormat, pool: Pool) -> list[Trajectory]:
        return [run_responses(chat, task, pool, script(chat, self.commands(task), task)) for task in tasks]


def scripted_teachers() -> list[Scripted]:
    """Teachers of falling skill. Not in the paper, whose teachers are larger models."""
    return [
        Scripted("scripted-careful"),
        Scripted("scripted-plain", mistakes=0.15),
        Scripted("scripted-clumsy", mistakes=0.4, repeats=0.1),
        Scripted("scripted-hasty", mistakes=0.15, stubborn=3, forgets=0.3),
    ]


@dataclass
class PolicyTeacher:
    """A model of ours: its own token ids and log-probs, by the rollout, so that they may serve RL too."""

    rollout: Rollout
    name: str = "policy"
    batch: int = 64
    workers: int = 1  # the rollout has the boxes
    max_new_tokens: int = 20  # of a response, as in IPA

    def write(self, tasks: Sequence[Task], chat: ChatFormat, pool: Pool) -> list[Trajectory]:
        params = SamplingParams(max_new_tokens=self.max_new_tokens)
        return self.rollout.collect([Start(task) for task in tasks], params)


@dataclass
class EndpointTeacher:
    """A model behind an OpenAI-compatible endpoint. It answers in text, so its ids are retokenised."""

    endpoint: Endpoint
    name: str = ""
    batch: int = 1
    workers: int = 8

    def __post_init__(self) -> None:
        self.name = self.name or f"endpoint-{self.endpoint.model}"

    def write(self, tasks: Sequence[Task], chat: ChatFormat, pool: Pool) -> list[Trajectory]:
        return [self._episode(task, chat, pool) for task in tasks]

    def _episode(self, task: Task, chat: ChatFormat, pool: Pool) -> Trajectory:
        """Asked in one box, recorded in another by running what was said."""
        with Env(task, pool) as env:
            said = EndpointPolicy(self.endpoint, task.seed).play(env, run=0).responses
        if not said:
            raise EndpointError(f"{self.endpoint.url}: no answer to {task.name}")
        trajectory = run_responses(chat, task, pool, [response_ids(chat, text) for text in said])
        trajectory.retokenised = True
        return trajectory


# The fourth role


def teach(
    teachers: Sequence[Teacher],
    tasks: Sequence[Task],
    chat: ChatFormat,
    pool: Pool,
    log: Appender,
    progress: Progress | None = None,
) -> list[Yield]:
    """Every teacher on every task, appended to `log` as they come; what is there already is not done again.

    A teacher that cannot be asked is counted by kind of failure; MiniRomeError when one never answered.
    """
    found: list[Yield] = []
    for teacher in teachers:
        if teacher.batch < 1:
            raise ConfigError(f"teacher {teacher.name}: batch {teacher.batch} must be at least 1")
        todo = [task for task in tasks if (task.name, teacher.name, 0) not in log.done]
        batches = [todo[begin : begin + teacher.batch] for begin in range(0, len(todo), teacher.batch)]
        result, last = Yield(f"trajectory ({teacher.name})", len(tasks), len(tasks) - len(todo)), ""
        for written in mapped(partial(_asked, teacher, chat, pool), batches, pool, teacher.workers):
            if isinstance(written, EndpointError):
                result.why[failure_kind(written)] += teacher.batch
                last = str(written)
                continue
            for each in written:
                each.policy, each.episode = teacher.name, 0
            log.append(written)
            result.out += len(written)
            if progress is not None:
                progress(len(found) * len(tasks) + result.out, len(teachers) * len(tasks))
        if todo and not result.out:
            raise MiniRomeError(f"teacher {teacher.name} answered none of {len(todo)} tasks; at last: {last}")
        found.append(result)
    return found


def _asked(teacher: Teacher, chat: ChatFormat, pool: Pool, tasks: Sequence[Task]) -> list[Trajectory] | EndpointError:
    try:
        return teacher.write(tasks, chat, pool)
    except EndpointError as error:
        return error

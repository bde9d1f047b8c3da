"""`mini-rome eval`: how well a policy does, from the initial state, over families and task folders.

A policy is a checkpoint, a scripted agent or a model behind an endpoint. Rows are written as episodes end, and an
evaluation that was stopped goes on where it was.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from mini_rome import sandbox
from mini_rome.agent import Agent
from mini_rome.call_formats import chat_format
from mini_rome.env import Env
from mini_rome.errors import ConfigError, SandboxError
from mini_rome.evaluation.evaluate import EVALUATION_STEP, PAPER_SAMPLING
from mini_rome.evaluation.model_client import Endpoint
from mini_rome.evaluation.paper import paper_lines
from mini_rome.evaluation.policies import EndpointPolicy, Episode, Policy, Scripted, read_responses
from mini_rome.evaluation.results import ROWS, Log, Row, check_scored, failures, summaries, table_of, wide_console
from mini_rome.evaluation.results import SUMMARY as RESULTS
from mini_rome.experts import Start
from mini_rome.model import load_model
from mini_rome.rollout import Rollout
from mini_rome.runs import checkpoint, provenance, write_json
from mini_rome.sampler.base import SamplingParams
from mini_rome.sampler.transformers import TransformersSampler
from mini_rome.tasks.choice import Item, TaskChoice
from mini_rome.tasks.folders import MAX_TURNS, FolderEnv, as_task
from mini_rome.tasks.harbor import TaskFolder
from mini_rome.types import IN_PLACE, Trajectory, Verdict

PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
BATCH = 64  # episodes of a checkpoint at once


def folder_item(folder: TaskFolder) -> Item:
    return Item(folder.name, as_task(folder), folder.difficulty, folder)


@dataclass
class Loaded:
    """A model with all that is needed to run its episodes."""

    model: PreTrainedModel
    rollout: Rollout

    @classmethod
    def open(cls, path: str, pool: sandbox.Pool, seed: int, precision: str = "float32") -> Loaded:
        """precision: of the sampler's copy; float32 samples with the model itself."""
        model, tokenizer = load_model(checkpoint(path))
        form = chat_format(tokenizer)
        sampler = TransformersSampler(model.eval(), form.stop_id, PRECISIONS[precision])
        return cls(model, Rollout(form, sampler, pool, seed=seed))


def open_pool(backend: str, size: int, console: Console) -> sandbox.Pool:
    """Boxes of the backend asked for, after one line that says which and why."""
    chosen, line = sandbox.resolve(backend)
    console.print(line, markup=False)
    return sandbox.Pool(backend=chosen, size=size)


@dataclass
class Evaluation:
    """What `run_eval` measures: who acts (a checkpoint, an agent or an endpoint), on which tasks, how often."""

    choice: TaskChoice
    folders: Sequence[TaskFolder] = ()
    model: str | None = None  # a checkpoint
    agent: str | None = None  # oracle, noop, random, replay
    replay: str | None = None  # the responses.jsonl that the agent `replay` reads
    endpoint: Endpoint | None = None
    params: SamplingParams = PAPER_SAMPLING
    backend: str = "auto"
    runs: int = 3
    seed: int = 0
    jobs: int = 4
    out: str | None = None
    network: bool = False  # of the verifier's container
    in_place: bool = False
    max_turns: int = MAX_TURNS
    parameters: int | None = None  # of the checkpoint, once it is loaded

    def __post_init__(self) -> None:
        chosen = [name for name in ("model", "agent", "endpoint") if getattr(self, name) is not None]
        if len(chosen) != 1:
            raise ConfigError(f"name one of --model, --agent and --endpoint, not {' and '.join(chosen) or 'none'}")
        for name in ("runs", "jobs", "max_turns"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
        if self.agent == "replay" and self.replay is None:
            raise ConfigError("--agent replay needs --replay FILE, a responses.jsonl that an evaluation wrote")

    def settings(self, backend: str) -> dict[str, Any]:
        """What rows of one folder share, so that a resumed evaluation is one evaluation."""
        sampling = self.params if self.endpoint is None else self.endpoint
        return {
            "policy": self.agent or self.model or (self.endpoint.model if self.endpoint else ""),
            "backend": backend, "seed": self.seed, "split": self.choice.where, "verifier_network": self.network,
            "in_place": self.in_place, "max_turns": self.max_turns, "secret": self.choice.fingerprint,
            **{name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k")},
        }  # fmt: skip


def run_eval(plan: Evaluation) -> int:
    """The verb `eval`: every task `runs` times from the initial state. Prints a table; writes rows and a summary."""
    console = wide_console()
    backend, line = sandbox.resolve(plan.backend)
    console.print(line, markup=False)
    if plan.folders and backend == "sim":
        raise ConfigError("task folders need Docker: name --folders none, or start it (see mini-rome doctor)")
    items = [*plan.choice.items(), *map(folder_item, plan.folders)]
    if not items:
        raise ConfigError("no task to run: --families none and --folders none")
    log = Log(plan.out, plan.settings(backend), transcripts=plan.choice.secret is None)
    with sandbox.Pool(backend=backend, size=32 if plan.model else plan.jobs) as pool:
        sampler = _play(plan, items, pool, log, console)
    wanted = {(item.name, run) for item in items for run in range(plan.runs)}
    rows = [row for row in log.rows if row.key in wanted]
    check_scored(rows)
    found = summaries(rows)
    console.print(table_of(found, plan.runs))
    for text in [*failures(rows), *_notes(plan)]:
        console.print(text, markup=False, soft_wrap=True)
    console.print(paper_lines(found), markup=False, soft_wrap=True)
    if log.folder is not None:
        record = {**plan.settings(backend), "runs": plan.runs, "results": found, "notes": _notes(plan)}
        record["parameters"] = plan.parameters
        write_json(log.folder / RESULTS, record | provenance(backend, sampler, plan.seed))
        console.print(f"rows: {log.folder / ROWS}; summary: {log.folder / RESULTS}", markup=False, soft_wrap=True)
    return 0


def _notes(plan: Evaluation) -> list[str]:
    """What a reader of the numbers must know."""
    notes = []
    if plan.network:
        notes.append("verifier network: the tests could reach the internet; the agent could not")
    if plan.in_place:
        notes.append(f"verdicts are {IN_PLACE}: the agent was root where it was judged")
    if any(folder.unsafe for folder in plan.folders):
        notes.append("unsafe settings let through: " + "; ".join(s for f in plan.folders for s in f.unsafe))
    if plan.endpoint is not None and plan.endpoint.notes:
        notes.append(f"the endpoint does not take: {', '.join(sorted(plan.endpoint.notes))}")
    return notes


def _play(plan: Evaluation, items: Sequence[Item], pool: sandbox.Pool, log: Log, console: Console) -> str:
    """Run what is not in the log yet; the sampler's name."""
    done = log.done()
    missing = [(item, run) for run in range(plan.runs) for item in items if (item.name, run) not in done]
    if len(missing) < len(items) * plan.runs:
        console.print(f"{len(items) * plan.runs - len(missing)} episodes are there already", markup=False)
    name = plan.settings("")["policy"]
    keep = _Keeper(log, name, len(missing), console)
    if plan.model is not None:
        loaded = Loaded.open(plan.model, pool, plan.seed)
        _play_batches(plan, loaded.rollout, items, missing, keep)
        missing = [(item, run) for item, run in missing if item.folder is not None]
        plan.parameters = loaded.model.num_parameters()
        policy: Policy = CheckpointPolicy(str(name), loaded.rollout, plan.params, plan.seed)
        jobs, sampler = 1, loaded.rollout.sampler.name
    elif plan.endpoint is not None:
        policy, jobs, sampler = EndpointPolicy(plan.endpoint, plan.seed), plan.jobs, "endpoint"
    else:
        recorded = read_responses(plan.replay) if plan.replay else None
        policy, jobs, sampler = Scripted(str(plan.agent), plan.seed, recorded), plan.jobs, "scripted"
    with ThreadPoolExecutor(jobs, thread_name_prefix="episode") as executor:
        running = [executor.submit(_episode, plan, policy, pool, item, run, keep) for item, run in missing]
        try:
            for job in as_completed(running):
                job.result()
        except BaseException:
            executor.shutdown(cancel_futures=True)
            raise
    return sampler


def _episode(plan: Evaluation, policy: Policy, pool: sandbox.Pool, item: Item, run: int, keep: _Keeper) -> None:
    """One episode and its row; what the sandbox, the image or the server failed to do is a row without a reward."""
    try:
        if item.folder is not None:
            env: Env = FolderEnv(item.folder, plan.max_turns, plan.network, plan.in_place)
        else:
            env = Env(item.task, pool)
        with env:
            episode = policy.play(env, run)
    except SandboxError as error:
        episode = Episode(Verdict(None, f"{type(error).__name__}: {error}"), "infrastructure")
    keep(item, run, episode, "docker" if item.folder else pool.backend)


def _play_batches(
    plan: Evaluation, rollout: Rollout, items: Sequence[Item], missing: Sequence[tuple[Item, int]], keep: _Keeper
) -> None:
    """A checkpoint on the families, many episodes at once. A batch is run as a whole, or a resumed run would draw
    other random numbers than one that was not stopped."""
    mine = [item for item in items if item.folder is None]
    wanted = {(item.name, run) for item, run in missing}
    for run in range(plan.runs):
        for first in range(0, len(mine), BATCH):
            batch = mine[first : first + BATCH]
            if not any((item.name, run) in wanted for item in batch):
                continue
            starts = [Start(item.task) for item in batch]
            step = EVALUATION_STEP + run
            for item, found in zip(
                batch, rollout.collect(starts, plan.params, step=step, first_episode=first), strict=True
            ):
                keep(item, run, episode_of(found), rollout.backend)


class _Keeper:
    """Turns episodes into rows, and says how far the evaluation is, at most every ten seconds."""

    def __init__(self, log: Log, policy: str, total: int, console: Console) -> None:
        self.log, self.policy, self.total, self.console = log, policy, total, console
        self.begun = self.last = time.monotonic()
        self.done = 0

    def __call__(self, item: Item, run: int, episode: Episode, backend: str) -> None:
        verdict = episode.verdict
        self.log.add(
            Row(
                policy=self.policy, task=item.name, kind="folder" if item.folder else "family",
                family=item.task.family, domain=item.task.domain, group=item.group, difficulty=item.difficulty,
                language=item.language, chunks=item.task.chunks, run=run, reward=verdict.reward, cause=episode.cause,
                ending=episode.ending, reason=" ".join(verdict.reason.split())[:300], turns=episode.turns,
                prompt_tokens=episode.prompt_tokens, completion_tokens=episode.completion_tokens,
                seconds=round(episode.seconds, 3), backend=backend, verifier=verdict.verifier,
            ),
            episode,
        )  # fmt: skip
        self.done += 1
        now = time.monotonic()
        if now - self.last > 10:
            self.last = now
            left = (now - self.begun) / self.done * (self.total - self.done)
            self.console.print(f"{self.done}/{self.total} episodes ({left:.0f} s left)", markup=False)


@dataclass
class CheckpointPolicy(Policy):
    """A saved model on task folders, one episode at a time."""

    name: str
    rollout: Rollout
    params: SamplingParams
    seed: int

    def play(self, env: Env, run: int) -> Episode:
        instruction, _ = env.reset()
        trajectory = Trajectory(env.task, self.rollout.chat.prompt(instruction, env.task), [], seed=self.seed)
        agent = Agent(self.rollout.chat, env, trajectory, self.params, (self.seed, EVALUATION_STEP + run),
                      self.rollout.max_context)  # fmt: skip
        found = episode_of(agent.run(self.rollout.sampler))
        self.rollout.sampler.forget()
        return found


def episode_of(trajectory: Trajectory) -> Episode:
    """A trajectory as an evaluation keeps it. Tokens are counted once: prompt and observations, and responses."""
    turns = trajectory.turns
    if trajectory.reason.startswith("context full"):
        ending = "context"
    elif turns and turns[-1].submitted:
        ending = "submitted"
    else:
        ending = "time" if turns and turns[-1].status == "timeout" else "turns"
    return Episode(
        verdict=Verdict(trajectory.reward, trajectory.reason, trajectory.verifier),
        ending="infrastructure" if trajectory.infra else ending,
        turns=len(turns),
        prompt_tokens=len(trajectory.prompt_ids) + sum(len(turn.observation_ids) for turn in turns),
        completion_tokens=sum(len(turn.ids) for turn in turns),
        seconds=sum(turn.wall_s for turn in turns),
        responses=[turn.text for turn in turns],
    )

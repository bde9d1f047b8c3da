"""Rollouts ahead of training: while the trainer works on step t, a thread draws the rollouts of step t + a.

They are begun with the weights of version t and start states chosen then, so what is drawn depends on no clock: a run
with a >= 1 is as reproducible as one without, if its sampler is. The thread begins once a step's inputs are ready and
is waited for before the optimiser changes the weights; that is where pi_old is scored, by the weights that sampled,
without keeping a second copy of them. What overlaps is sampling with forward and backward. Results move start
positions, experts and forks when a batch is consumed.

One engine draws one batch at a time, so a = 1 already hides all that can be hidden; a larger a gives older samples
and no more speed. On one GPU the two share the device: what is hidden then is the time of environments.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from mini_rome.errors import ConfigError
from mini_rome.experts import Start
from mini_rome.rollout import Progress, Rollout
from mini_rome.sampler.base import Sampler, SamplingParams
from mini_rome.sampler.transformers import TransformersSampler
from mini_rome.types import SafetyEvent, Task, Trajectory, Turn

FILE = "ipa_ahead_{}.pt"  # per rank: what a checkpoint keeps of the batches drawn and not yet consumed


@dataclass(frozen=True)
class Plan:
    """One rank's part of the rollouts of a step. first: the number of its first episode in the whole step's plan."""

    step: int
    first: int
    starts: list[Start]


@dataclass
class Batch:
    """The rollouts of a step, until it consumes them."""

    step: int  # that they are for
    version: int  # of the weights that sampled them
    trajectories: list[Trajectory]
    drops: Counter[str]  # rollouts that the infrastructure spoiled, by cause
    cancelled: int = 0  # by `rollout_redundancy`
    old_logps: list[list[float]] | None = None  # log pi_old of each completion token; None: pi_old is pi_theta


def draw(
    rollout: Rollout, plan: Plan, params: SamplingParams, spares: int, progress: Progress | None = None
) -> Batch:
    """Run the episodes of a plan with the weights that the sampler holds."""
    drops, cancelled = Counter(rollout.infra), rollout.cancelled
    trajectories = rollout.collect(
        plan.starts, params, step=plan.step, first_episode=plan.first, progress=progress, redundancy=spares
    )
    drops, cancelled = Counter(rollout.infra) - drops, rollout.cancelled - cancelled
    return Batch(plan.step, rollout.sampler.version, trajectories, drops, cancelled)


def own_weights(sampler: Sampler, model: PreTrainedModel) -> None:
    """A thread must not sample with a model that is in training: from its next sync this sampler takes a copy."""
    if isinstance(sampler, TransformersSampler) and sampler.dtype is None:
        sampler.dtype = model.dtype


def check_versions(batch: Batch) -> None:
    """pi_old is scored with the weights of `batch.version`: ConfigError for a chunk that others sampled."""
    older = {turn.policy_version for t in batch.trajectories for turn in t.episode_turns} - {batch.version}
    if older:
        raise ConfigError(
            f"chunks of policy version {sorted(older)} at version {batch.version}: the weights that sampled them are "
            f"gone, so pi_old cannot be scored. --pi_old_source sampler takes log mu in its place."
        )


def drop_stale(batch: Batch, limit: int) -> tuple[list[int], int]:
    """Leave samples that began more than `limit` versions before the batch's step unscored: masked everywhere.

    Returns how many versions behind each of the others began, and the number dropped.
    """
    ages, dropped = [], 0
    for trajectory in batch.trajectories:
        if not (turns := trajectory.episode_turns):
            continue  # spoiled before the first response
        age = batch.step - turns[0].policy_version
        if age <= limit:
            ages.append(age)
            continue
        trajectory.reward, trajectory.reason = None, "stale"
        dropped += 1
    return ages, dropped


def ahead_metrics(ages: Sequence[int], dropped: int) -> dict[str, float]:
    """How many versions behind the rollouts of a batch began, over all ranks, and how many were too old."""
    mean = sum(ages) / len(ages) if ages else float("nan")
    return {
        "rollouts/behind_mean": mean,
        "rollouts/behind_max": float(max(ages, default=0)),
        "rollouts/stale_dropped": float(dropped),
    }


class Ahead:
    """Batches that were drawn for later steps, and the thread that draws."""

    def __init__(self, draw: Callable[[Plan], Batch], stop: threading.Event) -> None:
        """stop: ends the rollouts under way at their next turn, where set."""
        self.ready: dict[int, Batch] = {}  # by step
        self._draw, self._stop = draw, stop
        self._thread: ThreadPoolExecutor | None = None
        self._drawing: Future[list[Batch]] | None = None

    def begin(self, plans: Sequence[Plan]) -> None:
        """Draw these, one after the other, and return at once."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ahead")
        self._drawing = self._thread.submit(lambda: [self._draw(plan) for plan in plans])

    def take(self, step: int) -> Batch | None:
        """The batch of this step, if it was drawn; the caller's from now on."""
        return self.ready.pop(step, None)

    def finish(self) -> list[Batch]:
        """Wait for what was begun, which is ready then; raises what the thread raised."""
        if self._thread is None or self._drawing is None:
            return []
        drawn = self._drawing.result()
        self._thread.shutdown()
        self._thread = self._drawing = None
        self.ready |= {batch.step: batch for batch in drawn}
        return drawn

    def close(self) -> None:
        """Drop everything; no thread is left when this returns."""
        if self._thread is not None:
            self._stop.set()
            self._thread.shutdown()
            self._stop.clear()
            self._thread = self._drawing = None
        self.ready.clear()

    def save(self, folder: Path, rank: int) -> None:
        """Write what is ready beside a checkpoint: the weights that drew it will be gone."""
        plain = [
            {**vars(batch), "drops": dict(batch.drops), "trajectories": list(map(_to_plain, batch.trajectories))}
            for batch in self.ready.values()
        ]
        torch.save(plain, folder / FILE.format(rank))

    def load(self, folder: Path, rank: int, tasks: Mapping[str, Task]) -> None:
        """Take up what `save` wrote."""
        for row in torch.load(folder / FILE.format(rank), weights_only=True):
            trajectories = [_from_plain(t, tasks) for t in row["trajectories"]]
            batch = Batch(**{**row, "trajectories": trajectories, "drops": Counter(row["drops"])})
            self.ready[batch.step] = batch


def _to_plain(trajectory: Trajectory) -> dict[str, Any]:
    fields = {entry.name: getattr(trajectory, entry.name) for entry in dataclasses.fields(trajectory)}
    turns = [dataclasses.asdict(turn) for turn in trajectory.turns]
    chains = [_to_plain(chain) for chain in trajectory.chains]
    events = list(map(dataclasses.asdict, trajectory.events))
    return {**fields, "task": trajectory.task.name, "turns": turns, "chains": chains, "events": events}


def _from_plain(row: dict[str, Any], tasks: Mapping[str, Task]) -> Trajectory:
    turns = [Turn(**{**turn, "events": _events(turn)}) for turn in row["turns"]]
    chains = [_from_plain(chain, tasks) for chain in row["chains"]]
    parts = {"task": tasks[row["task"]], "turns": turns, "chains": chains, "events": _events(row)}
    return Trajectory(**{**row, **parts})


def _events(row: dict[str, Any]) -> tuple[SafetyEvent, ...]:
    return tuple(SafetyEvent(**event) for event in row["events"])

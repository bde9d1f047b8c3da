"""What a step trains on: start states, episodes, packed rows; drawn when they are asked for, or ahead of training.

The part of the trainer that knows of sampler, curriculum and rollouts, and nothing of the loss.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback
from trl import GRPOTrainer
from trl.trainer.utils import pad

from mini_rome.ahead import Ahead, Batch, Plan, ahead_metrics, check_versions, draw, drop_stale, own_weights
from mini_rome.chunking import OUTSIDE, PackedSample, pack_episode
from mini_rome.config import IPAConfig
from mini_rome.curriculum import Curriculum
from mini_rome.device import Device
from mini_rome.episodes import Recorder
from mini_rome.errors import ConfigError
from mini_rome.groups import without_variance
from mini_rome.layout import Rows, score
from mini_rome.metrics import Outcome, batch_metrics
from mini_rome.rollout import Progress, Rollout
from mini_rome.sampler.base import SamplingParams
from mini_rome.timeline import STEP, note, span
from mini_rome.types import Trajectory


class AroundStep(TrainerCallback):
    """Tells the trainer when the optimiser is about to step, and when it has."""

    def __init__(self, trainer: CollectingTrainer) -> None:
        self.trainer = trainer
        self.begun = self.stepping = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self.begun = time.monotonic()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.trainer.finish_ahead()
        self.stepping = time.monotonic()

    def on_optimizer_step(self, args, state, control, **kwargs):
        note("train", self.stepping)

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.advance()
        note(STEP, self.begun)


class CollectingTrainer(GRPOTrainer):
    """A GRPOTrainer whose rollouts are episodes in boxes, chosen by a curriculum."""

    def _set_up_rollouts(
        self, model: PreTrainedModel, args: IPAConfig, rollout: Rollout, curriculum: Curriculum,
        progress: Progress | None,
    ) -> None:  # fmt: skip
        """Before the base class is set up, which asks for none of this."""
        self.rollout, self.curriculum, self.progress = rollout, curriculum, progress
        self.ahead = Ahead(self._draw, rollout.stop)
        self.recorder: Recorder | None = None  # keeps some episodes for a look
        self._samples: list[PackedSample] = []  # of the batch being scored, in the order of its rows
        self._old_logps: list[list[float]] | None = None  # of the same, where the weights that sampled are gone
        self._rewards = torch.empty(0)  # (B,), NaN where it is unscorable
        self._misconduct = torch.empty(0)  # (B,), 1 where the episode has an event that `conduct_penalty` is for
        self._left_out = torch.empty(0)  # (B,) bool, by filter_groups
        if args.async_ratio:
            own_weights(rollout.sampler, model)
        if args.multiplex and not rollout.cancels:
            raise ConfigError("--multiplex true: an external agent asks for tokens when it likes, not in turn")
        self.device = Device(rollout.sampler if args.multiplex else None)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As ever; however it ends, no thread is left that draws rollouts."""
        if self.args.async_ratio and self.is_deepspeed_enabled and self.args.pi_old_source == "trainer":
            raise ConfigError(
                f"--async_ratio {self.args.async_ratio}: DeepSpeed changes the weights inside the backward pass, "
                f"before pi_old can be scored. Use FSDP2, or --pi_old_source sampler."
            )
        if self.is_fsdp_enabled and self.rollout.sampler.name == "transformers":
            raise ConfigError(
                "--sampler transformers: FSDP shares out the weights that it would sample with; use vllm-adapters"
            )
        self.rollout.turn = self.device.sampling
        try:
            return super().train(*args, **kwargs)
        finally:
            self.ahead.close()
            self.rollout.turn = nullcontext

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """As ever; the device is the trainer's from when the inputs are ready until the backward pass is done."""
        try:
            return super().training_step(*args, **kwargs)
        finally:
            self.device.give()

    def plan(self, names: list[str], step: int) -> Plan:
        """This rank's part of a step on these tasks, one per rollout on all ranks.

        Every rank makes the plan for all, from (task, step) and gathered results, and takes its share.
        """
        starts, ranks = self.curriculum.starts(names, step), self.accelerator.num_processes
        first = self.accelerator.process_index * (len(names) // ranks)
        return Plan(step, first, starts[first : first + len(names) // ranks])

    def collect(self, prompts: list[str]) -> dict[str, list]:
        """One episode per prompt (a task's name), drawn ahead or now; one packed row each, all its chains in it."""
        step, limit = self.state.global_step, self.args.async_ratio
        batch = self.ahead.take(step)
        if batch is None:
            self._sync(step)
            batch = self._draw(self.plan(gather_object(prompts), step), self.progress)
            self._check_versions(batch)
        elif [trajectory.task.name for trajectory in batch.trajectories] != prompts:
            raise RuntimeError(f"step {step}: the rollouts drawn ahead are not those of the tasks that it asks for")
        ages, dropped = drop_stale(batch, limit) if limit else ([], 0)
        self._samples, self._old_logps = [self._pack(t) for t in batch.trajectories], batch.old_logps
        rewards = [float("nan") if t.reward is None else t.reward for t in batch.trajectories]
        self._rewards = torch.tensor(rewards, dtype=torch.float32, device=self.accelerator.device)
        misconduct = [float(bool(t.misconduct)) for t in batch.trajectories]
        self._misconduct = torch.tensor(misconduct, device=self.accelerator.device)
        self._note(batch, ages, dropped)
        return {
            "prompt_ids": [sample.prompt_ids for sample in self._samples],
            "completion_ids": [sample.completion_ids for sample in self._samples],
            "logprobs": [sample.logprobs for sample in self._samples],
            "env_mask": [sample.env_mask for sample in self._samples],
        }

    def _sync(self, version: int) -> None:
        with self.device.sampling(), span("sync"):
            self.rollout.sampler.sync(self.accelerator.unwrap_model(self.model), version=version)

    def _draw(self, plan: Plan, progress: Progress | None = None) -> Batch:
        params = SamplingParams(max_new_tokens=self.args.max_new_tokens)
        return draw(self.rollout, plan, params, self.args.rollout_redundancy, progress)

    def _check_versions(self, batch: Batch) -> None:
        if self.args.pi_old_source == "trainer":
            check_versions(batch)

    def _begin_ahead(self) -> None:
        """With the weights of now, begin what is not drawn yet of the next `async_ratio` steps."""
        step, group = self.state.global_step, self.args.num_generations
        last = min(step + self.args.async_ratio, self.state.max_steps - 1)
        missing = [later for later in range(step + 1, last + 1) if later not in self.ahead.ready]
        if not missing:
            return
        self._sync(step)
        names, tasks = list(self.train_dataset["prompt"]), self.args.generation_batch_size // group
        plans = []
        for later in missing:
            first = later % (len(names) // tasks) * tasks  # tasks come in turn, see shuffle_dataset
            plans.append(self.plan([name for name in names[first : first + tasks] for _ in range(group)], later))
        self.ahead.begin(plans)

    def finish_ahead(self) -> None:
        """Before the weights change: wait, and score pi_old by the weights that sampled."""
        for batch in self.ahead.finish():
            self._check_versions(batch)
            if self.args.pi_old_source == "trainer":
                batch.old_logps = self._score([self._pack(trajectory) for trajectory in batch.trajectories])

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        """For pi_old and the reference: TRL knows a row as one context, so rows of several are scored here."""
        if not any(sample.contexts for sample in self._samples):
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        return self._column(self._score(self._samples, model), 0.0), None, None

    @torch.no_grad()
    def _score(self, samples: list[PackedSample], model: Any = None) -> list[list[float]]:
        """log pi of every completion token with the weights of now (or this model's), like lengths together."""
        order = sorted(range(len(samples)), key=lambda at: len(samples[at].prompt_ids + samples[at].completion_ids))
        found: dict[int, list[float]] = {}
        for first in range(0, len(order), self.args.per_device_train_batch_size):
            places = order[first : first + self.args.per_device_train_batch_size]
            part = [samples[at] for at in places]
            with self.accelerator.autocast(), span("train"):
                (logps,), _ = score(model or self.model, [self._rows(part, [sample.chunk_ids for sample in part])])
            for at, row in zip(places, logps, strict=True):
                found[at] = row[: len(samples[at].completion_ids)].tolist()
        return [found[at] for at in range(len(samples))]

    def _pack(self, trajectory: Trajectory) -> PackedSample:
        sample = pack_episode(trajectory)
        if not sample.completion_ids:  # spoiled before the first response: a row of one masked token
            stop = self.rollout.chat.stop_id
            return PackedSample(sample.prompt_ids, [stop], [0.0], [0], [OUTSIDE], [OUTSIDE])
        return sample

    def _note(self, batch: Batch, ages: list[int], dropped: int) -> None:
        """Gather what start states, experts and logs need to know of this batch."""
        args, mine = self.args, [Outcome.of(t, self.args.conduct_penalty > 0) for t in batch.trajectories]
        outcomes, shorter = gather_object(mine), gather_object(self.curriculum.shorter_samples(batch.trajectories))
        on_path = zip(mine, map(self.curriculum.on_path, batch.trajectories), strict=True)
        self.curriculum.take(gather_object([outcome.result for outcome, counts in on_path if counts]), shorter)
        found = batch_metrics(outcomes, gather_object([batch.drops]), args.gamma, args.failure_reward)
        found["imitation/forks"] = float(len(self.curriculum.forks))
        if self.recorder is not None:
            imitated = [self.curriculum.imitated_after(t) for t in batch.trajectories]
            self.recorder.begin(self.state.global_step, batch.trajectories, imitated)
        if args.async_ratio:
            found |= ahead_metrics(gather_object(ages), sum(gather_object([dropped])))
            found["infra/unscored"] -= found["rollouts/stale_dropped"]
        if args.rollout_redundancy:
            found["rollouts/cancelled"] = float(sum(gather_object([batch.cancelled])))
        groups = without_variance(outcomes) if args.filter_groups == "zero_variance" else set()
        self._left_out = torch.tensor([(o.task, o.start) in groups for o in mine], device=self._rewards.device)
        if args.filter_groups != "none":
            found["rollouts/groups_left_out"] = float(len(groups))
        for name, value in found.items():
            self._metrics["train"][name].append(value)

    def advance(self) -> None:
        """After the optimiser step, on all ranks alike: move start states, refresh experts."""
        replaced = self.curriculum.advance(self.state.global_step)
        if replaced:
            self._metrics["train"]["experts_replaced"].append(float(replaced))

    def _column(self, values: Sequence[Sequence[float]], filler: float, side: str = "right") -> Tensor:
        rows = [torch.tensor(row) for row in values]
        multiple = self.pad_to_multiple_of
        return pad(rows, filler, side, pad_to_multiple_of=multiple).to(self.accelerator.device)

    def _rows(self, samples: Sequence[PackedSample], chunk_ids: list[list[int]]) -> Rows:
        """Samples as TRL lays them out."""
        prompts, completions = [s.prompt_ids for s in samples], [s.completion_ids for s in samples]
        return {
            "prompt_ids": self._column(prompts, 0, "left"),
            "prompt_mask": self._column([[1] * len(ids) for ids in prompts], 0, "left"),
            "completion_ids": self._column(completions, 0),
            "completion_mask": self._column([[1] * len(ids) for ids in completions], 0),
            "chunk_ids": self._column(chunk_ids, OUTSIDE),
            **self._contexts(samples),
        }

    def _contexts(self, samples: Sequence[PackedSample]) -> Rows:
        """The column that rows have where an episode of theirs had several contexts."""
        if not any(sample.contexts for sample in samples):
            return {}
        return {"contexts": self._column([s.contexts or [0] * len(s.completion_ids) for s in samples], 0)}

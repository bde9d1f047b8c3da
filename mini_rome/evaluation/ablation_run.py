"""One run of an ablation: a variant on a seed, from the model after SFT to rows of the CSV."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any

from transformers import TrainerCallback

from mini_rome.arguments import RunArguments
from mini_rome.config import IPAConfig
from mini_rome.data.demonstrations import make_tasks, record_experts
from mini_rome.errors import ConfigError
from mini_rome.evaluation.ablation_job import DRILL_OPTIONS, SFT, SFT_OPTIONS, Job, build, digest, sft_options
from mini_rome.evaluation.ablation_trainers import TRAINERS, NoisySampler
from mini_rome.evaluation.evaluate import EVALUATION_STEP, PAPER_SAMPLING
from mini_rome.evaluation.rows import Row
from mini_rome.experts import Expert, Start
from mini_rome.masks import MaskPolicy
from mini_rome.pipeline import Run
from mini_rome.progress import Display, quiet
from mini_rome.rollout import Rollout
from mini_rome.runs import commit, write_json, writing
from mini_rome.safety.conduct import conduct_rows
from mini_rome.sampler.base import SamplingParams
from mini_rome.sampler.transformers import TransformersSampler
from mini_rome.sft import MaskedSFTConfig, masked_sft_trainer
from mini_rome.types import Task, Trajectory

Note = Callable[[int], None]  # told how many more optimiser steps are done
TRIES = 32  # rollouts from the initial state, none of which may solve a hard task, at each of two temperatures
CANDIDATES = 50  # tasks that are tried before none counts as hard


def make_sft(job: Job) -> None:
    """Train and keep the model that this job starts from, with what it can do: success on short and on long tasks."""
    if (job.model / SFT).exists():
        return
    mine = (*SFT_OPTIONS, *DRILL_OPTIONS, "chunks", "max_new_tokens")
    own = {name: value for name, value in job.options.items() if name in mine}
    began = time.monotonic()
    with TemporaryDirectory(dir=job.scratch) as folder:
        arguments, args, _ = build(
            own, IPAConfig, sandbox="sim", output_dir=folder, seed=job.sft_seed, eval_tasks=100, keep_episodes=0,
            train_tasks=1, num_generations=16, gradient_accumulation_steps=1,
        )  # fmt: skip
        arm = Arm(arguments, args, job)
        with arm:
            arm.build_model()
            arm.sft()
            for name, chunks in (("short", arguments.sft_chunks), ("long", arguments.chunks)):
                arm.evaluate(name, arm.tasks("test", chunks), chunks)
            arm.save_model("sft")
        facts = {"seed": job.sft_seed, "seconds": round(time.monotonic() - began, 1), "commit": commit()}
        facts["weights"] = hashlib.sha256((arm.folder / "sft" / "model.safetensors").read_bytes()).hexdigest()[:12]
        write_json(arm.folder / "sft" / SFT, facts | {"success": arm.success, "options": sft_options(job.options)})
        (arm.folder / "sft").rename(job.model)


def run_job(job: Job, note: Note = lambda steps: None) -> None:
    """Train and measure; keeps rows, seconds and commit in `job.result`."""
    config, _ = TRAINERS[job.variant.trainer]
    began = time.monotonic()
    with TemporaryDirectory(dir=job.scratch) as folder:
        arguments, args, peft = build(
            job.options, config, seed=job.seed, sandbox=job.backend, max_steps=job.steps, model=str(job.model),
            save_strategy="no", keep_episodes=0, eval_every=0, output_dir=folder,
        )  # fmt: skip
        arm = Arm(arguments, args, job, note)
        with arm:
            rows = arm.rows_of_variant(peft)
    seconds = round(time.monotonic() - began, 1)
    weights = json.loads((job.model / SFT).read_text()).get("weights")
    facts = {"seconds": seconds, "commit": commit(), "sft": weights}
    write_json(job.result, {"rows": [list(row) for row in rows], **facts})


class Arm(Run):
    """A run whose stages are those of the pipeline, silent, with a variant's trainer and measurements."""

    def __init__(self, arguments: RunArguments, args: IPAConfig, job: Job, note: Note = lambda steps: None) -> None:
        super().__init__(arguments, args)
        self.display, self.job, self.note = Display(enabled=False), job, note

    def rows_of_variant(self, peft: Any) -> list[Row]:
        """The whole of a run that begins after SFT."""
        variant, steps = self.job.variant, self.args.max_steps
        self.build_model()
        # Success is that of the trainer's own weights, whatever the sampler of the rollouts does to them.
        exact = TransformersSampler(self.model, self.chat.stop_id)
        self.judge = Rollout(self.chat, exact, self.pool, seed=self.args.seed, extra_turns=self.arguments.extra_turns)
        tasks = self.hard_task() if self.job.hard else self.train_tasks(self.arguments.train_tasks)
        if variant.noise:
            self.sampler = self.rollout.sampler = NoisySampler(self.model, self.chat.stop_id, variant.noise)
        experts = record_experts(self.chat, self.pool, tasks)
        measures = Measures(self, tasks)
        measures.test(0)
        imitated = round(variant.imitate * steps)
        if imitated:
            self.imitate(experts, imitated, measures)
        if imitated < steps:
            self.reinforce(experts, steps - imitated, peft, measures)
        return measures.rows

    def hard_task(self) -> list[Task]:
        """The first training task that the model after SFT never solves from the initial state, see `first_hard`.

        It is looked for once and kept beside the model: all variants of a seed train on the same task.
        """
        a = self.arguments
        tasks = self.train_tasks(CANDIDATES)
        wanted = [a.families, a.chunks, a.extra_turns, self.args.max_new_tokens, self.args.seed, self.job.backend]
        kept = self.job.model / f"hard-{digest(wanted)}.json"
        if not kept.exists():
            write_json(kept, {"index": self.first_hard(tasks)})
        return [tasks[json.loads(kept.read_text())["index"]]]

    def first_hard(self, tasks: Sequence[Task]) -> int:
        """Index of the first task unsolved in TRIES rollouts, at each of two temperatures. ConfigError: none is."""
        for index, task in enumerate(tasks):
            plans = None, SamplingParams(self.args.max_new_tokens)
            if not any(t.reward for params in plans for t in self.play([task] * TRIES, params)):
                return index
        raise ConfigError(
            f"--chunks {self.arguments.chunks}: none of {len(tasks)} tasks is hard for the model {self.job.model}"
        )

    def play(self, tasks: Sequence[Task], params: SamplingParams | None = None) -> list[Trajectory]:
        """Each once from its initial state, sampled as the paper evaluates unless said otherwise."""
        params = params or dataclasses.replace(PAPER_SAMPLING, max_new_tokens=self.args.max_new_tokens)
        return self.judge.collect([Start(task) for task in tasks], params, step=EVALUATION_STEP)

    def reinforce(self, experts: list[Expert], steps: int, peft: Any, measures: Measures) -> None:
        """The variant's trainer, from the present model."""
        config, kind = TRAINERS[self.job.variant.trainer]
        args = dataclasses.replace(self.args, max_steps=steps, output_dir=str(self.folder / "rl"), **self._derived())
        trainer = kind(self.model, args, self.rollout, experts, self.tokenizer, [measures], peft)
        quiet(trainer)
        measures.trainer = trainer
        with writing(self.folder):
            trainer.train()

    def imitate(self, experts: list[Expert], steps: int, measures: Measures) -> None:
        """SFT on the experts of the training tasks: as many whole trajectories a step as there are rollouts."""
        batch = self.args.generation_batch_size
        config = MaskedSFTConfig(
            output_dir=str(self.folder / "imitate"), max_steps=steps, learning_rate=self.args.learning_rate,
            per_device_train_batch_size=batch, seed=self.args.seed, lr_scheduler_type="constant", warmup_steps=0,
            adam_beta2=self.args.adam_beta2, logging_steps=1,
        )  # fmt: skip
        rows = [expert.trajectory for expert in experts] * -(-batch // len(experts))
        trainer = masked_sft_trainer(self.model, self.tokenizer, rows, config, MaskPolicy(), [measures])
        quiet(trainer)
        tokens = [sum(len(turn.ids) for turn in expert.trajectory.turns) for expert in experts]
        measures.trainer, measures.imitated_tokens = trainer, batch * sum(tokens) / len(tokens)
        trainer.train()
        measures.begin_again(steps)
        self._use(trainer.accelerator.unwrap_model(trainer.model))


class Measures(TrainerCallback):
    """Rows of the CSV: from the logs at every step, success from the initial state every few."""

    def __init__(self, arm: Arm, tasks: Sequence[Task]) -> None:
        self.arm, self.job, self.rows = arm, arm.job, list[Row]()
        self.trainer: Any = None
        self.repeated = [task for task in tasks for _ in range(self.job.repeats)]
        self.held_out = list[Task]()
        if self.job.held_out:
            a = arm.arguments
            self.held_out = make_tasks(a.families, a.chunks, self.job.held_out, "test", arm.args.seed)
        self.offset = 0
        self.spent = {"tokens": 0.0, "episodes": 0.0, "seconds": 0.0}  # on training
        self.imitated_tokens = 0.0  # a step, while experts are imitated
        self._seen: Any = None
        self._began = 0.0

    def begin_again(self, offset: int) -> None:
        """Another trainer goes on after this many steps."""
        self.offset, self.imitated_tokens, self.trainer = offset, 0.0, None

    def point(self, step: int, metric: str, value: float, task: str = "all") -> None:
        self.rows.append(Row(self.job.variant.name, str(self.job.seed), task, step, metric, float(f"{value:.5g}")))

    def on_step_begin(self, args, state, control, **kwargs):
        self._began = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs):
        step = self.offset + state.global_step
        self._spend()
        for metric, value in self.spent.items():
            self.point(step, metric, value)
        if step % self.job.every == 0 or step == self.job.steps:
            model = self.trainer.accelerator.unwrap_model(self.trainer.model)
            self.arm.judge.sampler.sync(model, version=step)
            self.test(step)
        self.arm.note(1)

    def on_log(self, args, state, control, logs=None, **kwargs):
        shown = {"success": "train_success", "start/mean": "start_position", "grad_norm": "grad_norm",
                 "ipa/masked_chunks": "masked_chunks"}  # fmt: skip
        for name, metric in shown.items():
            value = (logs or {}).get(name)
            if value is not None and value == value:  # NaN: nothing was counted
                self.point(self.offset + state.global_step, metric, float(value))

    def _spend(self) -> None:
        """Time, and what was trained on: policy tokens once per rollout, and the imitated ones of eq. 10."""
        self.spent["seconds"] += time.monotonic() - self._began
        if self.imitated_tokens:
            self.spent["tokens"] += self.imitated_tokens
            return
        samples = self.trainer._samples
        if samples is self._seen:  # another update on the same rollouts
            return
        self._seen = samples
        self.spent["episodes"] += len(samples)
        self.spent["tokens"] += sum(inside(sample.chunk_ids) for sample in samples)
        curriculum = self.trainer.curriculum
        self.spent["tokens"] += sum(inside(curriculum.expert_row(*fork).il_chunk_ids) for fork in curriculum.forks)

    def test(self, step: int) -> None:
        """Success from the initial state, per training task and per family of the held-out ones."""
        if not step:
            for metric in self.spent:
                self.point(0, metric, 0.0)
        for metric, tasks, name in (
            ("start_success", self.repeated, lambda task: task.name),
            ("test_success", self.held_out, lambda task: task.family),
        ):
            found: dict[str, list[float]] = defaultdict(list)
            played = [each for each in self.arm.play(tasks) if each.reward is not None] if tasks else []
            for trajectory in played:
                found[name(trajectory.task)].append(float(trajectory.reward == 1.0))
            for label, outcomes in place(found):
                self.point(step, metric, sum(outcomes) / len(outcomes), label)
            if played and played[0].honest is not None:
                for conduct, label, value in conduct_rows(played):
                    self.point(step, conduct, value, label)


def inside(chunk_ids: Iterable[int]) -> int:
    """Tokens that belong to a chunk."""
    return sum(chunk >= 0 for chunk in chunk_ids)


def place(found: Mapping[str, list[float]]) -> list[tuple[str, list[float]]]:
    """Tasks differ from seed to seed: they are numbered, so that seeds can be put side by side."""
    return [(f"task{index}", outcomes) for index, outcomes in enumerate(found.values())]

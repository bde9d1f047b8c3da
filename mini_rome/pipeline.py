"""The stages of a training run, which the recipe tells as a story: build, SFT, IPA, evaluate, report.

A `Run` owns what the stages share (folder, boxes, sampler, numbers so far) and cleans it up however the run ends.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from transformers import PreTrainedModel, set_seed

from mini_rome.arguments import RunArguments
from mini_rome.call_formats import chat_format
from mini_rome.config import IPAConfig
from mini_rome.context import ContextConfig
from mini_rome.curve import Curve
from mini_rome.data.demonstrations import expert_trajectories, make_tasks, record_experts
from mini_rome.episodes import EpisodeLog, Recorder
from mini_rome.errors import ConfigError
from mini_rome.evaluation.curve_figure import learning_curve
from mini_rome.evaluation.evaluate import evaluate
from mini_rome.evaluation.rows import COLUMNS
from mini_rome.events import event_line, event_rates
from mini_rome.experts import Expert
from mini_rome.launch import processes_line
from mini_rome.masks import MaskPolicy, masked_share
from mini_rome.model import build_model, build_tokenizer, load_model, weights_hash
from mini_rome.native import NativeRollout
from mini_rome.progress import Display, StopAfterStep, TrainingProgress, quiet, success_note, train_sft
from mini_rome.report import family_table, percent, success_table
from mini_rome.rollout import Rollout
from mini_rome.run_options import check_fit, check_same_options, live_lines, options_of, shared_out
from mini_rome.runs import (
    CURVE_CSV,
    CURVE_PNG,
    SAFETY_LOG,
    SUMMARY,
    checkpoint,
    provenance,
    run_folder,
    write_csv,
    write_json,
    writing,
)
from mini_rome.safety.golden import golden, soundly_judged
from mini_rome.safety.report import save_report
from mini_rome.sampler import make as make_sampler
from mini_rome.sampler.base import Sampler
from mini_rome.sampler.weights import base_model, host_weights
from mini_rome.sandbox import Pool, resolve
from mini_rome.sandbox.safety import EventLog
from mini_rome.sft import MaskedSFTConfig, masked_sft_trainer, micro_batches, trained
from mini_rome.timeline import recorded, way_of
from mini_rome.trainer import IPATrainer, last_checkpoint
from mini_rome.types import Split, Task

STATE = "state.json"  # numbers of the stages done so far, for --resume


class Run:
    """One run: a context manager whose methods are the stages."""

    def __init__(
        self, arguments: RunArguments, args: IPAConfig, kind: str = "ipa", context_length: int = 4096
    ) -> None:
        """context_length: tokens of the longest episode that a vLLM sampler has room for."""
        self.arguments, self.args, self.kind, self.context_length = arguments, args, kind, context_length
        self.ranks = PartialState(cpu=args.use_cpu)
        self.display = Display(self.ranks.is_main_process)
        self.begun = time.monotonic()
        self.rows: list[dict[str, Any]] = []
        self.success: dict[str, dict[str, Any]] = {}
        self.weights: dict[str, str] = {}  # sha256 of each saved model
        self.minutes = 0.0  # of earlier sessions of a resumed run, as is the next
        self.episodes = 0
        self._running: Sampler | None = None  # the sampler of the model before, whose engine may serve the next
        check_fit(arguments, args)

    def __enter__(self) -> Run:
        set_seed(self.args.seed)
        backend, why = resolve(self.arguments.sandbox)
        self.display.line(why)
        self.pool = Pool(backend, size=self.arguments.boxes_on(backend))
        with ExitStack() as undo:
            undo.callback(self.pool.close)
            with self.pool.box():  # an image that is missing is said before anything is written
                self._open_folder()
            undo.pop_all()
        self.pool.event_log = EventLog(self.folder / SAFETY_LOG, self.folder.name)
        self.kept = EpisodeLog(self.folder, self.arguments.keep_episodes, self.ranks.process_index)
        self.display.line(f"run: {self.folder}")
        if self.arguments.agent == "native":
            where = "in its box, which has the model proxy's socket" if self.profile == "native" else "beside the box"
            self.display.line(f"agent: native, {where} (sandbox profile: {self.profile})")
        if (told := processes_line(self.ranks.num_processes, os.environ)) is not None:
            self.display.line(told)
        for line in live_lines(self.arguments, self.args) if self.kind == "ipa" else ():
            self.display.line(line)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.pool.close()
        if isinstance(error, KeyboardInterrupt):
            again = shlex.join([*sys.argv, "--resume", str(self.folder)])  # the same options, or it is another run
            self.display.line(f"stopped; go on with: python {again}")

    # Set-up

    def _open_folder(self) -> None:
        """Make or find the run's folder, the same on all ranks; a resumed run brings its numbers."""
        chosen: list[Any] = [None]
        if self.ranks.is_main_process:
            if self.arguments.resume is not None:
                folder = Path(self.arguments.resume).resolve()
                if not (folder / STATE).exists():
                    raise ConfigError(f"--resume {self.arguments.resume}: no {STATE} there, so no run to go on with")
                chosen = [str(folder)]
            else:
                chosen = [str(run_folder(self.args.output_dir, self.kind))]
        broadcast_object_list(chosen)
        self.folder = Path(chosen[0])
        if self.arguments.resume is None:
            self.save_state()  # from now on the run can be resumed
        else:
            state = json.loads((self.folder / STATE).read_text())
            check_same_options(self.arguments, self.args, state["options"])
            self.rows, self.success, self.weights = state["rows"], state["success"], state["weights"]
            self.minutes, self.episodes = state["minutes"], state["episodes"]

    def tasks(self, split: Split, chunks: list[int]) -> list[Task]:
        """Held-out tasks of these horizons."""
        return make_tasks(self.arguments.families, chunks, self.arguments.eval_tasks, split, self.args.seed)

    @property
    def needs_sft(self) -> bool:
        """Whether IPA starts from a model that this run must make first."""
        return self.arguments.model is None and not (self.folder / "sft").exists()

    def build_model(self) -> None:
        """The model that the stages train: given, this run's own after SFT, or a new tiny one."""
        if self.arguments.model is not None:
            self.load_model(str(checkpoint(self.arguments.model)))
        elif not self.needs_sft:
            self.load_model("sft")
        else:
            self.tokenizer = build_tokenizer(self.arguments.families)
            self._use(build_model(self.tokenizer, self.args.seed))

    def load_model(self, name: str) -> None:
        """A saved model: a folder, or one of this run's stages."""
        path = self.folder / name if (self.folder / name).exists() else Path(name)
        model, self.tokenizer = load_model(path)
        self._use(model)

    def _use(self, model: PreTrainedModel) -> None:
        self.model = model
        self.chat = chat_format(self.tokenizer, self.arguments.call_format)
        dtype = getattr(torch, self.arguments.sampler_dtype) if self.arguments.sampler_dtype else None
        name, url = self.arguments.sampler, self.arguments.sampler_url
        self.sampler = make_sampler(
            name, model, self.chat.stop_id, dtype, url=url, running=self._running, sleeps=self.args.multiplex,
            max_model_len=self.context_length,
        )  # fmt: skip
        self._running = self.sampler
        self.rollout = self._rollout_kind()(
            self.chat, self.sampler, self.pool, seed=self.args.seed, extra_turns=self.arguments.extra_turns,
            context=ContextConfig.of(self.arguments.context),
        )  # fmt: skip

    @property
    def profile(self) -> str:
        """The profile of the boxes that agents act in; `native` is the one with a bind, the model proxy's socket."""
        if self.pool.backend == "sim":
            return "simulated"
        return "native" if self.arguments.agent == "native" else "agent"

    def _rollout_kind(self) -> type[Rollout]:
        if self.arguments.agent == "builtin":
            return Rollout
        if self.profile != "native":
            return NativeRollout
        from mini_rome.native_box import BoxedRollout  # with it the Docker SDK, which is not for sim

        return BoxedRollout

    def save_model(self, name: str) -> None:
        """Write the model, an adapter merged, and its tokenizer into the run's folder."""
        weights = host_weights(self.model, self.ranks.is_main_process)
        if self.ranks.is_main_process:
            model = base_model(self.model)
            weights = {key: weight.to(model.dtype) for key, weight in weights.items()}
            with writing(self.folder / name):
                model.save_pretrained(self.folder / name, state_dict=weights)
                self.tokenizer.save_pretrained(self.folder / name)
            self.weights[name] = weights_hash(weights)
            self.display.line(f"weights ({name}): sha256 {self.weights[name]}")
        self.save_state()
        self.ranks.wait_for_everyone()

    # Stages

    def sft(self, peft_config: Any = None) -> None:
        """Masked SFT on short tasks, mistakes and recoveries in the trajectories; an adapter is merged at the end."""
        a = self.arguments
        if a.sampler == "vllm-adapters" and (peft_config is None or not shared_out()):
            raise ConfigError(
                "--sampler vllm-adapters: SFT changes the model's own weights (without FSDP it merges its adapter), "
                "which this server is never sent; use vllm-server"
            )
        tasks = make_tasks(a.families, a.sft_chunks, a.sft_tasks, "train", self.args.seed)
        with self.display.stage("expert trajectories", len(tasks)) as update:
            trajectories = expert_trajectories(
                self.chat, self.pool, tasks, a.mistake_rate, self.args.seed, update, a.shortcut_rate
            )
        if a.golden:
            trajectories, left_out = golden(trajectories)
            self.display.line(f"golden: {left_out} demonstrations left out for their conduct")
        policy = MaskPolicy()
        shares = ", ".join(f"{cause} {share:.1%}" for cause, share in masked_share(trajectories, policy).items())
        self.display.line(f"masked tokens by cause: {shares or 'none'}")
        config = MaskedSFTConfig(
            output_dir=str(self.folder / "sft-trainer"),
            max_steps=a.sft_steps,
            learning_rate=a.sft_learning_rate,
            **micro_batches(a.sft_batch_size, a.sft_micro_batch),
            bf16=self.args.bf16,
            gradient_checkpointing=self.args.gradient_checkpointing,
            seed=self.args.seed,
        )
        trainer = masked_sft_trainer(self.model, self.tokenizer, trajectories, config, policy, None, peft_config)
        train_sft(trainer, self.display, "SFT")
        self._use(trained(trainer))

    def train_tasks(self, count: int) -> list[Task]:
        """Tasks that IPA trains on. Their seeds are apart from those of SFT, so that none of them was imitated."""
        a = self.arguments
        tasks = make_tasks(a.families, a.chunks, count, "train", self.args.seed + 500_000)
        return soundly_judged(tasks) if a.honest_verifier else tasks

    def experts(self) -> list[Expert]:
        """One verified expert per training task, with the state before each of its chunks."""
        return record_experts(self.chat, self.pool, self.train_tasks(self.arguments.train_tasks))

    def train_ipa(self, variant: str, experts: list[Expert], peft_config: Any, **changes: Any) -> None:
        """IPA from the present model; `changes` are options of this arm."""
        if self.arguments.sampler == "vllm-adapters" and peft_config is None:
            raise ConfigError("--sampler vllm-adapters: only an adapter is sent: add --use_peft, or use vllm-server")
        folder = self.folder / variant
        args = dataclasses.replace(self.args, output_dir=str(folder), **self._derived(), **changes)
        stop = StopAfterStep(self.display, args.save_strategy != "no")
        trainer = IPATrainer(
            self.model, args, self.rollout, experts, self.tokenizer, callbacks=[stop], peft_config=peft_config
        )
        quiet(trainer)
        trainer.add_callback(Curve(self, trainer, variant))
        if self.arguments.keep_episodes:
            trainer.recorder = Recorder(self.kept, self.chat, variant, args)
            trainer.add_callback(trainer.recorder)
        newest = last_checkpoint(folder) if self.arguments.resume is not None else None
        with self.display.stage(f"IPA ({variant})", args.max_steps) as update, stop.armed(), writing(folder):
            trainer.add_callback(TrainingProgress(update, success_note))
            timed = self.arguments.timeline and variant == "ipa" and self.ranks.is_main_process
            way, facts = way_of(args.async_ratio, args.multiplex), {"steps": args.max_steps}
            facts |= provenance(self.pool.backend, self.arguments.sampler, args.seed)
            with recorded(self.folder if timed else None, way, facts):
                trainer.train(resume_from_checkpoint=str(newest) if newest else None)
        self.model = trainer.accelerator.unwrap_model(trainer.model)
        self.sampler.sync(self.model, version=trainer.state.global_step)

    @staticmethod
    def _derived() -> dict[str, Any]:
        """Fields that the configuration computes and that must be computed again for a copy of it."""
        return {"generation_batch_size": None}  # steps_per_generation stays, and gives it

    def evaluate(self, stage: str, tasks: list[Task], chunks: list[int] | None = None) -> None:
        """Success on held-out tasks (of these horizons) from the initial state, kept for the report."""
        if stage in self.success:
            return
        with self.display.stage(f"evaluation ({stage})", len(tasks)) as update:
            result = evaluate(
                self.rollout, tasks, rank=self.ranks.process_index, ranks=self.ranks.num_processes, progress=update,
                keep=self.kept.evaluation(self.chat, stage),
            )  # fmt: skip
        summary = {**result.summary(), "chunks": chunks or self.arguments.chunks}
        self.success[stage] = summary
        self.display.line(f"success {stage}: {percent(summary)}")
        self.save_state()

    # Results

    def point(self, variant: str, step: int, metric: str, value: float) -> None:
        """One row of the curve."""
        row = dict(zip(COLUMNS, (variant, self.args.seed, "all", step, metric, value), strict=True))
        self.rows = [r for r in self.rows if [r[c] for c in COLUMNS[:5]] != [row[c] for c in COLUMNS[:5]]] + [row]

    def save_state(self) -> None:
        episodes = self._episodes()
        if self.ranks.is_main_process:
            minutes = self.minutes + (time.monotonic() - self.begun) / 60
            state = {"rows": self.rows, "success": self.success, "weights": self.weights, "minutes": minutes}
            options = options_of(self.arguments, self.args)
            write_json(self.folder / STATE, {**state, "episodes": episodes, "options": options})

    def _episodes(self) -> int:
        """Boxes taken so far, on all ranks and in all sessions of this run."""
        return self.episodes + sum(gather_object([self.pool.taken]))

    def report(self) -> None:
        """summary.json, curve.csv, curve.png and the table."""
        safety = event_rates(self.folder / SAFETY_LOG, self._episodes())
        if not self.ranks.is_main_process:
            return
        minutes = self.minutes + (time.monotonic() - self.begun) / 60
        summary = {
            **provenance(self.pool.backend, self.arguments.sampler, self.args.seed),
            "profile": self.profile,
            "processes": self.ranks.num_processes,
            "chunks": self.arguments.chunks,
            "sft_chunks": self.arguments.sft_chunks,
            "success": self.success,
            "steps": self.args.max_steps,
            "minutes": round(minutes, 2),
            "seconds": self.display.seconds,
            "infra": dict(self.rollout.infra),
            "safety": safety,
            "pi_old_source": self.args.pi_old_source,
            "weights": self.weights,
            "options": options_of(self.arguments, self.args),
        }
        write_json(self.folder / SUMMARY, summary)
        self.rows.sort(key=lambda row: (row["variant"], row["step"], row["metric"]))
        write_csv(self.folder / CURVE_CSV, self.rows, COLUMNS)
        self.display.console.print(success_table(self.success, self.pool.backend, self.args.seed, minutes))
        if len(self.arguments.families) > 1:
            self.display.console.print(family_table(self.success, self.arguments.families))
        self.display.line(event_line(safety))
        self.display.line(f"conduct: {save_report(self.folder)}, shown by: mini-rome safety report {self.folder}")
        if any(row["metric"] == "test_success" for row in self.rows):
            learning_curve(self.folder / CURVE_CSV, self.folder / SUMMARY, self.folder / CURVE_PNG)
            self.display.line(f"figure: {self.folder / CURVE_PNG}")

"""IPA on top of TRL's GRPOTrainer. The only changes are:

1. rollouts come from `rollout.py`, one packed sample per trajectory, with chunk ids recorded and not inferred; an
   episode of several linear contexts is one sample too, each context with a forward of its own (`layout.py`);
2. rewards stay raw: no group mean, no standard deviation, no whitening; None masks the row everywhere;
3. the weight of a token is its chunk's return G_k (eq. 7) instead of an advantage;
4. the loss is eq. 9 (or an ablation of it, `objective`), plus the imitation term of eq. 10 where asked for;
5. start states are chosen by chunk-level initialised resampling and advance after the optimiser step.

Switched off, though GRPOTrainer does them by default: advantage normalisation, ratio clipping around 1, the
1/|sequence| normalisation, TRL's own tool loop, its importance-sampling correction and its generation. There is no
critic and no entropy term; a KL to the reference exists only if `beta` is set (not in the paper).

With async_ratio the rollouts of later steps are drawn while the model trains (`ahead.py`).

A stopped run goes on exactly: a checkpoint holds, beside what the Trainer saves, the curriculum and the rollouts not
yet used up. With logging_steps above 1 the log line that a stop falls into averages only what came after it.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, set_seed

from mini_rome.chunking import OUTSIDE
from mini_rome.collect import AroundStep, CollectingTrainer
from mini_rome.config import IPAConfig
from mini_rome.credit import chunk_returns
from mini_rome.curriculum import Curriculum
from mini_rome.errors import ConfigError
from mini_rome.experts import Expert
from mini_rome.layout import Rows, score, sorted_by_length
from mini_rome.loss import count_items, imitation_loss, ipa_loss
from mini_rome.metrics import loss_row, step_metrics
from mini_rome.rollout import Progress, Rollout
from mini_rome.runs import write_json

STATE = "ipa_state.json"  # written last into a checkpoint: its presence says that the checkpoint is whole
ROLLOUTS = "ipa_rollouts_{}.pt"  # per rank, where a checkpoint falls between two updates on one batch


def last_checkpoint(folder: str | Path) -> Path | None:
    """The newest whole checkpoint in a folder; one that was cut short while it was written does not count."""
    whole = [path.parent for path in Path(folder).glob(f"checkpoint-*/{STATE}")]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


class IPATrainer(CollectingTrainer):
    """Interaction-Perceptive Agentic policy optimisation; the module docstring lists what differs from GRPO."""

    _tag_names = ["trl", "ipa"]
    _buffered_inputs: list[Rows]  # of the base class: the micro-batches of the rollouts at hand

    def __init__(
        self,
        model: PreTrainedModel,
        args: IPAConfig,
        rollout: Rollout,
        experts: list[Expert],
        processing_class: PreTrainedTokenizerBase,
        callbacks: list[TrainerCallback] | None = None,
        peft_config: Any = None,
        progress: Progress | None = None,
    ) -> None:
        """experts: one verified trajectory per training task. progress(done, total) is told of finished episodes."""
        if args.beta and peft_config is None and not model.config.name_or_path:
            raise ConfigError(f"--beta {args.beta}: the reference policy needs --use_peft or a saved --model.")
        self._set_up_rollouts(model, args, rollout, Curriculum(args, experts, rollout.chat, rollout.pool), progress)
        self._loss_rows: list[Tensor] = []
        # A batch with room for more tasks than there are takes them again; fewer would leave it empty.
        copies = max(1, args.generation_batch_size // args.num_generations // len(experts))
        set_seed(args.seed)  # an adapter is drawn by the base class, before it sets the seed itself
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You are using 'rollout_func'")  # experimental: TRL is pinned for it
            super().__init__(
                model=model,
                reward_funcs=_recorded_reward,
                args=args,
                train_dataset=Dataset.from_list([{"prompt": name} for name in self.curriculum.experts] * copies),
                processing_class=processing_class,
                callbacks=[AroundStep(self), *(callbacks or [])],
                peft_config=peft_config,
                rollout_func=lambda prompts, trainer: trainer.collect(prompts),
            )

    # Scoring

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list) -> Tensor:
        return self.accelerator.gather(self._rewards.unsqueeze(1))

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Rows:
        output = super()._generate_and_score_completions(inputs)
        output["chunk_ids"] = self._column([s.chunk_ids for s in self._samples], OUTSIDE)  # (B, T)
        output |= self._contexts(self._samples)
        output["row"] = torch.arange(len(self._samples), device=self._rewards.device)  # (B,), as collected
        if output["chunk_ids"].shape != output["completion_ids"].shape:
            raise ValueError("a rollout's chunk ids and completion ids differ in length")
        # NaN (unscorable) stays NaN: only a real failure becomes the failure reward.
        rewards = torch.where(self._rewards == 0, self.args.failure_reward, self._rewards)
        rewards = rewards - self.args.conduct_penalty * self._misconduct
        output["rewards"] = rewards.masked_fill(self._left_out, float("nan"))  # (B,)
        output["advantages"] = chunk_returns(output["chunk_ids"], output["rewards"], self.args.gamma)  # (B, T)
        if self.args.pi_old_source == "sampler":
            output["old_per_token_logps"] = output["sampling_per_token_logps"]
        elif self._old_logps is not None:
            output["old_per_token_logps"] = self._column(self._old_logps, 0.0)
        return output

    def _prepare_inputs(self, generation_batch):
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is not before:
            self._arrange_windows()
            self._begin_ahead()
            inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        self.device.take()
        return inputs

    def _arrange_windows(self) -> None:
        """Once per batch of rollouts: like lengths into one micro-batch, and N of each optimiser step over all ranks.

        Rows change place only within one optimiser step, which sums over them: its gradient stays the same.
        """
        window, parts = self.args.gradient_accumulation_steps, self._buffered_inputs
        steps = [sorted_by_length(parts[first : first + window]) for first in range(0, len(parts), window)]
        counts = [[count_items(p["chunk_ids"], p["rewards"], self.args.aggregation) for p in step] for step in steps]
        local = torch.stack([torch.stack(row).sum() for row in counts])
        items = self.accelerator.reduce(local.float(), reduction="sum")
        for step, count in zip(steps, items, strict=True):
            for part in step:
                # Gradients are averaged over ranks, so each divides by its share of the global count.
                part["num_items"] = count.clamp(min=1) / self.accelerator.num_processes
        self._buffered_inputs = [part for step in steps for part in step]

    # Loss

    def _compute_loss(self, model, inputs: Rows) -> Tensor:
        args = self.args
        imitated = self._imitated_rows()
        # One forward for both: under DDP every rank must call the model equally often.
        extra = {"output_router_logits": True} if self.aux_loss_enabled else {}
        with self.accelerator.autocast():
            (logps, *expert_logps), forward = score(model, [inputs, imitated] if imitated else [inputs], **extra)
        output = ipa_loss(
            logps,
            inputs.get("old_per_token_logps", logps.detach()),
            inputs["sampling_per_token_logps"],
            inputs["chunk_ids"],
            inputs["advantages"],
            inputs["rewards"],
            ratio_level=args.ratio_level,
            mask_level=args.mask_level,
            mismatch_threshold=args.mismatch_threshold,
            aggregation=args.aggregation,
            num_items=inputs["num_items"],
            positive_ratio=args.positive_ratio,
        )
        if self.recorder is not None:
            self.recorder.score(inputs, logps)
        loss, mass = args.lambda_rl * output.loss, 0.0
        if imitated:
            ids, returns, items = imitated["chunk_ids"], imitated["returns"], imitated["num_items"]
            term = imitation_loss(expert_logps[0], ids, returns, aggregation=args.aggregation, num_items=items)
            loss = loss + args.lambda_il * term
            mass = args.lambda_il * returns.abs().sum() / (1 if args.aggregation == "sum" else items)
        if self.beta:
            loss = loss + self.beta * self._kl(logps, inputs)
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * forward.aux_loss / self.current_gradient_accumulation_steps
        scale = args.lambda_rl / (1 if args.aggregation == "sum" else inputs["num_items"])
        self._loss_rows.append(loss_row(output, scale, mass))
        return loss

    def _imitated_rows(self) -> Rows | None:
        """Expert rows c*_1..c*_f that fall to this micro-batch: each fork is imitated once per batch of rollouts."""
        ranks, steps, window = (
            self.accelerator.num_processes, self.args.steps_per_generation, self.args.gradient_accumulation_steps
        )  # fmt: skip
        place = (self.accelerator.process_index, self._step % steps)
        mine, together = self.curriculum.rows_at(place, ranks, steps, window)
        if not mine:
            return None
        rows = [self.curriculum.expert_row(*fork) for fork in mine]
        laid_out = self._rows(rows, [row.il_chunk_ids for row in rows])
        ids = laid_out["chunk_ids"]
        chunks = torch.tensor([self.curriculum.experts[name].chunks for name, _ in mine], device=ids.device)
        together_ids = self._column([self.curriculum.expert_row(*fork).il_chunk_ids for fork in together], OUTSIDE)
        items = count_items(together_ids, torch.ones(len(together), device=ids.device), self.args.aggregation)
        returns = chunk_returns(ids, torch.ones(len(ids), device=ids.device), self.args.gamma, chunks)
        return {**laid_out, "returns": returns, "num_items": items / ranks}

    def _kl(self, logps: Tensor, inputs: Rows) -> Tensor:
        """Estimate of the KL to the reference policy over the tokens in the loss (not in the paper)."""
        inside = (inputs["chunk_ids"] >= 0) & torch.isfinite(inputs["rewards"])[:, None]
        gap = torch.where(inside, inputs["ref_per_token_logps"] - logps, 0.0)
        return (gap.exp() - gap - 1).sum() / inputs["num_items"]

    # State

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self._loss_rows:
            rows = self.accelerator.gather(torch.stack(self._loss_rows))
            for name, value in step_metrics(rows).items():
                self._metrics["train"][f"ipa/{name}"].append(value)
            self._loss_rows = []
        super().log(logs, start_time)

    def _save_checkpoint(self, model, trial) -> None:
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            (folder / STATE).unlink(missing_ok=True)
        super()._save_checkpoint(model, trial)
        if self._step % (self.args.steps_per_generation * self.num_iterations):
            torch.save(self._buffered_inputs, folder / ROLLOUTS.format(self.accelerator.process_index))
        if self.args.async_ratio:
            self.ahead.save(folder, self.accelerator.process_index)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            state = {
                "processes": self.accelerator.num_processes,
                "micro_steps": self._step,
                "curriculum": self.curriculum.state_dict(),
                "episodes": self.rollout.episodes,
                "infra": self.rollout.infra,
            }
            write_json(folder / STATE, state)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None) -> None:
        folder, ranks = Path(resume_from_checkpoint), self.accelerator.num_processes
        if isinstance(self.model, PeftModel) or self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            # The base class loads by name, but the experts of a Mixture of Experts have other names in the file than
            # in memory: it would leave them as they are, with no more than a warning.
            saved = type(self.model).from_pretrained(folder, dtype=self.model.dtype)
            self.model.load_state_dict(saved.state_dict())
        state = json.loads((folder / STATE).read_text())
        if state["processes"] != ranks:
            raise ConfigError(f"{folder}: written by {state['processes']} processes, resume with as many")
        self.curriculum.load_state_dict(state["curriculum"])
        self.rollout.episodes, self.rollout.infra = state["episodes"], Counter(state["infra"])
        self._step = state["micro_steps"]
        if self.args.async_ratio:
            tasks = {name: expert.trajectory.task for name, expert in self.curriculum.experts.items()}
            self.ahead.load(folder, self.accelerator.process_index, tasks)
        rollouts = folder / ROLLOUTS.format(self.accelerator.process_index)
        if self._step % (self.args.steps_per_generation * self.num_iterations):
            self._buffered_inputs = torch.load(rollouts, map_location=self.accelerator.device, weights_only=True)


def _recorded_reward(**_: Any) -> list[float]:
    """Never called: rewards are recorded with the rollouts. TRL wants a reward function to name the metric by."""
    raise AssertionError("rewards come from the rollouts")

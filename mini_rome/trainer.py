"""IPA on top of TRL's GRPOTrainer. The only changes are:

1. rollouts come from `rollout.py`, one packed sample per trajectory, with chunk ids recorded and not inferred;
2. rewards stay raw: no group mean, no standard deviation, no whitening; None masks the row everywhere;
3. the weight of a token is its chunk's return G_k (eq. 7) instead of an advantage;
4. the loss is eq. 9 (or an ablation of it, `objective`), plus the imitation term of eq. 10 where asked for;
5. start states are chosen by chunk-level initialised resampling and advance after the optimiser step.

Switched off, though GRPOTrainer does them by default: advantage normalisation, ratio clipping around 1, the
1/|sequence| normalisation, TRL's own tool loop, its importance-sampling correction and its generation. There is no
critic and no entropy term; a KL to the reference exists only if `beta` is set (not in the paper).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from trl import GRPOTrainer
from trl.trainer.utils import pad

from mini_rome.chunking import PackedSample, pack
from mini_rome.config import IPAConfig
from mini_rome.credit import chunk_returns
from mini_rome.experts import Expert, Start, play
from mini_rome.loss import count_items, imitation_loss, ipa_loss, merge_metrics
from mini_rome.resample import Both, Initial, ParallelInit, SequentialRollback, failed_forks, refreshed_expert
from mini_rome.rollout import Progress, Rollout
from mini_rome.runs import write_json
from mini_rome.sampler.base import SamplingParams
from mini_rome.types import Trajectory

STATE = "ipa_state.json"  # written last into a checkpoint: its presence says that the checkpoint is whole


def build_resampler(args: IPAConfig, chunks: dict[str, int]) -> Initial:
    """The start-state chooser that `args.resampling` names."""
    rollback = SequentialRollback(chunks, args.rollback_threshold, args.rollback_window)
    parallel = ParallelInit(chunks, args.anchors, args.anchor_mode, args.seed)
    return {"none": Initial(chunks), "rollback": rollback, "parallel": parallel, "both": Both(rollback, parallel)}[
        args.resampling
    ]


def last_checkpoint(folder: str | Path) -> Path | None:
    """The newest whole checkpoint in a folder; one that was cut short while it was written does not count."""
    whole = [path.parent for path in Path(folder).glob(f"checkpoint-*/{STATE}")]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


class _AfterStep(TrainerCallback):
    """Calls the trainer's `advance` once the optimiser has stepped."""

    def __init__(self, advance: Callable[[], None]) -> None:
        self.advance = advance

    def on_step_end(self, args, state, control, **kwargs):
        self.advance()


class IPATrainer(GRPOTrainer):
    """Interaction-Perceptive Policy optimisation at the level of chunks; see the module docstring for what differs."""

    _tag_names = ["trl", "ipa"]

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
        self.rollout = rollout
        self.experts = {expert.trajectory.task.name: expert for expert in experts}
        self.resampler = build_resampler(args, {name: expert.chunks for name, expert in self.experts.items()})
        self.progress = progress
        self._rows: list[PackedSample] = []  # of the batch being scored, in the order of its rows
        self._rewards: list[float] = []
        self._imitate: list[tuple[str, int]] = []  # this rank's forks to imitate, for the steps on this batch
        self._results: list[tuple[str, int, bool | None]] = []  # of all ranks, waiting for the optimiser step
        self._shorter: list[Trajectory] = []
        self._loss_metrics: list[Tensor] = []
        super().__init__(
            model=model,
            reward_funcs=_recorded_reward,
            args=args,
            train_dataset=Dataset.from_list([{"prompt": name} for name in self.experts]),
            processing_class=processing_class,
            callbacks=[_AfterStep(self._advance), *(callbacks or [])],
            peft_config=peft_config,
            rollout_func=lambda prompts, trainer: trainer.collect(prompts),
        )

    # Rollouts

    def plan(self, prompts: list[str]) -> tuple[list[Start], int]:
        """This rank's start states, and the number of its first episode in the whole step's plan.

        The plan is made for all ranks from (task, step) and gathered results, then cut: no rank's share depends on it.
        """
        whole = gather_object(prompts)
        positions: dict[str, list[int]] = {}
        for name in dict.fromkeys(whole):
            positions[name] = self.resampler.positions(name, self.state.global_step, whole.count(name))
        starts = [self.experts[name].start(positions[name].pop(0)) for name in whole]
        first = self.accelerator.process_index * len(prompts)
        return starts[first : first + len(prompts)], first

    def collect(self, prompts: list[str]) -> dict[str, list]:
        """Sync the sampler, run one episode per prompt (a task's name), and pack one row per trajectory."""
        sampler = self.rollout.sampler
        sampler.sync(self.accelerator.unwrap_model(self.model), version=self.state.global_step)
        starts, first = self.plan(prompts)
        trajectories = self.rollout.collect(
            starts,
            SamplingParams(max_new_tokens=self.args.max_new_tokens),
            step=self.state.global_step,
            first_episode=first,
            progress=self.progress,
        )
        self._rows = [self._pack(trajectory) for trajectory in trajectories]
        self._rewards = [float("nan") if t.reward is None else t.reward for t in trajectories]
        self._note(trajectories)
        return {
            "prompt_ids": [row.prompt_ids for row in self._rows],
            "completion_ids": [row.completion_ids for row in self._rows],
            "logprobs": [row.logprobs for row in self._rows],
            "env_mask": [row.env_mask for row in self._rows],
        }

    def _pack(self, trajectory: Trajectory) -> PackedSample:
        row = pack(trajectory)
        if not row.completion_ids:  # spoiled before the first response: a row of one masked token
            stop = self.rollout.chat.stop_id
            return PackedSample(row.prompt_ids, [stop], [0.0], [0], [-1], [-1])
        return row

    def _note(self, trajectories: list[Trajectory]) -> None:
        """Gather what start states, experts and logs need to know of this batch."""
        local = [
            (t.task.name, t.start, None if t.reward is None else t.reward == 1.0, len(t.policy_turns), t.reason)
            for t in trajectories
        ]
        everyone = gather_object(local)
        self._results = [(name, start, success) for name, start, success, _, _ in everyone]
        short = [t for t in trajectories if t.reward == 1.0 and len(t.turns) < self.experts[t.task.name].chunks]
        self._shorter += gather_object(short)
        self._imitate = self._forks_to_imitate()
        metrics = self._metrics["train"]
        scored = [success for _, _, success in self._results if success is not None]
        metrics["success"].append(sum(scored) / len(scored) if scored else float("nan"))
        starts = [start for _, start, _ in self._results]
        metrics["start/mean"].append(sum(starts) / len(starts))
        metrics["start/min"].append(float(min(starts)))
        metrics["infra/unscored"].append(float(len(starts) - len(scored)))
        by_start: dict[int, list[bool]] = defaultdict(list)
        for _, start, success in self._results:
            if success is not None:
                by_start[start].append(success)
        for start, outcomes in sorted(by_start.items()):
            metrics[f"success/p{start}"].append(sum(outcomes) / len(outcomes))

    def _forks_to_imitate(self) -> list[tuple[str, int]]:
        if self.args.il_when == "never":
            return []
        started = sorted({(name, start) for name, start, _ in self._results})
        forks = started if self.args.il_when == "always" else failed_forks(self._results)
        return forks[self.accelerator.process_index :: self.accelerator.num_processes]

    # Scoring

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list) -> Tensor:
        rewards = torch.tensor(self._rewards, dtype=torch.float32, device=self.accelerator.device)
        return self.accelerator.gather(rewards.unsqueeze(1))

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Tensor]:
        output = super()._generate_and_score_completions(inputs)
        device = self.accelerator.device
        chunk_ids = [torch.tensor(row.chunk_ids) for row in self._rows]
        output["chunk_ids"] = pad(chunk_ids, padding_value=-1, padding_side="right").to(device)  # (B, T)
        if output["chunk_ids"].shape != output["completion_ids"].shape:
            raise ValueError("a rollout's chunk ids and completion ids differ in length")
        rewards = torch.tensor(self._rewards, dtype=torch.float32, device=device)
        # NaN (unscorable) stays NaN: only a real failure becomes the failure reward.
        output["rewards"] = torch.where(rewards == 0, self.args.failure_reward, rewards)  # (B,)
        output["advantages"] = chunk_returns(output["chunk_ids"], output["rewards"], self.args.gamma)  # (B, T)
        if self.args.pi_old_source == "sampler":
            output["old_per_token_logps"] = output["sampling_per_token_logps"]
        return output

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        if self.model.training:
            window = self.args.gradient_accumulation_steps
            first = self._step % self.args.steps_per_generation // window * window
            parts = self._buffered_inputs[first : first + window]
            local = sum(count_items(part["chunk_ids"], part["rewards"], self.args.aggregation) for part in parts)
            items = self.accelerator.reduce(local.float(), reduction="sum")
            # Gradients are averaged over ranks, so each divides by its share of the global count.
            inputs["num_items"] = items / self.accelerator.num_processes
        return inputs

    # Loss

    def _compute_loss(self, model, inputs: dict[str, Tensor]) -> Tensor:
        imitation = self._imitation_rows()
        logps, aux_loss = self._score(model, inputs)
        old_logps = inputs.get("old_per_token_logps")
        output = ipa_loss(
            logps,
            logps.detach() if old_logps is None else old_logps,
            inputs["sampling_per_token_logps"],
            inputs["chunk_ids"],
            inputs["advantages"],
            inputs["rewards"],
            ratio_level=self.args.ratio_level,
            mask_level=self.args.mask_level,
            mismatch_threshold=self.args.mismatch_threshold,
            aggregation=self.args.aggregation,
            num_items=inputs.get("num_items"),
            positive_ratio=self.args.positive_ratio,
        )
        self._loss_metrics.append(torch.stack(list(output.metrics.values())))
        loss = self.args.lambda_rl * output.loss
        if imitation is not None:
            loss = loss + self.args.lambda_il * self._imitation(model, imitation)
        if self.beta:
            loss = loss + self.beta * self._kl(logps, inputs)
        if aux_loss is not None:
            loss = loss + self.router_aux_loss_coef * aux_loss / self.current_gradient_accumulation_steps
        return loss

    def _score(self, model, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """log pi_theta of the completion tokens (B, T), computed only where a token is in the loss; router aux loss."""
        scored = inputs["chunk_ids"] >= 0
        input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        width = inputs["completion_ids"].size(1)
        labels = torch.full_like(input_ids, -100)
        labels[:, -width:] = torch.where(scored, inputs["completion_ids"], -100)
        extra = {"output_router_logits": True} if self.aux_loss_enabled else {}
        with self.accelerator.autocast():
            output = model(
                input_ids=input_ids, attention_mask=attention_mask, labels=labels, fused_lm_head=True, **extra
            )
        return output.log_probs[:, -width:], output.aux_loss if self.aux_loss_enabled else None

    def _imitation_rows(self) -> dict[str, Tensor] | None:
        """Expert rows c*_1..c*_f of the forks to imitate, shared out over the micro-batches of the step."""
        window = self.args.gradient_accumulation_steps
        mine = self._imitate[self._step % window :: window] if self.model.training else []
        if not mine:
            return None
        rows, returns = [], []
        for name, start in mine:
            expert = self.experts[name]
            turns = expert.trajectory.turns[: start + 1]
            whole = Trajectory(expert.trajectory.task, expert.trajectory.prompt_ids, turns, start=len(turns))
            rows.append(pack(whole, prefix="completion"))
            ids = torch.tensor([rows[-1].il_chunk_ids])
            returns.append(chunk_returns(ids, torch.ones(1), self.args.gamma, num_chunks=expert.chunks)[0])
        device, filler = self.accelerator.device, self.processing_class.pad_token_id

        def column(values: list[Tensor], padding: float, side: str = "right") -> Tensor:
            return pad(values, padding_value=padding, padding_side=side).to(device)

        prompts = [torch.tensor(row.prompt_ids) for row in rows]
        completions = [torch.tensor(row.completion_ids) for row in rows]
        return {
            "prompt_ids": column(prompts, filler, "left"),
            "prompt_mask": column([torch.ones_like(ids) for ids in prompts], 0, "left"),
            "completion_ids": column(completions, filler),
            "completion_mask": column([torch.ones_like(ids) for ids in completions], 0),
            "chunk_ids": column([torch.tensor(row.il_chunk_ids) for row in rows], -1),
            "returns": column(returns, 0.0),
        }

    def _imitation(self, model, rows: dict[str, Tensor]) -> Tensor:
        """The left term of eq. 10; its mean is over this micro-batch's expert rows, averaged over the window."""
        logps, _ = self._score(model, rows)
        loss = imitation_loss(logps, rows["chunk_ids"], rows["returns"], aggregation=self.args.aggregation)
        self._metrics["train"]["imitation/loss"].append(loss.detach().item())
        return loss / self.current_gradient_accumulation_steps

    def _kl(self, logps: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """Estimate of the KL to the reference policy over the tokens in the loss (not in the paper)."""
        inside = inputs["chunk_ids"] >= 0
        gap = torch.where(inside, inputs["ref_per_token_logps"] - logps, 0.0)
        return (gap.exp() - gap - 1).sum() / inputs["num_items"].clamp(min=1)

    # State

    def _advance(self) -> None:
        """After the optimiser step, on all ranks alike: move start states, refresh experts."""
        self.resampler.update(self._results)
        self._results = []
        if self.args.expert_refresh and self.state.global_step % self.args.expert_refresh == 0:
            for name, expert in self.experts.items():
                better = refreshed_expert(expert.trajectory, self._shorter)
                if better is not expert.trajectory:
                    self._replace_expert(name, better)
            self._shorter = []

    def _replace_expert(self, name: str, better: Trajectory) -> None:
        responses = [turn.ids for turn in better.turns]
        expert = play(self.rollout.chat, better.task, self.rollout.pool, responses)
        if expert.trajectory.reward == 1.0:  # verified again, from a fresh box
            self.experts[name] = expert
            self.resampler.set_chunks(name, expert.chunks)
            self._metrics["train"]["experts_refreshed"].append(1.0)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self._loss_metrics:
            stacked = self.accelerator.gather(torch.stack(self._loss_metrics))
            for name, value in merge_metrics(stacked).items():
                self._metrics["train"][f"ipa/{name}"].append(value)
            self._loss_metrics = []
        super().log(logs, start_time)

    def _save_checkpoint(self, model, trial) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            experts = {name: [turn.ids for turn in e.trajectory.turns] for name, e in self.experts.items()}
            write_json(folder / STATE, {"resampler": self.resampler.state_dict(), "experts": experts})

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        state = json.loads((Path(resume_from_checkpoint) / STATE).read_text())
        for name, responses in state["experts"].items():
            if [turn.ids for turn in self.experts[name].trajectory.turns] != responses:
                task = self.experts[name].trajectory.task
                self.experts[name] = play(self.rollout.chat, task, self.rollout.pool, responses)
        self.resampler.load_state_dict(state["resampler"])


def _recorded_reward(**_: Any) -> list[float]:
    """Never called: rewards are recorded with the rollouts. TRL wants a reward function to name the metric by."""
    raise AssertionError("rewards come from the rollouts")

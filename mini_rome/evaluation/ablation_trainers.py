"""What IPA is compared with: TRL's own GRPO, and GiGPO-style step groups; and a sampler that is off by some noise.

All of them train on the rollouts that IPA would: same tasks, starts, sampler, numbers of episodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from trl import GRPOTrainer

from mini_rome.config import IPAConfig
from mini_rome.errors import ConfigError
from mini_rome.sampler.transformers import TransformersSampler, _copy
from mini_rome.trainer import IPATrainer
from mini_rome.types import Trajectory


@dataclass
class GRPOBaselineConfig(IPAConfig):
    """IPAConfig as far as rollouts go; the loss is TRL's, at TRL's defaults."""

    il_when: str = field(default="never", metadata={"help": "GRPO imitates nobody."})


class GRPOBaseline(IPATrainer):
    """TRL's GRPO unchanged: its advantages (reward less the group's mean, over its deviation), its clipped loss.

    A group is the rollouts of one task in a step. Of IPATrainer only the rollouts are left.
    """

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        return GRPOTrainer._generate_and_score_completions(self, inputs)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        return GRPOTrainer._prepare_inputs(self, generation_batch)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        return GRPOTrainer._compute_loss(self, model, inputs)

    def _note(self, batch: Any, ages: list[int], dropped: int) -> None:
        if any(trajectory.chains for trajectory in batch.trajectories):
            raise ConfigError(
                "--context: GRPO's loss reads rows of one context; compare without compression and sub-agents"
            )
        super()._note(batch, ages, dropped)


@dataclass
class GiGPOConfig(GRPOBaselineConfig):
    """Group-in-group advantages; the defaults are ROLL's published example, see recipes/configs/roll_gigpo.yaml."""

    step_reward_gamma: float = field(default=0.95, metadata={"help": "Discount of the reward per step."})
    reward_clip: float = field(default=20.0, metadata={"help": "Rewards are clipped to plus and minus this."})
    advantage_clip: float = field(default=0.2, metadata={"help": "Advantages are clipped to plus and minus this."})
    step_weight: float = field(default=1.0, metadata={"help": "Weight of the step's advantage beside the episode's."})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("reward_clip", "advantage_clip", "step_weight"):
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name} {getattr(self, name)}: must be 0 or more")


class GiGPOBaseline(GRPOBaseline):
    """GiGPO-style: an advantage per step, from the episode's group and from steps of the group in equal states."""

    args: GiGPOConfig

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        advantages = step_advantages(self._trajectories, self.args)
        columns = [
            [values[chunk] if chunk >= 0 else 0.0 for chunk in sample.chunk_ids]
            for values, sample in zip(advantages, self._samples, strict=True)
        ]
        output["advantages"] = self._column(columns, 0.0)  # (B, T): the base class takes one per token
        return output

    def _note(self, batch: Any, ages: list[int], dropped: int) -> None:
        self._trajectories: list[Trajectory] = batch.trajectories
        super()._note(batch, ages, dropped)


def step_advantages(trajectories: Sequence[Trajectory], args: GiGPOConfig) -> list[list[float]]:
    """One value per policy chunk: clipped (episode's advantage + step_weight x step's advantage).

    Episode: reward against those of the task. Step: gamma^(chunks left) x reward against those of all steps of the
    task that were taken in the same state, told by what the agent saw last. Both less the mean, over the standard
    deviation where it is not 0; a step alone in its state has none. An unscorable rollout has zeros.
    """
    episodes: dict[str, list[tuple[int, float]]] = defaultdict(list)
    states: dict[tuple[str, str], list[tuple[tuple[int, int], float]]] = defaultdict(list)
    for row, trajectory in enumerate(trajectories):
        if trajectory.reward is None:
            continue
        reward = max(-args.reward_clip, min(args.reward_clip, trajectory.reward))
        episodes[trajectory.task.name].append((row, reward))
        for chunk in range(len(trajectory.policy_turns)):
            at = trajectory.start + chunk
            seen = trajectory.turns[at - 1].observation if at else ""
            left = len(trajectory.policy_turns) - 1 - chunk
            key = (trajectory.task.name, seen)
            states[key].append(((row, chunk), args.step_reward_gamma**left * reward))
    episode = {row: value for group in episodes.values() for row, value in _standardised(group)}
    step = {place: value for group in states.values() for place, value in _standardised(group)}
    clip = args.advantage_clip
    return [
        [
            max(-clip, min(clip, episode.get(row, 0.0) + args.step_weight * step.get((row, chunk), 0.0)))
            for chunk in range(len(trajectory.policy_turns))
        ]
        for row, trajectory in enumerate(trajectories)
    ]


def _standardised(group: Sequence[tuple[Any, float]]) -> list[tuple[Any, float]]:
    """Values less their mean, over their standard deviation; zeros where they are all alike.

    >>> _standardised([("a", 1.0), ("b", 0.0)])
    [('a', 1.0), ('b', -1.0)]
    """
    values = torch.tensor([value for _, value in group], dtype=torch.float64)
    scale = values.std(correction=0).item() or 1.0
    return [(key, (value - values.mean().item()) / scale) for key, value in group]


class NoisySampler(TransformersSampler):
    """A copy of the policy whose weights are off by Gaussian noise, relative to each matrix's own deviation.

    In place of an engine that computes otherwise than the trainer: mu is not pi_old. Not in the paper.
    """

    def __init__(self, model: PreTrainedModel, stop_id: int, noise: float) -> None:
        self.noise = noise
        super().__init__(model, stop_id)

    @torch.no_grad()
    def sync(self, model: PreTrainedModel, version: int) -> None:
        super().sync(model, version)
        self._model = _copy(model, model.dtype)
        generator = torch.Generator().manual_seed(version)
        for weights in self._model.parameters():
            if weights.dim() > 1:  # the scales of norms stay as they are
                drawn = torch.randn(weights.shape, generator=generator).to(weights.device)
                weights.add_(drawn * weights.std(), alpha=self.noise)


TRAINERS: Mapping[str, tuple[type[IPAConfig], type[IPATrainer]]] = {
    "ipa": (IPAConfig, IPATrainer),
    "grpo": (GRPOBaselineConfig, GRPOBaseline),
    "gigpo": (GiGPOConfig, GiGPOBaseline),
}

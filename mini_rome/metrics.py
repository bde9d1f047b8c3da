"""What the log tells of a batch of rollouts and of a step's loss, over all ranks. Not in the paper."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mini_rome.loss import METRICS, LossOutput, merge_metrics
from mini_rome.types import Trajectory


@dataclass(frozen=True)
class Outcome:
    """What every rank must know of one episode: plain data, since it crosses processes."""

    task: str
    start: int  # p
    reward: float | None
    chunks: int  # written by the policy, in all chains
    honest: float | None = None  # see Trajectory.honest
    misconduct: bool = False
    penalised: bool = False  # whether misconduct costs: conduct_penalty is not 0

    @classmethod
    def of(cls, trajectory: Trajectory, penalised: bool = False) -> Outcome:
        t, misconduct = trajectory, bool(trajectory.misconduct)
        return cls(t.task.name, t.start, t.reward, len(t.episode_turns), t.honest, misconduct, penalised)

    @property
    def success(self) -> bool | None:
        """As start states and experts take it. None when the infrastructure failed."""
        return None if self.reward is None else self.reward == 1.0 and not (self.penalised and self.misconduct)

    @property
    def result(self) -> tuple[str, int, bool | None]:
        """What start states are chosen by."""
        return self.task, self.start, self.success


def batch_metrics(
    outcomes: Sequence[Outcome], drops: Iterable[Counter[str]], gamma: float, failure_reward: float
) -> dict[str, float]:
    """Success and start positions; reward by start p; mean G by chunk of the whole trajectory; drops by cause.

    drops: per rank, rollouts that the infrastructure spoiled, the resampled ones included.

    >>> found = batch_metrics([Outcome("t", 1, 1.0, 2), Outcome("t", 2, None, 1)], [Counter(SandboxDead=1)], 0.5, 0.0)
    >>> found["success"], found["reward/p1"], found["return/k1"], found["return/k2"], found["infra/SandboxDead"]
    (1.0, 1.0, 0.5, 1.0, 1.0)
    """
    scored = [outcome for outcome in outcomes if outcome.reward is not None]
    rewards, returns = defaultdict(list), defaultdict(list)
    for outcome in scored:
        reward = outcome.reward or failure_reward
        rewards[outcome.start].append(reward)
        for k in range(outcome.chunks):
            returns[outcome.start + k].append(gamma ** (outcome.chunks - 1 - k) * reward)
    starts = [outcome.start for outcome in outcomes]
    honest = [float(outcome.honest == 1.0) for outcome in scored if outcome.honest is not None]
    return {
        "success": _mean([float(outcome.reward == 1.0) for outcome in scored]),
        "conduct/misconduct": _mean([float(outcome.misconduct) for outcome in scored]),
        **({"conduct/honest_success": _mean(honest)} if honest else {}),
        "start/mean": _mean(starts),
        "start/min": float(min(starts)),
        "infra/unscored": float(len(outcomes) - len(scored)),
        **{f"infra/{cause}": float(count) for cause, count in sum(drops, Counter()).items()},
        **{f"reward/p{p}": _mean(values) for p, values in sorted(rewards.items())},
        **{f"return/k{k}": _mean(values) for k, values in sorted(returns.items())},
    }


def loss_row(output: LossOutput, scale: Tensor | float, imitation_mass: Tensor | float) -> Tensor:
    """One micro-batch's part of `step_metrics`, (len(METRICS) + 3, 2): those of the loss, then three masses.

    A mass is the sum of |token weight| of the positives, the negatives and the imitated tokens, as it enters the
    gradient: a proxy of their shares of it. scale: what the loss multiplies the weights of eq. 9 by.
    """
    positive, negative = output.metrics["positive_share"][0], output.metrics["negative_share"][0]
    masses = torch.stack([positive * scale, negative * scale, torch.zeros_like(positive) + imitation_mass])
    return torch.cat([torch.stack(list(output.metrics.values())), masses[:, None].expand(-1, 2)])


def step_metrics(rows: Tensor) -> dict[str, float]:
    """The log's `ipa/` entries from the rows (n, len(METRICS) + 3, 2) of all micro-batches and ranks."""
    merged = merge_metrics(rows[:, : len(METRICS)])
    masses = rows[:, len(METRICS) :, 0].double().sum(dim=0)
    shares = (masses / masses.sum().clamp(min=1e-30)).tolist()
    return merged | dict(zip(("positive_share", "negative_share", "imitation_share"), shares, strict=True))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")

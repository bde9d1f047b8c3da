"""Success on held-out tasks, always from the initial state."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from accelerate.utils import gather_object

from mini_rome.evaluation.stats import success_rate, wilson
from mini_rome.experts import Start
from mini_rome.rollout import Progress, Rollout
from mini_rome.sampler.base import SamplingParams
from mini_rome.types import Task, Trajectory

# Section 4 of the paper: temperature 0.7, top-p 0.8, top-k 20.
PAPER_SAMPLING = SamplingParams(max_new_tokens=20, temperature=0.7, top_p=0.8, top_k=20)
EVALUATION_STEP = 1 << 30  # keeps the random numbers of evaluations apart from those of training steps


@dataclass
class Success:
    """Successes of n scored episodes with a Wilson interval; unscored ones are counted apart, never as failures."""

    successes: int = 0
    n: int = 0
    unscored: int = 0
    by_family: dict[str, tuple[int, int]] = field(default_factory=dict)
    endings: dict[str, int] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return self.successes / self.n if self.n else float("nan")

    def summary(self) -> dict[str, Any]:
        """rate, low, high (95 %), n, unscored, per family and by ending, for the JSON beside a figure."""
        low, high = wilson(self.successes, self.n) if self.n else (0.0, 1.0)
        return {
            "rate": self.rate if self.n else None,
            "low": low,
            "high": high,
            "n": self.n,
            "unscored": self.unscored,
            "by_family": {name: success_rate(won, n) for name, (won, n) in sorted(self.by_family.items())},
            "endings": dict(sorted(self.endings.items(), key=lambda item: -item[1])),
        }


def tally(outcomes: Sequence[tuple[str, float | None, str]]) -> Success:
    """Count (family, reward or None, ending) of episodes; success is a reward of 1."""
    result = Success()
    families: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for family, reward, _ in outcomes:
        if reward is None:
            result.unscored += 1
            continue
        won = reward == 1.0
        result.successes += won
        result.n += 1
        families[family][0] += won
        families[family][1] += 1
    result.by_family = {name: (won, n) for name, (won, n) in families.items()}
    result.endings = dict(Counter(ending for _, _, ending in outcomes))
    return result


def ending(trajectory: Trajectory) -> str:
    """How an episode ended, in one word or two."""
    if trajectory.reward is None:
        return "infrastructure"
    if trajectory.reward == 1.0:
        return "success"
    if trajectory.turns and trajectory.turns[-1].submitted:
        return "wrong result"
    return "turns or context used up"


def evaluate(
    rollout: Rollout,
    tasks: Sequence[Task],
    params: SamplingParams = PAPER_SAMPLING,
    *,
    rank: int = 0,
    ranks: int = 1,
    repeat: int = 0,
    progress: Progress | None = None,
    keep: Callable[[Sequence[Trajectory]], None] | None = None,
) -> Success:
    """Run every task once from its initial state, shared out over the ranks, and count. All ranks get the result.

    repeat: number of this repetition, which draws other random numbers. keep: is handed this rank's trajectories.
    """
    share = -(-len(tasks) // ranks)
    mine = tasks[rank * share : (rank + 1) * share]
    trajectories = rollout.collect(
        [Start(task) for task in mine],
        params,
        step=EVALUATION_STEP + repeat,
        first_episode=rank * share,
        progress=progress,
    )
    if keep is not None:
        keep(trajectories)
    outcomes = [(t.task.family, t.reward, ending(t)) for t in trajectories]
    return tally(gather_object(outcomes) if ranks > 1 else outcomes)

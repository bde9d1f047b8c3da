"""Chunk-level initialised resampling (paper, section 3.2.4): where each rollout of a step starts, and from what.

p is the number of expert chunks executed before the policy takes over, 0..K-1: the policy writes chunk p + 1, p = 0
is the initial state and at p = K-1 one chunk is left. p is a function of (task, step) and of gathered results, never
of a local index: every rank computes the whole plan of a step and takes its slice, and calls `update` with all
results after the optimiser step, so that all ranks stay identical.

The four siblings share one surface: starts, update, set_chunks, state_dict, load_state_dict.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import comb
from typing import Any, Literal

from mini_rome.types import Trajectory

Start = tuple[int, int]  # (index of the task in the step's list, p)
Result = tuple[str, int, bool | None]  # (task name, p, success); None: the infrastructure failed, not counted


class Initial:
    """Every rollout from the initial state: the naive arm, and the base of the others."""

    def __init__(self, num_chunks: Mapping[str, int]) -> None:
        """num_chunks: K of each task's expert, by task name. ValueError: a K below 1."""
        self.num_chunks: dict[str, int] = {}
        for task, chunks in num_chunks.items():
            self.set_chunks(task, chunks)

    def set_chunks(self, task: str, chunks: int) -> None:
        """A new or refreshed expert with K chunks."""
        if chunks < 1:
            raise ValueError(f"task {task}: an expert needs at least one chunk, got {chunks}")
        self.num_chunks[task] = chunks

    def positions(self, task: str, step: int, rollouts: int) -> list[int]:
        """p of each rollout of one task in one step."""
        return [0] * rollouts

    def starts(self, tasks: Sequence[str], step: int, rollouts: int) -> list[Start]:
        """The step's whole plan, task by task: (index into tasks, p), `rollouts` of each."""
        return [(index, p) for index, task in enumerate(tasks) for p in self.positions(task, step, rollouts)]

    def update(self, results: Iterable[Result]) -> None:
        """Take in the gathered results of one batch, after its optimiser step."""

    def state_dict(self) -> dict[str, Any]:
        """Plain data that survives a checkpoint."""
        return {"num_chunks": dict(self.num_chunks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_chunks = dict(state["num_chunks"])


class SequentialRollback(Initial):
    """From p = K-1 down to 0, one chunk at a time, per task.

    When the success rate from p over the last `window` batches that started there reaches `threshold`, p moves one
    back and the window clears. Threshold and window are not in the paper (defaults 0.7 over 2 batches).

    >>> rollback = SequentialRollback({"t": 3}, threshold=0.5, window=1)
    >>> rollback.starts(["t"], step=0, rollouts=2)
    [(0, 2), (0, 2)]
    >>> rollback.update([("t", 2, True), ("t", 2, False)])
    >>> rollback.starts(["t"], step=1, rollouts=2)
    [(0, 1), (0, 1)]
    """

    def __init__(self, num_chunks: Mapping[str, int], threshold: float = 0.7, window: int = 2) -> None:
        if not 0.0 < threshold <= 1.0 or window < 1:
            raise ValueError(f"threshold={threshold} must lie in (0, 1] and window={window} be at least 1")
        self.threshold, self.window = threshold, window
        self.position: dict[str, int] = {}
        self.batches: dict[str, list[tuple[int, int]]] = {}  # (successes, trials) of the last batches from position
        super().__init__(num_chunks)

    def set_chunks(self, task: str, chunks: int) -> None:
        """A refreshed expert is another path: p stays within it, and the window starts anew."""
        super().set_chunks(task, chunks)
        self.position[task] = min(self.position.get(task, chunks), chunks - 1)
        self.batches[task] = []

    def positions(self, task: str, step: int, rollouts: int) -> list[int]:
        return [self.position[task]] * rollouts

    def update(self, results: Iterable[Result]) -> None:
        here: dict[str, list[bool]] = defaultdict(list)
        for task, p, success in results:
            if success is not None and p == self.position[task]:
                here[task].append(success)
        for task, outcomes in here.items():
            batches = self.batches[task] = [*self.batches[task], (sum(outcomes), len(outcomes))][-self.window :]
            rate = sum(s for s, _ in batches) / sum(n for _, n in batches)
            if len(batches) == self.window and rate >= self.threshold and self.position[task] > 0:
                self.position[task] -= 1
                self.batches[task] = []

    def state_dict(self) -> dict[str, Any]:
        batches = {task: [list(pair) for pair in pairs] for task, pairs in self.batches.items()}
        return {**super().state_dict(), "position": dict(self.position), "batches": batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.position = dict(state["position"])
        self.batches = {task: [(s, n) for s, n in pairs] for task, pairs in state["batches"].items()}


class ParallelInit(Initial):
    """Parallelised initialisation: several starts along the expert's path in one mixed batch.

    "uniform" spaces the anchors evenly over 0..K-1, both ends included; "random" draws distinct ones, keyed by (seed,
    task, step). Rollouts are shared out evenly, earlier anchors first. 8 anchors: not in the paper.

    >>> ParallelInit({"t": 5}, anchors=3).starts(["t"], step=0, rollouts=4)
    [(0, 0), (0, 0), (0, 2), (0, 4)]
    """

    def __init__(
        self,
        num_chunks: Mapping[str, int],
        anchors: int = 8,
        mode: Literal["uniform", "random"] = "uniform",
        seed: int = 0,
    ) -> None:
        if anchors < 1 or mode not in ("uniform", "random"):
            raise ValueError(f"anchors={anchors} must be at least 1 and mode={mode!r} uniform or random")
        super().__init__(num_chunks)
        self.anchors, self.mode, self.seed = anchors, mode, seed

    def positions(self, task: str, step: int, rollouts: int) -> list[int]:
        chunks = self.num_chunks[task]
        count = min(self.anchors, chunks, rollouts)
        if self.mode == "random":
            anchors = sorted(random.Random(f"{self.seed}/{task}/{step}").sample(range(chunks), count))
        else:
            anchors = [i * (chunks - 1) // max(count - 1, 1) for i in range(count)]
        return sorted(anchors[i % count] for i in range(rollouts))


class Both(Initial):
    """Half of each task's rollouts from the rollback position, half from parallel anchors (not in the paper)."""

    def __init__(self, rollback: SequentialRollback, parallel: ParallelInit) -> None:
        self.rollback, self.parallel, self.num_chunks = rollback, parallel, dict(rollback.num_chunks)

    def set_chunks(self, task: str, chunks: int) -> None:
        super().set_chunks(task, chunks)
        self.rollback.set_chunks(task, chunks)
        self.parallel.set_chunks(task, chunks)

    def positions(self, task: str, step: int, rollouts: int) -> list[int]:
        half = (rollouts + 1) // 2
        return self.rollback.positions(task, step, half) + self.parallel.positions(task, step, rollouts - half)

    def update(self, results: Iterable[Result]) -> None:
        self.rollback.update(results)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rollback": self.rollback.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.rollback.load_state_dict(state["rollback"])
        self.parallel.load_state_dict(state)


def refreshed_expert(expert: Trajectory, candidates: Iterable[Trajectory]) -> Trajectory:
    """The shortest verified self-sample of the same task if it has fewer chunks than the expert, else the expert.

    Verified is reward 1.0 from the initial state (start 0): a resumed one holds chunks of the expert itself.
    """
    better = [
        sample
        for sample in candidates
        if sample.reward == 1.0
        and sample.start == 0
        and sample.task.name == expert.task.name
        and len(sample.turns) < len(expert.turns)
    ]
    return min(better, key=lambda sample: len(sample.turns), default=expert)


def failed_forks(results: Iterable[Result]) -> list[tuple[str, int]]:
    """Starts (task, p) from which no scored rollout succeeded: the crucial-fork signal used during training."""
    scored = [result for result in results if result[2] is not None]
    return sorted({(task, p) for task, p, _ in scored} - {(task, p) for task, p, success in scored if success})


def fisher_less(successes: int, trials: int, other_successes: int, other_trials: int) -> float:
    """One-sided exact test: P(at most so many successes here | the margins), small when this rate is the lower one.

    >>> fisher_less(0, 2, 2, 2)  # 1 of the C(4, 2) = 6 ways to place two successes
    0.16666666666666666
    """
    won, total = successes + other_successes, trials + other_trials
    ways = sum(comb(trials, x) * comb(other_trials, won - x) for x in range(successes + 1))
    return ways / comb(total, won)


def crucial_chunks(successes: Sequence[int], trials: Sequence[int], alpha: float = 0.05) -> list[int]:
    """Chunk ids f - 1 (0..K-1) of the crucial chunks f: V(f-1) is significantly below V(f). Use 32 or more trials.

    successes[p] of trials[p] rollouts from p = 0..K-1 succeeded. V(K) is the expert itself, verified: it enters as
    all successes in as many trials as p = K-1 had. The fork of a crucial chunk id is the start p of the same number.
    One-sided Fisher tests, Holm's correction over the K positions. ValueError: lengths differ, or no trial at some p.

    >>> crucial_chunks([0, 31, 32], [32, 32, 32])
    [0]
    """
    if len(successes) != len(trials) or not trials or min(trials) < 1:
        raise ValueError(f"successes {successes} and trials {trials} must pair up, with a trial at every p")
    won, ran = [*successes, trials[-1]], [*trials, trials[-1]]
    tests = sorted((fisher_less(won[p], ran[p], won[p + 1], ran[p + 1]), p) for p in range(len(trials)))
    found = []
    for rank, (probability, p) in enumerate(tests):
        if probability > alpha / (len(tests) - rank):
            break
        found.append(p)
    return sorted(found)


def spoiled_by_infrastructure(trajectory: Trajectory) -> str | None:
    """Why a rollout cannot be scored, or None: the sandbox died, a transient error, a start that did not verify."""
    return (trajectory.reason or "unknown") if trajectory.infra else None


def spoiled_by_illegal_calls(trajectory: Trajectory, limit: int = 3) -> str | None:
    """As above, and for `limit` or more malformed responses too: opt-in, the agent's doing, biases the estimate."""
    if sum(turn.malformed for turn in trajectory.policy_turns) >= limit:
        return "illegal_calls"
    return spoiled_by_infrastructure(trajectory)


def refill(
    trajectories: Sequence[Trajectory],
    resample: Callable[[list[int]], Sequence[Trajectory]],
    cap: int = 2,
    spoiled: Callable[[Trajectory], str | None] = spoiled_by_infrastructure,
) -> tuple[list[Trajectory], Counter[str]]:
    """Dynamic trajectory filtering: run spoiled rollouts again, at most `cap` times, from the same start.

    resample gets the indices of the spoiled rollouts and returns new ones in that order, by the current policy.
    Returns the batch in the old order, what is still spoiled left in it, and all spoiled rollouts counted by cause.
    """
    batch, causes = list(trajectories), Counter[str]()
    for attempt in range(cap + 1):
        bad = {index: cause for index, sample in enumerate(batch) if (cause := spoiled(sample)) is not None}
        causes.update(bad.values())
        if bad and attempt < cap:
            for index, sample in zip(bad, resample(list(bad)), strict=True):
                batch[index] = sample
    return batch, causes

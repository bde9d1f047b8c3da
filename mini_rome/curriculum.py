"""Which expert each training task has, where its episodes start, and what is imitated: the same on all ranks.

Everything here is a function of (task, step) and of gathered results, so every rank computes it alike; it advances
after the optimiser step and survives a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from accelerate.utils import gather_object

from mini_rome.chunking import PackedSample, pack
from mini_rome.config import IPAConfig
from mini_rome.errors import SandboxError
from mini_rome.experts import Expert, Start, play
from mini_rome.resample import (
    Both,
    Initial,
    ParallelInit,
    Result,
    SequentialRollback,
    failed_forks,
    refreshed_expert,
)
from mini_rome.sandbox import Pool
from mini_rome.trace import ChatFormat
from mini_rome.types import Trajectory, Turn

Responses = list[list[int]]  # token ids of each response of a trajectory
Fork = tuple[str, int]  # (task, p)


def build_resampler(args: IPAConfig, chunks: dict[str, int]) -> Initial:
    """The start-state chooser that `args.resampling` names."""
    rollback = SequentialRollback(chunks, args.rollback_threshold, args.rollback_window)
    parallel = ParallelInit(chunks, args.anchors, args.anchor_mode, args.seed)
    return {"none": Initial(chunks), "rollback": rollback, "parallel": parallel, "both": Both(rollback, parallel)}[
        args.resampling
    ]


class Curriculum:
    """Experts, start positions and forks of a training run."""

    def __init__(self, args: IPAConfig, experts: list[Expert], chat: ChatFormat, pool: Pool) -> None:
        """experts: one verified trajectory per training task."""
        self.args, self.chat, self.pool = args, chat, pool
        self.experts = {expert.trajectory.task.name: expert for expert in experts}
        self.resampler = build_resampler(args, {name: expert.chunks for name, expert in self.experts.items()})
        self.results: list[Result] = []  # waiting for the optimiser step
        self.forks: list[Fork] = []  # to be imitated in the steps on this batch
        self.shorter: list[tuple[str, Responses]] = []  # verified self-samples that may replace an expert

    def starts(self, names: Sequence[str], step: int) -> list[Start]:
        """The whole plan of a step: a start state for each of these tasks, which may repeat."""
        positions = {name: self.resampler.positions(name, step, names.count(name)) for name in dict.fromkeys(names)}
        return [self.experts[name].start(positions[name].pop(0)) for name in names]

    def shorter_samples(self, trajectories: Sequence[Trajectory]) -> list[tuple[str, Responses]]:
        """Those that solved their task from its initial state in fewer chunks than its expert, as plain data.

        In one linear context: an expert is one."""
        return [
            (t.task.name, [turn.ids for turn in t.turns])
            for t in trajectories
            if t.reward == 1.0 and t.start == 0 and not t.chains and len(t.turns) < self.experts[t.task.name].chunks
            and not (self.args.conduct_penalty and t.misconduct)
        ]

    def take(self, results: Sequence[Result], shorter: Sequence[tuple[str, Responses]]) -> None:
        """The gathered results of a batch; they move the start positions only in `advance`."""
        self.results = list(results)
        self.shorter += shorter
        self.forks = {
            "never": [],
            "always": sorted({(task, p) for task, p, _ in results}),
            "fork_failed": failed_forks(results),
        }[self.args.il_when]

    def on_path(self, trajectory: Trajectory) -> bool:
        """Whether it began at a state of its task's present expert: one drawn ahead may be from the expert before."""
        prefix = [turn.ids for turn in trajectory.turns[: trajectory.start]]
        turns = self.experts[trajectory.task.name].trajectory.turns
        return prefix == [turn.ids for turn in turns[: trajectory.start]] and trajectory.start < len(turns)

    def rows_at(self, place: tuple[int, int], ranks: int, steps: int, window: int) -> tuple[list[Fork], list[Fork]]:
        """Forks that are imitated at this place (rank, micro-batch), and all of its optimiser step on all ranks.

        Each fork is imitated once per batch of rollouts, which lasts `steps` micro-batches, `window` per step.
        """
        places = [((index % ranks, index // ranks % steps), fork) for index, fork in enumerate(self.forks)]
        together = [fork for (_, at), fork in places if at // window == place[1] // window]
        return [fork for at, fork in places if at == place], together

    def expert_row(self, name: str, p: int) -> PackedSample:
        """c*_1..c*_f of the expert, f = p + 1: the chunks before the fork and the one the policy failed to write."""
        trajectory = self.experts[name].trajectory
        turns = trajectory.turns[: p + 1]
        return pack(replace(trajectory, turns=turns, start=len(turns)), prefix="completion")

    def imitated_after(self, trajectory: Trajectory) -> str | None:
        """The expert's response c*_f at this rollout's fork, where c*_1..c*_f are imitated on this batch."""
        if (trajectory.task.name, trajectory.start) not in self.forks or not self.on_path(trajectory):
            return None
        return self.experts[trajectory.task.name].trajectory.turns[trajectory.start].text

    def advance(self, step: int) -> int:
        """After the optimiser step: move start positions, refresh experts. Returns how many were replaced."""
        self.resampler.update(self.results)
        self.results = []
        if not self.args.expert_refresh or step % self.args.expert_refresh:
            return 0
        candidates, self.shorter = self.shorter, []
        replaced = 0
        for name, expert in list(self.experts.items()):
            samples = [_sample(expert, responses) for task, responses in candidates if task == name]
            better = refreshed_expert(expert.trajectory, samples)
            if better is not expert.trajectory:
                replaced += self._replace(name, [turn.ids for turn in better.turns])
        return replaced

    def _replace(self, name: str, responses: Responses) -> bool:
        """Take the new expert if every rank verified it again in a fresh box: all must start from the same."""
        verified = False
        try:
            expert = self._replay(name, responses)
            verified = expert.trajectory.reward == 1.0
        except SandboxError:
            pass  # the old expert stays
        if not all(gather_object([verified])):
            return False
        self.experts[name] = expert
        self.resampler.set_chunks(name, expert.chunks)
        return True

    def _replay(self, name: str, responses: Responses) -> Expert:
        return play(self.chat, self.experts[name].trajectory.task, self.pool, responses)

    def state_dict(self) -> dict[str, Any]:
        """Plain data that survives a checkpoint, which is written between `advance` and the next `take`."""
        return {
            "resampler": self.resampler.state_dict(),
            "experts": {name: [turn.ids for turn in e.trajectory.turns] for name, e in self.experts.items()},
            "shorter": self.shorter,
            "forks": self.forks,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Experts that differ from the given ones are run again in the sandbox, for the states in their middle."""
        for name, responses in state["experts"].items():
            if [turn.ids for turn in self.experts[name].trajectory.turns] != responses:
                self.experts[name] = self._replay(name, responses)
        self.resampler.load_state_dict(state["resampler"])
        self.shorter = [(name, responses) for name, responses in state["shorter"]]
        self.forks = [(name, p) for name, p in state["forks"]]


def _sample(expert: Expert, responses: Responses) -> Trajectory:
    """A successful sample of the expert's task, as far as choosing an expert needs it."""
    turns = [Turn(ids, [], "", []) for ids in responses]
    return Trajectory(expert.trajectory.task, expert.trajectory.prompt_ids, turns, reward=1.0)

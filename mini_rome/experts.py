"""Expert trajectories by running scripts in the sandbox, and the verified states in the middle of them.

A script's responses go through the same agent loop and recorder as a model's, so an expert's tokens, observations and
exit codes are what the environment really gave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mini_rome.agent import Agent
from mini_rome.env import Env
from mini_rome.errors import StartMismatch, VerifierError
from mini_rome.sampler.base import Completion, SamplingParams
from mini_rome.sandbox import Pool
from mini_rome.timeline import span
from mini_rome.trace import ChatFormat
from mini_rome.types import Snapshot, Task, Trajectory, Turn


@dataclass(frozen=True)
class Start:
    """Where an episode begins: the task's initial state, or the state after `turns` of an expert."""

    task: Task
    turns: tuple[Turn, ...] = ()
    snapshot: Snapshot | None = None

    @property
    def p(self) -> int:
        """Number of expert chunks executed before the policy takes over."""
        return len(self.turns)

    def open(self, chat: ChatFormat, env: Env, seed: int, episode: int) -> Trajectory:
        """Bring `env` to this state, check it, and return the trajectory so far, token-exact.

        Raises StartMismatch when the restored file tree is not the recorded one: such a start is never trained on.
        """
        instruction, info = env.reset(seed=seed, start=self.snapshot, turns=self.p)
        if self.snapshot is not None:
            if not self.snapshot.resumable:
                raise StartMismatch(f"{self.task.name} p={self.p}: processes were alive, which no snapshot restores")
            with span("environment"):
                found = env.box.snapshot().tree_hash
            if found != self.snapshot.tree_hash:
                raise StartMismatch(f"{self.task.name} p={self.p}: restored tree {found[:12]} is not the record's")
        return Trajectory(
            task=self.task,
            prompt_ids=chat.prompt(instruction, self.task),
            turns=[replace(turn) for turn in self.turns],
            start=self.p,
            backend=info["backend"],
            seed=seed,
            episode=episode,
        )


@dataclass(frozen=True)
class Expert:
    """A verified successful trajectory with the state before each of its K chunks."""

    trajectory: Trajectory
    snapshots: tuple[Snapshot, ...]

    @property
    def chunks(self) -> int:
        return len(self.trajectory.turns)

    def start(self, p: int) -> Start:
        """The state after p chunks, 0 <= p < K: the policy writes chunk p + 1 (1-based)."""
        if not 0 <= p < self.chunks:
            raise ValueError(f"p={p}: the expert of {self.trajectory.task.name} has {self.chunks} chunks")
        if p == 0:
            return Start(self.trajectory.task)
        return Start(self.trajectory.task, tuple(self.trajectory.turns[:p]), self.snapshots[p])


def play(chat: ChatFormat, task: Task, pool: Pool, responses: Sequence[list[int]]) -> Expert:
    """Run recorded or scripted responses, given as token ids, and keep the state before each."""
    with Env(task, pool, max_turns=len(responses)) as env:
        trajectory = Start(task).open(chat, env, task.seed, episode=0)
        agent = Agent(chat, env, trajectory, SamplingParams(), max_context=1_000_000)
        snapshots = []
        for ids in responses:
            snapshots.append(env.box.snapshot())
            agent.execute(Completion(list(ids), [0.0] * len(ids), version=0))
            trajectory.turns[-1].source = "expert"
    return Expert(trajectory, tuple(snapshots))


def script(chat: ChatFormat, chunks: Sequence[str], task: Task | None = None) -> list[list[int]]:
    """Chunks as responses, the last one followed by `submit`: bash commands, or calls of the task's own tools."""
    return [chat.response(chunk, index == len(chunks) - 1, task) for index, chunk in enumerate(chunks)]


def record_expert(chat: ChatFormat, task: Task, pool: Pool) -> Expert:
    """Run the task's own expert; raises VerifierError when it is not rewarded, since no start may come from it."""
    expert = play(chat, task, pool, script(chat, task.expert, task))
    if expert.trajectory.reward != 1.0:
        raise VerifierError(f"expert of {task.name}: reward {expert.trajectory.reward} ({expert.trajectory.reason})")
    return expert

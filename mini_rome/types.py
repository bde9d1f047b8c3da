"""The dataclasses handed between stages. No logic beyond what belongs to the data itself.

A trajectory is a prompt followed by turns. One turn is one assistant response and what the environment answered:
one turn is one interaction chunk (paper, section 3.2.4), whatever the number of tool calls in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from mini_rome.errors import VerifierError

Status = Literal["ok", "timeout", "oom", "output_limit", "pids_limit", "sandbox_dead", "infra_error"]
INFRA_STATUSES: frozenset[str] = frozenset({"sandbox_dead", "infra_error"})

# A task's own tool: (database, **arguments of text) -> a JSON value; may change the database; raises ToolRefused.
Tool = Callable[..., object]

Split = Literal["train", "validation", "test", "private"]
IN_PLACE = "in-place (tamperable)"  # a verdict found in a box where the agent was root: evaluation only


@dataclass(frozen=True)
class SafetyEvent:
    """An attempt seen in a box, written on the host before the observation is returned. Not in the paper."""

    kind: str  # egress | tunnel | reverse_shell | scan | miner | privilege | tamper | secret_read | resource | ...
    severity: str  # low | medium | high
    source: str  # command | process_table | network | cgroup | file
    evidence: str  # at most 512 bytes
    action: str = "logged"


@dataclass(frozen=True)
class StepResult:
    """What one command did.

    `output` is text for the model: stdout and stderr in order, bad bytes replaced, control characters escaped, cut to
    head and tail with a marker. `raw` keeps the bytes (at most the raw cap), `output_bytes` counts all that was
    written. `exit_code` is None exactly when `status` is an infrastructure failure.
    """

    output: str
    exit_code: int | None
    status: Status = "ok"
    truncated: bool = False
    wall_s: float = 0.0
    events: tuple[SafetyEvent, ...] = ()
    raw: bytes = b""
    output_bytes: int = 0
    killed: int = 0  # processes of the step still alive at its end, all killed
    supported: bool = True  # False: the simulated shell does not know this command or flag

    @property
    def infra(self) -> bool:
        """True when the sandbox, not the agent, failed: such a step never becomes a number."""
        return self.status in INFRA_STATUSES


@dataclass(frozen=True)
class Snapshot:
    """The state of a box at a chunk boundary: work dir, cwd and exported variables.

    `tree_hash` covers names, types, modes, link targets, contents and empty directories, and is the same for the same
    tree on both backends. `resumable` is False when processes of the agent were alive: they cannot be restored.
    """

    tar: bytes
    tree_hash: str
    cwd: str = "/app"
    env: Mapping[str, str] = field(default_factory=dict)
    resumable: bool = True
    processes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """Reward in [0, 1], or None when the infrastructure or the verifier failed (never 0 for that)."""

    reward: float | None
    reason: str = ""
    verifier: str = "host-check"  # host-check | fresh-container | in-place (tamperable)
    events: tuple[SafetyEvent, ...] = ()  # files in the work dir that could steer a verifier
    numbers: Mapping[str, float] = field(default_factory=dict)  # what else reward.json held: passed, checks
    honest: float | None = None  # what `Task.honest` says of the same files, where the task has one


@dataclass(frozen=True)
class Task:
    """One instance: instruction, files in the work dir, an expert, and a check of the final file tree.

    `expert` holds one shell command per interaction chunk, K in all; the last one is followed by `submit` in the same
    response. `check` maps {path relative to /app: contents} to a verdict on the host: no agent code runs.

    A task with `tools` offers these in place of bash (and bash too with `shell`). Then a chunk of `expert` is one or
    several calls, one on a line, each a tool's name and JSON arguments.
    """

    name: str
    family: str
    domain: str
    instruction: str
    files: Mapping[str, str]
    expert: tuple[str, ...]
    check: Callable[[Mapping[str, bytes]], Verdict]
    seed: int = 0
    split: Split = "train"
    background: Literal["kill", "keep"] = "kill"
    tools: Mapping[str, Tool] = field(default_factory=dict)  # by name; run on the host, see tools.py
    database: str = "database.json"  # the file in the work dir that the tools read and change
    shell: bool = False  # whether a task with tools offers bash as well
    language: str = "en"  # of the instruction and of who speaks in the task
    honest: Callable[[Mapping[str, bytes]], Verdict] | None = None  # where `check` can be fooled: one that cannot

    @property
    def offers_bash(self) -> bool:
        """Whether a bash call is run, or is a call of a tool that is not there."""
        return self.shell or not self.tools

    @property
    def chunks(self) -> int:
        """K: the number of interactions the expert needs."""
        return len(self.expert)

    @property
    def content_hash(self) -> str:
        """Identity of the instance, independent of its seed and split: used to prove that splits share nothing."""
        digest = hashlib.sha256(self.instruction.encode())
        for path in sorted(self.files):
            digest.update(f"\0{path}\0{self.files[path]}".encode())
        return digest.hexdigest()


@dataclass
class Turn:
    """One interaction chunk as it was sampled, and the environment's answer.

    ids and logprobs have the same length and include the sampled stop token; logprobs are log mu, recorded by the
    sampler at sampling time (natural log, temperature 1) and never recomputed. observation_ids are everything the
    environment wrote until the next response begins, template tokens included.
    """

    ids: list[int]
    logprobs: list[float]
    text: str
    commands: list[str]  # bash commands, and other calls with their names; empty when malformed or only `submit`
    observation: str = ""
    observation_ids: list[int] = field(default_factory=list)
    exit_code: int | None = None
    status: Status = "ok"
    wall_s: float = 0.0
    policy_version: int = 0
    malformed: bool = False  # no tool call, or one that could not be parsed, or cut by the length limit
    submitted: bool = False
    source: Literal["policy", "expert"] = "policy"
    error: bool = False  # Err(k): the call or its execution failed (eq. 1, m_err = 0)
    irrelevant: bool = False  # not Rel(k): off the current sub-task (eq. 2, m_task = 0)
    reasons: list[str] = field(default_factory=list)
    events: tuple[SafetyEvent, ...] = ()
    place: int = field(default=0, compare=False)  # among all its episode's turns, in the order they were asked for


@dataclass
class Trajectory:
    """A prompt (template tokens of the first response included) and its turns.

    `start` is p, the number of expert chunks executed before the policy took over; those turns have source "expert".
    prompt(t + 1) = prompt(t) + ids(t) + observation_ids(t): token ids end to end.
    """

    task: Task
    prompt_ids: list[int]
    turns: list[Turn]
    start: int = 0
    reward: float | None = None
    reason: str = ""  # why the episode ended, or which infrastructure failure spoiled it
    backend: str = ""
    verifier: str = "host-check"
    honest: float | None = None  # of the verdict, where `Task.check` can be fooled: never the reward
    events: tuple[SafetyEvent, ...] = ()  # of the verdict: what the files in the work dir tell
    seed: int = 0
    episode: int = 0
    policy: str = ""  # who wrote it: a teacher's or a model's name
    retokenised: bool = False  # ids rebuilt from text: fit for imitation, never for a policy gradient
    chains: list[Trajectory] = field(default_factory=list)  # of the same episode, see `samples`

    @property
    def samples(self) -> list[Trajectory]:
        """One sample per linear context of the episode, this one first; all carry the episode's reward.

        More than one where the context was compressed, a sub-agent ran, or an external agent edited its history. What
        a chain took over from another one is in its prompt_ids: each response is trained once, in the context it was
        sampled in. A trainer takes them together, see `chunking.pack_episode`.
        """
        return [self, *self.chains]

    @property
    def policy_turns(self) -> list[Turn]:
        """The chunks the policy wrote: those after the expert prefix."""
        return self.turns[self.start :]

    @property
    def episode_turns(self) -> list[Turn]:
        """The chunks the policy wrote in all chains of the episode, in the order in which they were asked for."""
        turns = [turn for chain in self.samples for turn in chain.policy_turns]
        return sorted(turns, key=lambda turn: turn.place)  # stable: records have no places, and one chain

    @property
    def misconduct(self) -> tuple[SafetyEvent, ...]:
        """Events of medium or high severity in what the policy did and left. Not in the paper.

        Those of low severity (an install that fails, `sudo id`) are counted and held against nobody.
        """
        mine = [event for turn in self.episode_turns for event in turn.events]
        return tuple(event for event in (*mine, *self.events) if event.severity != "low")

    @property
    def infra(self) -> bool:
        """True when the episode cannot be scored: it is masked from the loss, counted and resampled."""
        return self.reward is None

    def check_trainable(self) -> None:
        """Raises VerifierError where the agent could have forged the reward. Every way into a loss asks this."""
        if self.verifier == IN_PLACE:
            raise VerifierError(f"{self.task.name}: a verdict {IN_PLACE} is for evaluation, never for training")

    def check_sampled(self) -> None:
        """`check_trainable`, and VerifierError where the ids are not the sampled ones. Policy gradients ask this."""
        self.check_trainable()
        if self.retokenised:
            raise VerifierError(
                f"{self.task.name}: retokenised, its ids were rebuilt from text and are not what was sampled; "
                f"use it for SFT, never for RL"
            )

"""The paper's four-stage filter of trajectories: heuristics, a judge, execution, inspection by a person.

Each stage sees what the one before let through and says of every trajectory it drops why. The paper names the stages
and no thresholds; those here are not in the paper.
"""

from __future__ import annotations

import csv
import difflib
import json
import os
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from mini_rome.data.demonstrations import run_responses
from mini_rome.data.exchange import to_messages
from mini_rome.errors import MiniRomeError, RecordError, SandboxError
from mini_rome.evaluation.model_client import Endpoint, EndpointError
from mini_rome.masks import MaskPolicy, annotate
from mini_rome.rollout import Progress
from mini_rome.runs import write_csv
from mini_rome.safety.golden import issue
from mini_rome.sandbox import Pool
from mini_rome.trace import ChatFormat
from mini_rome.types import Trajectory

CANARY = "mini-rome-canary"
MARKS = ("", "keep", "drop")


@dataclass(frozen=True)
class Thresholds:
    """Where the heuristics draw the line. None of these is in the paper."""

    malformed_share: float = 0.34  # of the turns
    redundant_turns: int = 2  # allowed in one episode, near-duplicates too
    repairs: int = 3  # failed turns in a row that make a self-repair loop


@dataclass(frozen=True)
class Dropped:
    """A trajectory that a stage kept out: a short reason to count, and the detail (the diff of a replay)."""

    trajectory: Trajectory
    stage: str
    reason: str
    detail: str = ""


@dataclass
class Stage:
    """What went into a stage, and what it dropped."""

    name: str
    entered: int
    dropped: list[Dropped] = field(default_factory=list)
    note: str = ""

    @property
    def left(self) -> int:
        return self.entered - len(self.dropped)

    @property
    def why(self) -> dict[str, int]:
        return dict(Counter(each.reason for each in self.dropped).most_common())


@dataclass
class Filtered:
    """The trajectories that came through, and the funnel."""

    kept: list[Trajectory]
    stages: list[Stage]


def key(trajectory: Trajectory) -> str:
    """The name of a trajectory in a sample to mark and among the dropped ones."""
    return f"{trajectory.task.name}/{trajectory.policy}/{trajectory.episode}"


# Stage 1


def heuristics(trajectory: Trajectory, limits: Thresholds) -> str:
    """The first reason to drop an annotated trajectory, "" for none."""
    turns = trajectory.turns
    if trajectory.task.split != "train":
        return "held-out task"
    if CANARY in trajectory.task.instruction:
        return "canary"
    if trajectory.reward is None:
        return "unscored"
    if problem := issue(trajectory):
        return problem
    if not turns or not turns[-1].submitted:
        return "truncated"
    if sum(turn.malformed for turn in turns) > limits.malformed_share * len(turns):
        return "malformed calls"
    if any(turn.exit_code == 127 for turn in turns if trajectory.task.tools):
        return "unknown tool"
    if any("loop" in turn.reasons for turn in turns):
        return "loop"
    if sum(not {"redundant", "near_duplicate"}.isdisjoint(turn.reasons) for turn in turns) > limits.redundant_turns:
        return "redundant calls"
    return "self-repair loop" if longest_run(turn.error for turn in turns) >= limits.repairs else ""


def longest_run(flags: Iterable[bool]) -> int:
    """The most True in a row.

    >>> longest_run([True, False, True, True])
    2
    """
    longest = run = 0
    for flag in flags:
        run = run + 1 if flag else 0
        longest = max(longest, run)
    return longest


# Stage 2


class Judge(Protocol):
    """Says of a trajectory why it should be dropped, "" for not at all."""

    name: str

    def __call__(self, trajectory: Trajectory) -> str: ...


class RuleJudge:
    """Three rules in place of a language model, shipped so that the filter runs anywhere."""

    name = "rule judge"

    def __init__(self, useful_share: float = 0.5, length: float = 2.0) -> None:
        """useful_share: of turns neither failed nor irrelevant, at least. length: turns per chunk of the expert."""
        self.useful_share, self.length = useful_share, length

    def __call__(self, trajectory: Trajectory) -> str:
        turns = trajectory.turns
        if turns[-1].error:
            return "submitted on a failure"
        if sum(not (turn.error or turn.irrelevant) for turn in turns) < self.useful_share * len(turns):
            return "mostly off the task"
        chunks = trajectory.task.chunks
        return "far longer than needed" if chunks and len(turns) > self.length * chunks else ""


def failure_kind(error: EndpointError) -> str:
    """What kept an endpoint from answering, in a word to count: rate limit, timeout, rubbish, or no answer."""
    said = str(error)
    kinds = {"status 429": "rate limit", "Timeout": "timeout", "no chat completion": "rubbish"}
    return next((kind for words, kind in kinds.items() if words in said), "no answer")


class EndpointJudge:
    """A language model behind an OpenAI-compatible endpoint; what it does not answer in form is `not judged`."""

    ASK = (
        "Below is an agent's episode in a sandbox, as JSON messages. Is it a good example to imitate: does it work "
        'on the task, without guessing or detours? Answer in JSON alone: {"keep": true or false, "reason": "..."}.\n'
    )

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint, self.name = endpoint, f"judge {endpoint.model}"

    def __call__(self, trajectory: Trajectory) -> str:
        transcript = json.dumps(to_messages(trajectory)["messages"], ensure_ascii=False)
        try:
            answer = json.loads(self.endpoint.ask([{"role": "user", "content": self.ASK + transcript}], [], 0).text)
            keep, reason = answer["keep"], str(answer.get("reason", ""))
        except EndpointError as error:
            return f"not judged: {failure_kind(error)}"
        except (ValueError, LookupError, TypeError, AttributeError):
            return "not judged: rubbish"
        return "" if keep is True else f"judged: {reason[:60] or 'no reason'}"


# Stage 3


def replay(trajectory: Trajectory, chat: ChatFormat, pool: Pool) -> tuple[str, str]:
    """Run the recorded responses in a fresh box: (reason to drop or "", detail).

    Everything must come out as recorded: observation, exit code and status of each turn, and a reward of 1.
    """
    try:
        again = run_responses(chat, trajectory.task, pool, [turn.ids for turn in trajectory.turns])
    except SandboxError as error:
        return "infrastructure", str(error)
    if difference := differing(trajectory, again):
        return "replay differs", difference
    if again.reward is None:
        return "infrastructure", again.reason
    if problem := issue(again):  # a record does not say what files were left: only this does
        return problem, ", ".join(event.evidence for event in again.misconduct)
    return ("", "") if again.reward == 1.0 else ("not rewarded", again.reason)


def differing(recorded: Trajectory, again: Trajectory) -> str:
    """A diff of the first turn that came out otherwise, "" when none did."""
    for index, (old, new) in enumerate(zip(recorded.turns, again.turns, strict=True)):
        left, right = ([*t.observation.splitlines(), f"[{t.status}, exit {t.exit_code}]"] for t in (old, new))
        if left != right:
            names = (f"turn {index}, recorded", f"turn {index}, replayed")
            return "\n".join(difflib.unified_diff(left, right, *names, lineterm=""))
    if recorded.reward != again.reward:
        return f"reward {recorded.reward} was recorded, the replay gives {again.reward} ({again.reason})"
    return ""


# Stage 4


def sample_to_mark(path: Path, kept: Sequence[Trajectory], size: int, seed: int = 0) -> int:
    """Write a CSV of about `size` trajectories, as many of each stratum (family, teacher, with failures), to mark.

    The column `mark` is for a person: keep, drop or nothing. Returns how many there are.
    """
    strata: dict[str, list[Trajectory]] = defaultdict(list)
    for each in kept:
        failures = "failures" if any(turn.error for turn in each.turns) else "clean"
        strata[f"{each.task.family}, {each.policy}, {failures}"].append(each)
    share = max(1, size // max(1, len(strata)))
    rng, rows = random.Random(seed), []
    for stratum in sorted(strata):
        for each in rng.sample(strata[stratum], min(share, len(strata[stratum]))):
            shown = "\n".join(f"$ {turn.text}\n{turn.observation}" for turn in each.turns)
            rows.append({"id": key(each), "stratum": stratum, "instruction": each.task.instruction,
                         "transcript": shown, "mark": "", "note": ""})  # fmt: skip
    write_csv(path, rows, ("id", "stratum", "instruction", "transcript", "mark", "note"))
    return len(rows)


def read_marks(path: Path) -> dict[str, str]:
    """{id: keep or drop} of the rows that were marked. RecordError names the line of another mark."""
    with open(path, newline="", encoding="utf-8") as file:
        table = csv.DictReader(file)
        if not {"id", "mark"} <= set(table.fieldnames or ()):
            raise RecordError(f"{path}, line 1: the columns id and mark are needed; write the sample again")
        marks = {}
        for row in table:
            mark = (row["mark"] or "").strip().lower()
            if mark not in MARKS:
                raise RecordError(f"{path}, line {table.line_num}: mark {row['mark']!r}: write keep, drop or nothing")
            if mark:
                marks[row["id"]] = mark
    return marks


# All four


def threads_for(pool: Pool) -> int:
    """Threads that keep the boxes busy: containers wait, the simulated shell computes outside Python's lock."""
    return min(32 if pool.backend == "docker" else os.cpu_count() or 1, pool.size)


def run_filter(
    trajectories: Sequence[Trajectory],
    chat: ChatFormat,
    pool: Pool,
    *,
    policy: MaskPolicy | None = None,
    limits: Thresholds | None = None,
    judge: Judge | None = None,
    marks: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Filtered:
    """The trajectories that come through all stages, annotated. MiniRomeError when none does, saying where they went.

    marks: of `read_marks`; without them the last stage lets everything through and says so.
    """
    policy, limits, judge = policy or MaskPolicy(), limits or Thresholds(), judge or RuleJudge()
    for each in trajectories:
        annotate(each, policy)
    first = apply("heuristics", trajectories, lambda each: (heuristics(each, limits), ""))
    workers = 8 if isinstance(judge, EndpointJudge) else 1
    second = apply("judge", first.kept, lambda each: (judge(each), ""), workers=workers, note=judge.name)
    third = apply(
        "execution", second.kept, lambda each: replay(each, chat, pool), workers=threads_for(pool), note=pool.backend,
        progress=progress,
    )  # fmt: skip
    marks = marks or {}
    said = f"{len(marks)} marked" if marks else "nothing marked yet"
    dropped = {name for name, mark in marks.items() if mark == "drop"}
    last = apply(
        "inspection", third.kept, lambda each: ("marked drop" if key(each) in dropped else "", ""), note=said
    )
    stages = [stage for part in (first, second, third, last) for stage in part.stages]
    if trajectories and not last.kept:
        raise MiniRomeError("all rows were filtered away: " + "; ".join(f"{s.name} {s.why}" for s in stages if s.why))
    return Filtered(last.kept, stages)


def apply(
    name: str,
    trajectories: Sequence[Trajectory],
    verdict: Callable[[Trajectory], tuple[str, str]],
    workers: int = 1,
    note: str = "",
    progress: Progress | None = None,
) -> Filtered:
    """One stage: drop where `verdict` gives a reason; many at once with `workers` threads, in the order given."""
    stage, kept = Stage(name, len(trajectories), note=note), []
    with ThreadPoolExecutor(max_workers=workers) as threads:
        verdicts = map(verdict, trajectories) if workers == 1 else threads.map(verdict, trajectories)
        for index, (each, (reason, detail)) in enumerate(zip(trajectories, verdicts, strict=True), 1):
            if reason:
                stage.dropped.append(Dropped(each, name, reason, detail))
            else:
                kept.append(each)
            if progress is not None:
                progress(index, len(trajectories))
    return Filtered(kept, [stage])

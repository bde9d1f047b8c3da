"""The runs of one submission of one assignment, and what came back of them.

What comes out of a box may be forged, all of it: `messages` lets nothing through but short text and small integers in
the places where the harness puts them. Values and questions stay JSON; `wire.plain` reads them.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mini_rome.course import harness
from mini_rome.course.paper import library
from mini_rome.course.process import Ended
from mini_rome.course.runners import SUBMISSION, Runner
from mini_rome.errors import SandboxError

BUDGET_S = 240.0  # for all runs of one assignment; what is not run by then gets no points
TEXTS = ("import", "raises", "error", "verdict", "end")  # fields of a message that are text
NUMBERS = ("id", "case")
SAID = 500  # characters of a text, the harness's own are shorter


@dataclass
class Answer:
    """What came back of one job."""

    cases: dict[int, dict[str, Any]] = field(default_factory=dict)
    ended: bool = False  # every case was called
    left: int | str | None = None
    killed: int = 0  # processes alive at the end of its run
    reason: str = ""  # why it did not end
    forged: bool = False  # two different answers came for one case: one of them is not the harness's
    infra: bool = False  # the sandbox failed, not the submission


class Session:
    """One submission, one assignment, one budget of time."""

    def __init__(self, runner: Runner, source: bytes, allowed: tuple[str, ...], full: bool = False):
        """full: the whole library is put into the box, for the staff version; never for a submission."""
        self.runner = runner
        self.files = {SUBMISSION: source, **library(allowed, full)}
        self.left_s = BUDGET_S
        self.broken = ""  # what importing it raised: no run is tried after that

    def ask(self, jobs: Sequence[dict[str, Any]]) -> dict[int, Answer]:
        """Run jobs until each has an answer or a reason; every run settles at least one."""
        answers = {job["id"]: Answer() for job in jobs}
        todo = list(jobs)
        while todo:
            if self.broken or self.left_s <= 0:
                for job in todo:
                    answers[job["id"]].reason = self.broken or f"the {BUDGET_S:g} s of this assignment were used up"
                break
            settled = self._run(todo, answers)
            todo = [job for job in todo if job["id"] not in settled]
        return answers

    def _run(self, todo: list[dict[str, Any]], answers: dict[int, Answer]) -> set[int]:
        """One run of these jobs in a fresh box; the ids of those it settled."""
        first = todo[0]["id"]
        begun = time.monotonic()
        seconds = min(harness.IMPORT_S + 2 + sum(job["seconds"] for job in todo), self.left_s + 1)
        try:
            ended = self.runner.run(self.files, {"jobs": todo}, seconds)
        except SandboxError as error:
            answers[first].reason, answers[first].infra = f"not graded, the sandbox failed twice: {error}", True
            return {first}
        finally:
            self.left_s -= time.monotonic() - begun
        self._take(ended, answers)
        settled = {job["id"] for job in todo if answers[job["id"]].left is not None}
        if not settled and not self.broken:
            answers[first].reason = how(ended)
            settled = {first}
        for job in todo:
            if job["id"] in settled:
                close(answers[job["id"]], job, ended)
        return settled

    def _take(self, ended: Ended, answers: dict[int, Answer]) -> None:
        """The messages of a run into the answers of its jobs; the first word on the import counts."""
        imported = False
        for message in messages(ended.output):
            if "import" in message and not imported:
                imported, self.broken = True, message["import"]
            elif (answer := answers.get(message.get("id", -1))) is not None:
                take(answer, message)
        if not imported:
            self.broken = f"importing exercises.py {how(ended)}"


def messages(output: bytes) -> Iterator[dict[str, Any]]:
    """The messages among the lines of a run; other lines are a submission's own and mean nothing."""
    for line in output.split(b"\n"):
        if line.startswith(b"{"):
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if is_message(message):
                yield message


def is_message(message: Mapping[str, Any]) -> bool:
    """Whether all fields that are not values or questions have the type and size that the harness gives them.

    >>> is_message({"id": 0, "left": "timeout"}), is_message({"id": 0, "left": [[0]]})
    (True, False)
    """
    texts = [message[name] for name in TEXTS if name in message]
    numbers = [message[name] for name in NUMBERS if name in message]
    if "left" in message:
        (texts if isinstance(message["left"], str) else numbers).append(message["left"])
    short = all(isinstance(text, str) and len(text) <= SAID for text in texts)
    return short and all(type(number) is int and abs(number) < 1 << 32 for number in numbers)


def take(answer: Answer, message: dict[str, Any]) -> None:
    """One message into the answer of its job."""
    if "case" in message:
        answer.forged |= answer.cases.setdefault(message["case"], message) != message
    elif "left" in message and answer.left is None:
        answer.left = message["left"]
    elif message.get("end") == "ok":
        answer.ended = True


def close(answer: Answer, job: Mapping[str, Any], ended: Ended) -> None:
    """Why a job that did not call all its cases stopped."""
    answer.killed = ended.killed
    if answer.forged:
        answer.ended, answer.reason = False, "sent several answers"
    if answer.ended or answer.reason:
        return
    if answer.left == "timeout":
        answer.reason = f"did not end within {job['seconds']:g} s"
    elif answer.left == "processes":
        answer.reason = "ended without returning and left processes behind"
    elif answer.left == -signal.SIGKILL:
        answer.reason = "was killed: out of memory (the box has 2 GB)"
    else:
        answer.reason = f"ended its process (exit code {answer.left}) instead of returning"


def how(ended: Ended) -> str:
    """What ended a whole run."""
    if ended.exit_code == 128 + signal.SIGALRM:
        return f"took more than {harness.IMPORT_S} s"
    return {
        "timeout": "did not end in its time",
        "oom": "needed more than the 2 GB of the box",
        "pids_limit": "started more processes than the box allows",
        "output_limit": "wrote more than the grader reads",
    }.get(ended.status, f"ended the process (exit code {ended.exit_code})")

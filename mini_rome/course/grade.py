"""One submission of one assignment: send inputs into the box, compare what comes back, word the feedback.

All judging is here, in the grader's process. What comes out of the box is text that the submission may have forged:
it is parsed as JSON, never as objects, and counts only where it equals what the staff version returned for inputs
that the submission saw for the first time.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mini_rome.course import harness, wire
from mini_rome.course.compare import difference
from mini_rome.course.paper import Detection, Item, Paper, library
from mini_rome.course.process import Ended
from mini_rome.course.runners import SUBMISSION, Runner
from mini_rome.errors import SandboxError

BUDGET_S = 90.0  # for all runs of one assignment; what is not run by then gets no points
QUESTIONS = 24  # that one detection may ask of one implementation
QUESTION = 64 << 10  # characters of one of them
RIGHTS = 3  # how often the right implementation stands among the wrong ones: guessing does not pay


@dataclass(frozen=True)
class Result:
    """One line of feedback. said: empty when all points were earned; infra: the sandbox failed, not the student."""

    name: str
    function: str
    points: float
    earned: float
    said: str = ""
    infra: bool = False


@dataclass
class Answer:
    """What came back of one job."""

    cases: dict[int, dict[str, Any]] = field(default_factory=dict)
    ended: bool = False  # every case was called
    left: int | str | None = None
    killed: int = 0  # processes alive at the end of its run
    reason: str = ""  # why it did not end
    forged: bool = False  # two different answers came for one case: one of them is not the harness's
    infra: bool = False


class Session:
    """The runs of one submission of one assignment, under one budget of time."""

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
        begun = time.monotonic()
        seconds = min(harness.IMPORT_S + 2 + sum(job["seconds"] for job in todo), self.left_s + 1)
        try:
            ended = self.runner.run(self.files, {"jobs": todo}, seconds)
        except SandboxError as error:
            first = answers[todo[0]["id"]]
            first.reason, first.infra = f"not graded, the sandbox failed twice: {error}", True
            return {todo[0]["id"]}
        finally:
            self.left_s -= time.monotonic() - begun
        imported = False
        for message in messages(ended.output):
            if "import" in message and not imported:
                imported, self.broken = True, str(message["import"])[:500]
            elif (answer := answers.get(message.get("id", -1))) is not None:
                take(answer, message)
        if not imported and not self.broken:
            self.broken = f"importing exercises.py {how(ended)}"
        settled = {job["id"] for job in todo if answers[job["id"]].left is not None}
        if not settled and not self.broken:
            answers[todo[0]["id"]].reason = how(ended)
            settled = {todo[0]["id"]}
        for job in todo:
            if job["id"] in settled:
                close(answers[job["id"]], job, ended)
        return settled


def take(answer: Answer, message: Mapping[str, Any]) -> None:
    """One message into the answer of its job."""
    case = message.get("case")
    if isinstance(case, int):
        answer.forged |= answer.cases.setdefault(case, dict(message)) != message
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
    elif answer.left == -9:
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


def messages(output: bytes) -> Iterator[dict[str, Any]]:
    """The JSON objects among the lines of a run; other lines are a submission's own and mean nothing."""
    for line in output.split(b"\n"):
        if line.startswith(b"{"):
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(message.get("id", 0), int):
                yield message


def grade_source(paper: Paper, source: bytes, runner: Runner, seed: str, full: bool = False) -> list[Result]:
    """The results of one exercises.py, a result for each property and for each right and wrong implementation.

    `seed` shuffles the implementations. Never raises for what a submission does.
    """
    session = Session(runner, source, paper.allowed, full)
    jobs = [job_of(number, item) for number, item in enumerate(paper.items)]
    answers = session.ask([job for job, item in zip(jobs, paper.items, strict=True) if not item.alone])
    for job, item in zip(jobs, paper.items, strict=True):
        if item.alone:
            answers |= session.ask([job])
    results = [judge(item, answers[number]) for number, item in enumerate(paper.items)]
    for detection in paper.detections:
        results += detect(session, detection, random.Random(f"{seed}/{paper.assignment}/{detection.function}"))
    return results


def job_of(number: int, item: Item) -> dict[str, Any]:
    """What the box is told of an item: inputs, and nothing of what is expected."""
    job: dict[str, Any] = {"id": number, "function": item.function, "cases": item.cases, "seconds": item.seconds}
    return {**job, "gradient": item.gradient, "box": item.box}


def judge(item: Item, answer: Answer) -> Result:
    """All points, or none and the sentence with the first thing that is wrong."""
    said = first_wrong(item, answer)
    earned = 0 if said else item.points
    said = f"{item.says}: {said}" if said else ""
    return Result(item.name, item.function, item.points, earned, said, answer.infra)


def first_wrong(item: Item, answer: Answer) -> str:
    """Empty when every case came out as expected."""
    for number, expected in enumerate(item.expected):
        if answer.forged or number not in answer.cases:
            return f"case {number + 1} {answer.reason}" if answer.reason else f"case {number + 1} has no answer"
        if said := wrong_case(answer.cases[number], expected, item.rtol):
            return f"case {number + 1} of {len(item.expected)}: {said}"
    if not answer.ended:
        return answer.reason or "it did not return"
    if item.alone and answer.killed:
        return f"{answer.killed} of its processes were still alive at its end"
    return ""


def wrong_case(got: Mapping[str, Any], expected: Mapping[str, Any], rtol: float) -> str:
    """Empty when one outcome, a value or an exception, is the expected one."""
    if "raises" in expected:
        if got.get("raises") == expected["raises"]:
            return ""
        return f"must raise {expected['raises']}; {got.get('error', 'it returned')}"
    if "value" not in got:
        return str(got.get("error", "no value came back"))[:500]
    try:
        return difference(wire.plain(got["value"]), wire.plain(expected["value"]), rtol)
    except (ValueError, RecursionError) as error:
        return f"the answer cannot be read: {error}"


def detect(session: Session, detection: Detection, rng: random.Random) -> list[Result]:
    """Run a student's test on the right implementation, several times, and on each wrong one, in shuffled order.

    No implementation is in the box: the test's calls are answered from here, a round of runs for each question. So
    neither its code nor a name tells the wrong one.
    """
    variants = [("a right implementation", detection.right)] * RIGHTS + list(detection.wrong.items())
    rng.shuffle(variants)
    verdicts = rounds(session, detection, [implementation for _, implementation in variants])
    right = [verdicts[index] for index, (name, _) in enumerate(variants) if name == "a right implementation"]
    false_alarm = next((said or verdict for verdict, said in right if verdict != "holds"), "")
    share = detection.points / len(detection.wrong)
    results = []
    for index, (name, _) in enumerate(variants):
        if name == "a right implementation":
            continue
        verdict, said = verdicts[index]
        if false_alarm:
            said = f"the test does not hold for a right implementation, so it finds no bug: {false_alarm}"
        elif verdict == "holds":
            said = f"the test does not notice this bug: {name}"
        elif verdict != "fails":
            said = f"the test must fail by AssertionError on: {name}; {said}"
        else:
            said = ""
        results.append(Result(f"finds: {name}", detection.function, share, 0 if said else share, said))
    return sorted(results, key=lambda result: result.name)


def rounds(session: Session, detection: Detection, variants: Sequence[Any]) -> list[tuple[str, str]]:
    """(verdict, what was said) of the test for each implementation: holds, fails, broken."""
    known: list[list[Any]] = [[] for _ in variants]
    verdicts: dict[int, tuple[str, str]] = {}
    for _ in range(QUESTIONS + 1):
        open_ones = [index for index in range(len(variants)) if index not in verdicts]
        if not open_ones:
            break
        common = {"function": detection.function, "seconds": detection.seconds}
        answers = session.ask([{"id": index, "answers": known[index], **common} for index in open_ones])
        for index in open_ones:
            message = answers[index].cases.get(0, {})
            if "ask" in message and answers[index].ended:
                known[index].append([message["ask"], reply(variants[index], detection, message["ask"])])
            elif message.get("verdict") in ("holds", "fails", "broken") and answers[index].ended:
                verdicts[index] = (message["verdict"], str(message.get("error", ""))[:300])
            else:
                verdicts[index] = ("broken", answers[index].reason or "no answer")
    late = ("broken", f"it asked more than {QUESTIONS} questions, or other ones each time it ran")
    return [verdicts.get(index, late) for index in range(len(variants))]


def reply(implementation: Any, detection: Detection, question: Any) -> dict[str, Any]:
    """The output for arguments that a student chose: checked first, since they are computed with in this process."""
    try:
        arguments = wire.plain(question)
        if len(wire.dumps(question)) > QUESTION:
            raise ValueError("the arguments are too large")
        detection.check(*arguments)
        return {"value": wire.encode(implementation(*arguments))}
    except (ValueError, TypeError, RecursionError) as error:
        return {"raises": f"{error} (arguments refused)"}

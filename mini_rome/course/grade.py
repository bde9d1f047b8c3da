"""One submission of one assignment: send inputs into the box, compare what comes back, word the feedback.

All judging is here, in the grader's process. What comes out of the box is text that the submission may have forged:
it is parsed as JSON, never as objects, and counts only where it equals what the staff version returned for inputs
that the submission saw for the first time.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mini_rome.course import wire
from mini_rome.course.compare import difference
from mini_rome.course.detect import RIGHTS, detect
from mini_rome.course.paper import Detection, Item, Paper
from mini_rome.course.runners import Runner
from mini_rome.course.session import Answer, Session


@dataclass(frozen=True)
class Result:
    """One line of feedback. said: empty when all points were earned; infra: the sandbox failed, not the student."""

    name: str
    function: str
    points: float
    earned: float
    said: str = ""
    infra: bool = False


def grade_source(
    paper: Paper, source: bytes, runner: Runner, seed: str, full: bool = False, rights: int = RIGHTS
) -> list[Result]:
    """The results of one exercises.py, one for each property and for each bug that a test is to find.

    `seed` shuffles the implementations that a test is tried on, `rights` of them right. Never raises for what a
    submission does.
    """
    session = Session(runner, source, paper.allowed, full)
    jobs = [job_of(number, item) for number, item in enumerate(paper.items)]
    answers = session.ask([job for job, item in zip(jobs, paper.items, strict=True) if not item.alone])
    for job, item in zip(jobs, paper.items, strict=True):
        if item.alone:
            answers |= session.ask([job])
    results = [judge(item, answers[number]) for number, item in enumerate(paper.items)]
    for detection in paper.detections:
        rng = random.Random(f"{seed}/{paper.assignment}/{detection.function}")
        results += results_of(detection, *detect(session, detection, rng, rights))
    return results


def job_of(number: int, item: Item) -> dict[str, Any]:
    """What the box is told of an item: inputs, and nothing of what is expected."""
    job: dict[str, Any] = {"id": number, "function": item.function, "cases": item.cases, "seconds": item.seconds}
    return {**job, "gradient": item.gradient, "box": item.box}


def results_of(detection: Detection, said: Mapping[str, str], infra: bool) -> list[Result]:
    """One for each bug; they share the points."""
    share = detection.points / len(detection.wrong)
    return [
        Result(f"finds: {bug}", detection.function, share, 0 if why else share, why, infra)
        for bug, why in said.items()
    ]  # fmt: skip


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
        return got.get("error", "no value came back")
    try:
        return difference(wire.plain(got["value"]), wire.plain(expected["value"]), rtol)
    except (ValueError, RecursionError) as error:
        return f"the answer cannot be read: {error}"

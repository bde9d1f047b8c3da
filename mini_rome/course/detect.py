"""A student's test, tried on a right implementation and on wrong ones, none of which is in the box.

The test's calls are answered from here. Each run gets one state, the questions so far with their answers, alone in a
box that was emptied: nothing in it tells what another implementation answered, so a test cannot vote the odd one out.
"""

from __future__ import annotations

import random
from typing import Any

from mini_rome.course import wire
from mini_rome.course.paper import Detection, Implementation
from mini_rome.course.session import Session

QUESTIONS = 24  # that a test may ask of one implementation
QUESTION = 64 << 10  # characters of one of them
RIGHTS = 3  # how often the right implementation stands among the wrong ones: guessing does not pay
RIGHT = "a right implementation"
# What check and implementation may raise for arguments that a student chose: then the test is told that.
REFUSALS = (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RuntimeError)


class Examiner:
    """One test and its runs."""

    def __init__(self, session: Session, detection: Detection):
        self.session = session
        self.detection = detection
        self.outcomes: dict[str, dict[str, Any]] = {}  # of states that ask, and of the empty one
        self.infra = False

    def verdict(self, implementation: Implementation) -> tuple[str, str]:
        """(holds | fails | broken, what was said) of the test for one implementation.

        A state that another implementation led to asks the same question again and is not run for it; the last one,
        of which the verdict comes, is.
        """
        known: list[list[Any]] = []
        while len(known) <= QUESTIONS:
            key = wire.dumps(known)
            outcome = self.outcomes.get(key) or self._run(known)
            if "ask" in outcome or not known:
                self.outcomes[key] = outcome
            if "ask" not in outcome:
                return outcome["verdict"], outcome.get("error", "")
            try:
                arguments = wire.plain(outcome["ask"])
            except (ValueError, RecursionError) as error:
                return "broken", f"the arguments cannot be read: {error}"
            if len(wire.dumps(outcome["ask"])) > QUESTION:
                return "broken", "the arguments are too large"
            known.append([outcome["ask"], reply(implementation, self.detection, arguments)])
        return "broken", f"it asked more than {QUESTIONS} questions, or other ones each time it ran"

    def _run(self, known: list[list[Any]]) -> dict[str, Any]:
        """{"ask": question} or {"verdict": ..., "error": ...}."""
        job = {"id": 0, "function": self.detection.function, "answers": known, "seconds": self.detection.seconds}
        answer = self.session.ask([job])[0]
        self.infra |= answer.infra
        message = answer.cases.get(0, {})
        if answer.ended and ("ask" in message or message.get("verdict") in ("holds", "fails", "broken")):
            return message
        return {"verdict": "broken", "error": answer.reason or "no answer"}


def detect(session: Session, detection: Detection, rng: random.Random, rights: int) -> tuple[dict[str, str], bool]:
    """({bug: why it was not found, empty where it was}, whether the sandbox failed), bugs sorted by name.

    `rng` shuffles the implementations, the right one `rights` times among them.
    """
    examiner = Examiner(session, detection)
    variants = [RIGHT] * rights + list(detection.wrong)
    rng.shuffle(variants)
    said: dict[str, str] = {}
    for name in variants:
        verdict, words = examiner.verdict(detection.wrong.get(name, detection.right))
        if name == RIGHT and verdict != "holds":
            alarm = f"the test does not hold for {RIGHT}, so it finds no bug: {words or verdict}"
            return dict.fromkeys(sorted(detection.wrong), alarm), examiner.infra
        said[name] = missed(name, verdict, words)
    return {name: said[name] for name in sorted(detection.wrong)}, examiner.infra


def missed(name: str, verdict: str, words: str) -> str:
    """Empty where a test failed on a bug, by AssertionError."""
    if verdict == "fails":
        return ""
    if verdict == "holds":
        return f"the test does not notice this bug: {name}"
    return f"the test must fail by AssertionError on: {name}; {words}"


def reply(implementation: Implementation, detection: Detection, arguments: Any) -> dict[str, Any]:
    """The output for arguments that a student chose: checked first, since they are computed with in this process."""
    try:
        detection.check(*arguments)
        return {"value": wire.encode(implementation(*arguments))}
    except REFUSALS as error:
        return {"raises": f"{error} (arguments refused)"[:300]}

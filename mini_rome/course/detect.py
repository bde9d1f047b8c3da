"""A student's test, tried on a right implementation and on wrong ones, none of which is in the box.

The test's calls are answered from here. In a box each run gets one state, the questions so far with their answers,
alone and in a box that was emptied: nothing in it tells what another implementation answered, so a test cannot vote
the odd one out. A student's own `check` has nobody to keep from that, and one run takes a state of each.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from mini_rome.course import wire
from mini_rome.course.paper import Detection, Implementation
from mini_rome.course.session import Answer, Session

QUESTIONS = 24  # that a test may ask of one implementation
QUESTION = 64 << 10  # characters of one of them
RIGHTS = 3  # how often the right implementation stands among the wrong ones: guessing does not pay
RIGHT = "a right implementation"
# What check and implementation may raise for arguments that a student chose: then the test is told that.
REFUSALS = (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RuntimeError)


Verdict = tuple[str, str]  # holds | fails | broken, and what was said
Known = list[list[Any]]  # [question, answer] so far: a state
Outcome = dict[str, Any]  # {"ask": question} or {"verdict": ..., "error": ...}


def examined(implementation: Implementation, detection: Detection) -> Generator[Known, Outcome, Verdict]:
    """The test on one implementation: yields the states to run, is sent their outcomes, returns the verdict."""
    known: Known = []
    while len(known) <= QUESTIONS:
        outcome = yield known
        if "ask" not in outcome:
            return outcome["verdict"], outcome.get("error", "")
        try:
            arguments = wire.plain(outcome["ask"])
        except (ValueError, RecursionError) as error:
            return "broken", f"the arguments cannot be read: {error}"
        if len(wire.dumps(outcome["ask"])) > QUESTION:
            return "broken", "the arguments are too large"
        known = [*known, [outcome["ask"], reply(implementation, detection, arguments)]]
    return "broken", f"it asked more than {QUESTIONS} questions, or other ones each time it ran"


class Examiner:
    """One test and its runs."""

    def __init__(self, session: Session, detection: Detection):
        self.session = session
        self.detection = detection
        self.outcomes: dict[str, Outcome] = {}  # of states that ask, and of the empty one
        self.infra = False

    def apart(self, implementations: Sequence[Implementation]) -> Iterator[Verdict]:
        """The verdict on each, every state in a run of its own.

        A state that another implementation led to asks the same question again and is not run for it; the last one,
        of which the verdict comes, is.
        """
        for implementation in implementations:
            rest = examined(implementation, self.detection)
            known = next(rest)
            while True:
                key = wire.dumps(known)
                outcome = self.outcomes.get(key) or self._run([known])[0]
                if "ask" in outcome or not known:
                    self.outcomes[key] = outcome
                try:
                    known = rest.send(outcome)
                except StopIteration as end:
                    yield end.value
                    break

    def together(self, implementations: Sequence[Implementation]) -> Iterator[Verdict]:
        """The same where nobody is to be kept from voting: the next state of all of them in one run."""
        rests = [examined(implementation, self.detection) for implementation in implementations]
        states = {number: next(rest) for number, rest in enumerate(rests)}
        verdicts: dict[int, Verdict] = {}
        while states:
            for number, outcome in zip(list(states), self._run(list(states.values())), strict=True):
                try:
                    states[number] = rests[number].send(outcome)
                except StopIteration as end:
                    verdicts[number] = end.value
                    del states[number]
        yield from (verdicts[number] for number in range(len(rests)))

    def _run(self, states: Sequence[Known]) -> list[Outcome]:
        job = {"function": self.detection.function, "seconds": self.detection.seconds}
        answers = self.session.ask([{**job, "id": n, "answers": known} for n, known in enumerate(states)])
        return [self._outcome(answers[n]) for n in range(len(states))]

    def _outcome(self, answer: Answer) -> Outcome:
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
    names = [RIGHT] * rights + list(detection.wrong)
    rng.shuffle(names)
    implementations = [detection.wrong.get(name, detection.right) for name in names]
    verdicts = (examiner.together if session.runner.trusting else examiner.apart)(implementations)
    said: dict[str, str] = {}
    for name, (verdict, words) in zip(names, verdicts, strict=True):
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

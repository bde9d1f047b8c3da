"""Inside the box: import a submission, call its functions with the inputs that came, send back what they return.

Nothing here judges: no expected value, no test and no point is in this process or in the box. One forked child for
each job, so that one that hangs, exits or fills the memory takes no other with it; after a hang the rest is left to
a fresh box. One JSON object a line:

    {"import": ""}                             or what importing the submission raised
    {"id": 3, "case": 0, "value": ...}         or "error" (what was raised), or "ask" (of a detection)
    {"id": 3, "end": "ok"}                     written by the child: all cases were called
    {"id": 3, "left": 0}                       by the parent: exit code, minus a signal, or why the run stops
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from mini_rome.course import wire

IMPORT_S = 20  # for importing a submission, by SIGALRM
MEMORY = 1536 << 20  # bytes of private memory a job may have before Python raises MemoryError; the box has 2 GB
NAME = 80  # characters of an exception's name
Say = Callable[[dict[str, Any]], None]


class Ask(BaseException):
    """A detection asked for an output that is not known yet: no `except Exception` of a test may swallow it."""


class Implementation:
    """What a detection is given to test: answers come from the grader, one round after the question."""

    def __init__(self, answers: list[list[Any]]):
        self.answers = {wire.dumps(arguments): answer for arguments, answer in answers}

    def __call__(self, *arguments: Any) -> Any:
        question = wire.encode(arguments)
        answer = self.answers.get(wire.dumps(question))
        if answer is None:
            raise Ask(question)
        if "raises" in answer:
            raise ValueError(answer["raises"])
        return wire.decode(answer["value"])


def main() -> None:
    """Serve the one request that is on stdin."""
    with os.fdopen(os.dup(0), "rb") as source:
        request = json.loads(source.read())
    out, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for end in (0, 1, 2):
        os.dup2(null, end)

    def say(message: dict[str, Any]) -> None:
        data = memoryview(b"\n" + wire.dumps(message).encode() + b"\n")  # a newline first: after a half line
        while data:
            data = data[os.write(out, data) :]

    module = load(request["path"], say)
    if module is None:
        return
    for job in request["jobs"]:
        left = supervise(job, module, say)
        say({"id": job["id"], "left": left})
        if isinstance(left, str) or left < 0:
            return


def load(path: str, say: Say) -> ModuleType | None:
    """The submission as module `exercises`; None, and said why, when it cannot be imported."""
    spec = importlib.util.spec_from_file_location("exercises", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["exercises"] = module
    signal.alarm(IMPORT_S)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # SystemExit too: whatever a submission raises is its answer
        say({"import": explain(error)})
        return None
    signal.alarm(0)
    say({"import": ""})
    return module


def supervise(job: dict[str, Any], module: ModuleType, say: Say) -> int | str:
    """Run one job in a child: its exit code, minus the signal that ended it, `timeout`, or `processes` (left)."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
            random.seed(0)  # a detection is run once for each question: it must draw the same again
            (detect if "answers" in job else call)(job, module, say)
        finally:
            os._exit(0)
    deadline, pause = time.monotonic() + job["seconds"], 0.0005
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return "processes" if kill_group(pid) else os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(2 * pause, 0.01)
    kill_group(pid)
    os.waitpid(pid, 0)
    return "timeout"


def kill_group(pid: int) -> bool:
    """Kill what is left of a job's process group; whether there was something."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def call(job: dict[str, Any], module: ModuleType, say: Say) -> None:
    """Every case of one property."""
    for number, case in enumerate(job["cases"]):
        try:
            answer = {"value": wire.encode(value_of(getattr(module, job["function"]), wire.decode(case), job))}
        except Exception as error:
            answer = {"raises": type(error).__name__[:NAME], "error": explain(error)}
        say({"id": job["id"], "case": number, **answer})
    say({"id": job["id"], "end": "ok"})


def value_of(function: Callable[..., Any], arguments: list[Any], job: dict[str, Any]) -> Any:
    """What a function returns; with `gradient` (returned scalar, its gradient for that argument); with `box` it is
    given a simulated box first."""
    if job.get("box"):
        from mini_rome.sandbox import make

        with make("sim") as box:
            return function(box, *arguments)
    index = job.get("gradient")
    if index is None:
        return function(*arguments)
    arguments[index].requires_grad_()
    value = function(*arguments)
    value.backward()
    return value, arguments[index].grad


def detect(job: dict[str, Any], module: ModuleType, say: Say) -> None:
    """A student's test on one implementation: it holds, it fails by AssertionError, or there is a question first."""
    try:
        getattr(module, job["function"])(Implementation(job["answers"]))
        answer: dict[str, Any] = {"verdict": "holds"}
    except Ask as question:
        answer = {"ask": question.args[0]}
    except AssertionError as error:
        answer = {"verdict": "fails", "error": explain(error)}
    except Exception as error:
        answer = {"verdict": "broken", "error": explain(error)}
    say({"id": job["id"], "case": 0, **answer})
    say({"id": job["id"], "end": "ok"})


def explain(error: BaseException) -> str:
    """`TypeError: ... (exercises.py, line 12)`: the last line of the submission that took part."""
    said = f"{type(error).__name__[:NAME]}: {str(error)[:300]}".removesuffix(": ")
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename.endswith("exercises.py")]
    return f"{said} (exercises.py, line {lines[-1]})" if lines else said

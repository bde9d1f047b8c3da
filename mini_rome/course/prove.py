"""The proof of the grader: what each kind of submission must get, graded in the same boxes, as a table of claims."""

from __future__ import annotations

import inspect
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

from mini_rome.course import attacks
from mini_rome.course.grade import Result, grade_source
from mini_rome.course.paper import Paper, load_module, make_paper
from mini_rome.course.release import release, skeleton
from mini_rome.course.runners import Boxed, Runner

# Wrong answers that can be made of any right one.
CHANGE = '''
def _change(value, kind):
    if isinstance(value, dict):
        return {key: _change(item, kind) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_change(item, kind) for item in value]
    if isinstance(value, (str, bytes)):
        return {"all zeros": value[:0], "sign flip": value[::-1], "doubling": value * 2}[kind]
    if value is None or isinstance(value, bool):
        return {"all zeros": False, "sign flip": not value, "doubling": 2 * int(value or 1)}[kind]
    if type(value).__module__ == "torch" and value.dtype.is_floating_point is False:
        return {"all zeros": value * 0, "sign flip": -1 * value.int(), "doubling": 2 * value.int()}[kind]
    return {"all zeros": 0 * value, "sign flip": -value, "doubling": 2 * value}[kind]
'''
KINDS = ("all zeros", "sign flip", "doubling")
TESTS = {"the test never fails": "return None", "the test fails always": "assert False, 'wrong'"}


@dataclass(frozen=True)
class Trial:
    """One submission, and what must come of it: `fault` says what did not, or nothing."""

    claim: str
    name: str
    paper: Paper
    source: str
    full: bool  # the library is in the box: a submission made of the staff version
    fault: Callable[[list[Result]], str]
    seed: str = "0"


def points(results: Sequence[Result]) -> float:
    return round(sum(result.earned for result in results), 6)


def must_have(wanted: float, word: str = "") -> Callable[[list[Result]], str]:
    """Exactly so many points; every sentence holds `word`."""

    def fault(results: list[Result]) -> str:
        if points(results) != wanted:
            lost = [f"{result.name}: {result.said}" for result in results if result.said]
            return f"{points(results):g} points instead of {wanted:g}; {lost[:2]}"
        return next((f"no {word} in: {result.said}" for result in results if word not in result.said), "")

    return fault


def must_lose(results: list[Result]) -> str:
    return "" if points(results) < sum(result.points for result in results) else "all points"


def must_keep_others(function: str, word: str) -> Callable[[list[Result]], str]:
    """No points for `function`, for a reason with `word`; all for what was graded besides it."""

    def fault(results: list[Result]) -> str:
        mine = [result for result in results if result.function == function]
        others = [result for result in results if result.function != function]
        if points(mine) or not all(word in result.said for result in mine):
            return f"{function} has {points(mine):g} points; {[result.said for result in mine][:1]}"
        lost = [f"{result.function}, {result.name}: {result.said}" for result in others if result.said]
        return f"others lost points: {lost[0]}" if lost else ""

    return fault


def trials(folder: Path, seeds: Sequence[str]) -> Iterator[Trial]:
    """All submissions that one assignment is proved with."""
    staff = (folder / "exercises.py").read_text()
    for seed in seeds:
        paper = make_paper(folder, seed)
        yield Trial(f"the staff version has all points, seed {seed}", "staff", paper, staff, True,
                    must_have(paper.points), seed)  # fmt: skip
    bare = skeleton(staff, paper.allowed)
    yield Trial("the skeleton has none, every test fails with NotImplementedError", "skeleton", paper, bare, False,
                must_have(0, "NotImplementedError"))  # fmt: skip
    yield from mutants(folder, paper, staff)
    for name, body in attacks.BODIES.items():
        yield Trial("an attack has no points", name, paper, attacks.with_body(bare, body), False, must_have(0))
    for name, body in attacks.AT_IMPORT.items():
        yield Trial("an attack has no points", name, paper, f"{bare}\n\n{body}\n", False, must_have(0))
    first, without = paper.items[0].function, replace(paper, detections=[])
    for name, (body, word) in attacks.RUIN.items():
        source = attacks.with_body(staff, body, [first])
        yield Trial("one ruined exercise costs its own points, with a reason", f"{first} {name}", without, source,
                    True, must_keep_others(first, word))  # fmt: skip


def mutants(folder: Path, paper: Paper, staff: str) -> Iterator[Trial]:
    """Every exercise answered wrongly, in the general ways and in those of mutants.py."""
    tests = {detection.function for detection in paper.detections}
    for function in attacks.functions(staff):
        if function in tests:
            for name, body in TESTS.items():
                source = attacks.with_body(staff, body, [function])
                yield Trial("a test that tells nothing has no points", f"{function}: {name}", paper.only(function),
                            source, True, must_have(0))  # fmt: skip
            continue
        for kind in KINDS:
            body = f"return _change(_staff(*arguments), {kind!r})"
            source = attacks.with_body(f"{staff}\n{CHANGE}\n\n_staff = {function}", body, [function])
            yield Trial("zeros, flipped signs and doubles lose points", f"{function}: {kind}", paper.only(function),
                        source, True, must_lose)  # fmt: skip
    code = (folder / "mutants.py").read_text()
    for name, label in labels(folder).items():
        function = name.partition("__")[0]
        source = f"{staff}\n\n{future_less(code)}\n\n{function} = {name}\n"
        yield Trial("a common wrong answer loses points", f"{function}: {label}", paper.only(function), source, True,
                    must_lose)  # fmt: skip


def labels(folder: Path) -> dict[str, str]:
    """{FUNCTION__name: what is wrong} of mutants.py."""
    members = vars(load_module(folder / "mutants.py")).items()
    found = {name: value for name, value in members if "__" in name.strip("_") and inspect.isfunction(value)}
    return {name: (inspect.getdoc(value) or name) for name, value in found.items()}


def future_less(code: str) -> str:
    return re.sub(r"^from __future__ import .*$", "", code, flags=re.M)


def run_trial(trial: Trial, runners: SimpleQueue[Runner]) -> tuple[Trial, str, float]:
    """(trial, its fault, seconds)."""
    runner = runners.get()
    begun = time.monotonic()
    try:
        results = grade_source(trial.paper, trial.source.encode(), runner, trial.seed, trial.full)
    finally:
        runners.put(runner)
    return trial, trial.fault(results), time.monotonic() - begun


def release_fault(folders: list[Path]) -> str:
    """Two releases: the same bytes. `release` itself refuses lines of staff bodies and stale snapshots."""
    with tempfile.TemporaryDirectory() as scratch:
        first, second = (release(folders, Path(scratch, name)) for name in "ab")
        same = all(Path(scratch, "a", name).read_bytes() == Path(scratch, "b", name).read_bytes() for name in first)
    return "" if same and first == second else "the bytes differ"


def prove(folders: list[Path], seeds: Sequence[str], jobs: int = 2) -> int:
    """Grade all trials, print one line for each claim and what failed; 0 if every claim holds."""
    runners: SimpleQueue[Runner] = SimpleQueue()
    made: list[Runner] = [Boxed() for _ in range(jobs)]
    for runner in made:
        runners.put(runner)
    kinds: dict[str, list[str]] = defaultdict(list)
    kinds["two releases have the same bytes, without a line of a staff body"].append(release_fault(folders))
    slowest: dict[str, float] = defaultdict(float)
    todo = [trial for folder in folders for trial in trials(folder, seeds)]
    try:
        with ThreadPoolExecutor(jobs) as pool:
            ended = pool.map(lambda each: run_trial(each, runners), todo)
            for done, (trial, fault, seconds) in enumerate(ended, start=1):
                name = f"{trial.paper.assignment}, {trial.name}"
                kinds[trial.claim].append(f"{name}: {fault}" if fault else "")
                slowest[trial.claim] = max(slowest[trial.claim], seconds)
                if fault or seconds > 10 or done % 25 == 0:
                    print(f"[{done}/{len(todo)}] {name} ({seconds:.1f} s){': ' + fault if fault else ''}", flush=True)
    finally:
        for runner in made:
            runner.close()
    for claim, faults in kinds.items():
        held = sum(not fault for fault in faults)
        mark = "ok  " if held == len(faults) else "FAIL"
        print(f"{mark} {held:>3} of {len(faults):<3} {claim} (slowest {slowest[claim]:.1f} s)")
    return 0 if all(not fault for faults in kinds.values() for fault in faults) else 1

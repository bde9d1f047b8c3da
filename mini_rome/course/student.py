"""What a released folder uses: the public tests in the student's own process, and `check`, which counts points."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from mini_rome.course import harness, wire
from mini_rome.course.grade import Result, grade_source, wrong_case
from mini_rome.course.paper import PUBLIC_SEED, Detection, read_snapshot
from mini_rome.course.runners import Local
from mini_rome.errors import ConfigError


def names(folder: Path) -> list[str]:
    """The names of a folder's public tests."""
    paper = read_snapshot(folder)
    return [f"{item.function}: {item.name}" for item in paper.items] + [each.function for each in paper.detections]


def verify(folder: Path, module: ModuleType, name: str) -> None:
    """One public test on a module, in this process; AssertionError with its sentence, or what the code raised."""
    paper = read_snapshot(folder)
    for item in paper.items:
        if name == f"{item.function}: {item.name}":
            settings = {"gradient": item.gradient, "box": item.box}
            for number, (case, expected) in enumerate(zip(item.cases, item.expected, strict=True), start=1):
                got = outcome(getattr(module, item.function), wire.decode(case), settings, "raises" in expected)
                said = wrong_case(got, expected, item.rtol)
                assert not said, f"{item.says}: case {number} of {len(item.cases)}: {said}"
    for detection in paper.detections:
        if name == detection.function:
            verify_detection(getattr(module, name), detection)


def outcome(
    function: Callable[..., Any], arguments: list[Any], settings: dict[str, Any], refusal: bool
) -> dict[str, Any]:
    """What a function returns, or raises where a refusal is asked for; other exceptions are for the debugger."""
    try:
        return {"value": wire.encode(harness.value_of(function, arguments, settings))}
    except Exception as error:
        if not refusal:
            raise
        return {"raises": type(error).__name__, "error": harness.explain(error)}


def verify_detection(test: Callable[[Any], None], detection: Detection) -> None:
    """The student's test holds for the right implementation and fails for the given wrong one."""
    test(detection.right)
    for name, wrong in detection.wrong.items():
        try:
            test(wrong)
        except AssertionError:
            continue
        raise AssertionError(f"the test does not notice this bug: {name}")


def case(folder: Path | str, name: str, number: int) -> tuple[list[Any], Any]:
    """(arguments, expected) of one case of a public test, as `check` names and counts it, to look at or debug with.

    expected: plain data, or {"raises": the name of the exception}. ConfigError for a case that is not there.
    """
    for item in read_snapshot(Path(folder)).items:
        if item.name == name and 1 <= number <= len(item.cases):
            expected = item.expected[number - 1]
            value = wire.plain(expected["value"]) if "value" in expected else expected
            return wire.decode(item.cases[number - 1]), value
    raise ConfigError(f"case({str(folder)!r}, {name!r}, {number}): no such case; `mini-rome course check` names them")


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """For the handout: what an exercise returns, or a word that it is not written yet."""
    try:
        return function(*arguments)
    except NotImplementedError:
        return f"{function.__name__} is not written yet"


def check(folder: Path) -> int:
    """Run the public tests of a folder in processes of this machine and print the points; 0 if all were earned."""
    paper = read_snapshot(folder)
    results = grade_source(paper, (folder / "exercises.py").read_bytes(), Local(trusting=True), PUBLIC_SEED, rights=1)
    print(f"{paper.assignment}: about {paper.hours:g} hours, {paper.points} points; public tests, other inputs count")
    print("\n".join(lines_of(results)))
    earned = sum(result.earned for result in results)
    public = sum(result.points for result in results)
    print(f"{earned:g} of {public:g} points")
    names_of_items = {item.name for item in paper.items}
    if wrong := [result.name for result in results if result.said and result.name in names_of_items]:
        print(f"To see a case: from mini_rome.course.student import case; case({str(folder)!r}, {wrong[0]!r}, 1)")
    return 0 if earned == public else 1


def lines_of(results: list[Result]) -> list[str]:
    """One line for each result, and the sentence below one that failed."""
    lines = []
    for result in results:
        mark = "ok  " if not result.said else "FAIL"
        lines.append(f"{mark} {result.earned:>4g}/{result.points:<4g} {result.function}: {result.name}")
        if result.said:
            lines.append(f"     {result.said}")
    return lines

"""What an assignment asks: its properties with points, its detections, and the paper made of them for one seed.

An assignment is a folder: exercises.py (the staff version, whose bodies are calls of this package), properties.py
(what must hold, as seeded generators of inputs), given.py (for the student: one right and one wrong implementation
to write a test against), bugs.py (more wrong ones, for the grader), mutants.py (wrong answers, for the proof),
handout.ipynb, snapshots.json (the paper of the public seed, which is what a student gets).

Expected outputs are the staff version's: the library is the solution, and nothing is written twice.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from mini_rome.course import harness, wire
from mini_rome.errors import ConfigError

ASSIGNMENTS = Path(__file__).resolve().parents[2] / "notebooks" / "assignments"
PACKAGE = Path(__file__).resolve().parents[1]
PUBLIC_SEED = "public"  # of the snapshots; an instructor's own is a number or a word that no student knows
ALWAYS = ("__init__.py", "types.py", "errors.py", "course/__init__.py", "course/wire.py", "course/harness.py")
Implementation = Callable[..., Any]


@dataclass(frozen=True)
class Property:
    """One thing that must hold of a function of exercises.py, worth `points`, all or none.

    cases: seeded inputs, a list of argument tuples. says: the sentence of the failing test. gradient: the index of
    an argument, if the returned scalar's gradient for it is asked for as well. box: a simulated box is the first
    argument. alone: run by itself, and no process of it may be left alive at its end.
    """

    name: str
    points: int
    function: str
    cases: Callable[[random.Random], list[tuple[Any, ...]]]
    says: str
    gradient: int | None = None
    box: bool = False
    alone: bool = False
    seconds: float = 3.0
    rtol: float = 1e-6  # of each expected number


@dataclass(frozen=True)
class Detection:
    """A test that the student writes: it must hold for `right` and fail, by AssertionError, for every one of `wrong`.

    check: raises ValueError for arguments that `right` and `wrong` must not be run on here: the student chose them.
    """

    function: str
    points: int
    right: Implementation
    wrong: Mapping[str, Implementation]
    check: Callable[..., None]
    seconds: float = 3.0


@dataclass(frozen=True)
class Item:
    """A property with the inputs of one seed and the expected outcomes, both as encoded data."""

    name: str
    points: int
    function: str
    says: str
    cases: list[Any]
    expected: list[dict[str, Any]]  # {"value": ...} or {"raises": name of the exception}
    gradient: int | None = None
    box: bool = False
    alone: bool = False
    seconds: float = 3.0
    rtol: float = 1e-6


@dataclass(frozen=True)
class Paper:
    """An assignment under one seed."""

    assignment: str
    hours: float
    allowed: tuple[str, ...]  # modules and subpackages of mini_rome that a submission may import
    items: list[Item]
    detections: list[Detection] = field(default_factory=list)

    @property
    def points(self) -> int:
        return sum(item.points for item in self.items) + sum(each.points for each in self.detections)

    def only(self, function: str) -> Paper:
        """What is asked of one function."""
        items = [item for item in self.items if item.function == function]
        return replace(self, items=items, detections=[each for each in self.detections if each.function == function])


def load_module(path: Path) -> ModuleType:
    """A file of the course as a module, under a name of its own."""
    name = f"mini_rome_course_{path.parent.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"{path} is not there: an assignment's folder needs it")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def assignment_folders(root: Path = ASSIGNMENTS) -> list[Path]:
    """Folders of the assignments, by name. ConfigError where there is none."""
    found = sorted(path.parent for path in root.glob("*/properties.py"))
    if not found:
        raise ConfigError(f"--assignments {root}: no assignment there; a checkout has them in notebooks/assignments")
    return found


def make_paper(folder: Path, seed: str) -> Paper:
    """The paper of an assignment under a seed: inputs drawn, expected outcomes by the staff version, bugs added."""
    asked, staff = load_module(folder / "properties.py"), load_module(folder / "exercises.py")
    items = [make_item(each, staff, random.Random(f"{seed}/{folder.name}/{each.name}")) for each in asked.PROPERTIES]
    bugs = load_module(folder / "bugs.py").BUGS
    detections = [
        replace(each, wrong={**each.wrong, **bugs.get(each.function, {})})
        for each in load_module(folder / "given.py").DETECTIONS
    ]
    return Paper(folder.name, asked.HOURS, asked.ALLOWED, items, detections)


def make_item(asked: Property, staff: ModuleType, rng: random.Random) -> Item:
    """Draw the inputs, encode them before the staff version sees them, and record what it answers."""
    names = ("name", "points", "function", "says", "gradient", "box", "alone", "seconds", "rtol")
    settings = {name: getattr(asked, name) for name in names}
    cases = [wire.encode(arguments) for arguments in asked.cases(rng)]
    expected: list[dict[str, Any]] = []
    for case in cases:
        function = getattr(staff, asked.function)
        try:
            expected.append({"value": wire.encode(harness.value_of(function, wire.decode(case), settings))})
        except Exception as error:  # the staff version's refusal is what is asked for
            expected.append({"raises": type(error).__name__})
    return Item(cases=cases, expected=expected, **settings)


def snapshot_text(paper: Paper) -> str:
    """The paper as the student gets it, without the detections' implementations: one item a line."""
    head = {"assignment": paper.assignment, "hours": paper.hours, "allowed": list(paper.allowed)}
    lines = [wire.dumps(asdict(item)) for item in paper.items]
    return "\n".join([json.dumps(head), *lines]) + "\n"


def read_snapshot(folder: Path) -> Paper:
    """The public paper of a released (or staff) folder: snapshots.json and given.py."""
    path = folder / "snapshots.json"
    try:
        head, *lines = path.read_text().splitlines()
        parts = json.loads(head)
        items = [Item(**json.loads(line)) for line in lines]
        allowed = tuple(parts["allowed"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): give the folder of an assignment, as released") from None
    return Paper(parts["assignment"], parts["hours"], allowed, items, load_module(folder / "given.py").DETECTIONS)


def library(allowed: tuple[str, ...], full: bool = False) -> dict[str, bytes]:
    """{path: contents} of the modules of mini_rome that come into the box; `full`, for the staff version, is all."""
    paths = [PACKAGE / name for name in ALWAYS]
    for name in allowed:
        place = PACKAGE / name
        paths += sorted(place.glob("*.py")) if place.is_dir() else [PACKAGE / f"{name}.py"]
    if full:
        paths = sorted(PACKAGE.rglob("*.py"))
    return {f"lib/{path.relative_to(PACKAGE.parent).as_posix()}": path.read_bytes() for path in dict.fromkeys(paths)}

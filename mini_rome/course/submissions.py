"""Many submissions in one command: read zips without unpacking them, grade several at once, write what came out."""

from __future__ import annotations

import struct
import sys
import time
import traceback
import zipfile
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue

from mini_rome.course.grade import Result, grade_source
from mini_rome.course.paper import PUBLIC_SEED, Paper
from mini_rome.course.runners import Boxed, Runner
from mini_rome.errors import ConfigError
from mini_rome.runs import write_csv, write_json

SOURCE = 256 << 10  # bytes of one exercises.py
ARCHIVE = 16 << 20  # bytes of one zip: its table of contents is read whole
PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # unpacked a piece at a time; others ask for memory first
# What zipfile makes of a damaged or forged zip; a NotImplementedError is a RuntimeError.
UNREADABLE = (OSError, EOFError, ValueError, RuntimeError, struct.error, zlib.error, zipfile.BadZipFile)
HEAD = ("total", "points", "percent", "seconds", "backend", "grade_again")


@dataclass(frozen=True)
class Graded:
    """One student: results by assignment."""

    student: str
    results: dict[str, list[Result]]
    seconds: float
    backend: str

    def earned(self, assignment: str) -> float:
        return round(sum(result.earned for result in self.results[assignment]), 2)

    @property
    def infra(self) -> bool:
        """Whether the sandbox failed somewhere: the points are then no judgement, and it is to be graded again."""
        return any(result.infra for results in self.results.values() for result in results)


def sources(path: Path, assignments: Sequence[str]) -> dict[str, bytes | str]:
    """{assignment: its exercises.py, or why there is none} of a zip, of which no other member is read."""
    if not path.is_file():
        return dict.fromkeys(assignments, "the zip is no file")
    if path.stat().st_size > ARCHIVE:
        return dict.fromkeys(assignments, f"the zip is larger than {ARCHIVE >> 20} MB: exercises.py is all it needs")
    try:
        with zipfile.ZipFile(path) as archive:
            return {name: read_member(archive, name) for name in assignments}
    except UNREADABLE as error:
        return dict.fromkeys(assignments, f"the zip cannot be read: {error}")


def read_member(archive: zipfile.ZipFile, name: str) -> bytes | str:
    """The one member `.../NAME/exercises.py`, or why not. A backslash is a slash: some packers write it."""
    wanted = f"{name}/exercises.py"
    found = [info for info in archive.infolist() if f"/{info.filename}".replace("\\", "/").endswith(f"/{wanted}")]
    if len(found) != 1:
        return f"the zip holds {len(found)} files {wanted}, one is needed"
    if found[0].compress_type not in PACKED:
        return f"{wanted} is packed in a way that is not read: store or deflate it"
    try:
        with archive.open(found[0]) as stream:
            data = stream.read(SOURCE + 1)
    except UNREADABLE as error:
        return f"{wanted} cannot be read: {error}"
    return data if len(data) <= SOURCE else f"{wanted} is larger than {SOURCE >> 10} KB"


def missing(paper: Paper, reason: str) -> list[Result]:
    """The results of an assignment that was not handed in."""
    items = [Result(item.name, item.function, item.points, 0, reason) for item in paper.items]
    return items + [Result(each.function, each.function, each.points, 0, reason) for each in paper.detections]


def grade_one(path: Path, papers: Sequence[Paper], runner: Runner, seed: str) -> Graded:
    """One zip. Never raises for what is in it."""
    begun = time.monotonic()
    found = sources(path, [paper.assignment for paper in papers])
    results = {}
    for paper in papers:
        source = found[paper.assignment]
        results[paper.assignment] = (
            missing(paper, source) if isinstance(source, str) else grade_source(paper, source, runner, seed)
        )
    backend = "docker" if isinstance(runner, Boxed) else "local (unsafe)"
    return Graded(path.stem, results, round(time.monotonic() - begun, 1), backend)


def grade_all(
    paths: Sequence[Path], papers: Sequence[Paper], make_runner: Callable[[], Runner], seed: str, out: Path, jobs: int
) -> list[Graded]:
    """Grade every zip, `jobs` at once; after each, feedback/STUDENT.json and the table `out` of those graded so far.

    An error of the grader itself costs that student's grading alone: it is printed, and its row says grade_again.
    Raises ConfigError as `check_plan` does.
    """
    check_plan(paths, seed, jobs, out)
    feedback = out.parent / "feedback"
    feedback.mkdir(parents=True, exist_ok=True)
    runners: SimpleQueue[Runner] = SimpleQueue()
    made = [make_runner() for _ in range(min(jobs, len(paths)))]
    for runner in made:
        runners.put(runner)

    def work(path: Path) -> Graded:
        runner = runners.get()
        try:
            return grade_one(path, papers, runner, seed)
        finally:
            runners.put(runner)

    graded: dict[Path, Graded] = {}
    pool = ThreadPoolExecutor(len(made))
    try:
        futures = {pool.submit(work, path): path for path in paths}
        for done in as_completed(futures):
            path, error = futures[done], done.exception()
            each = graded[path] = done.result() if error is None else failed(path, papers, error)
            write_feedback(feedback / f"{each.student}.json", each)
            write_table(out, [graded[path] for path in paths if path in graded], papers)
            print(f"[{len(graded)}/{len(paths)}] {summary(each, papers)}", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C: what is being graded is waited for, the rest is not begun
        for runner in made:
            runner.close()
    return [graded[path] for path in paths]


def failed(path: Path, papers: Sequence[Paper], error: BaseException) -> Graded:
    """The grader broke over a submission: that is no judgement of it."""
    traceback.print_exception(error, file=sys.stderr)
    said = f"not graded, the grader failed: {type(error).__name__}: {error}"
    results = {paper.assignment: [replace(each, infra=True) for each in missing(paper, said)] for paper in papers}
    return Graded(path.stem, results, 0.0, "none")


def check_plan(paths: Sequence[Path], seed: str, jobs: int, out: Path) -> None:
    """ConfigError: no zip, one not there, two of one name, jobs below 1, a seed that students know, an old table."""
    names = [path.stem.casefold() for path in paths]
    if not names or jobs < 1:
        raise ConfigError(f"{len(names)} submissions and --jobs {jobs}: both must be at least 1")
    if len(set(names)) != len(names):
        twice = next(path for path in paths if names.count(path.stem.casefold()) > 1)
        raise ConfigError(f"two submissions are called {printable(twice.name)}: a student is known by the zip's name")
    if seed == PUBLIC_SEED:
        raise ConfigError(f"--seed {seed} is the seed of the public tests: choose one that no student knows")
    if out.exists():
        raise ConfigError(f"--out {out} is there already, and points are not overwritten: name another file")
    if gone := [path for path in paths if not path.exists()]:
        raise ConfigError(f"{printable(str(gone[0]))} does not exist: name the zips of the submissions")


def printable(name: str) -> str:
    r"""A student's name for a terminal and a spreadsheet: nothing that either would carry out.

    >>> printable("=1+1"), printable("Ann \x1b[2J\udcff")
    ("'=1+1", 'Ann \\x1b[2J\\udcff')
    """
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def summary(each: Graded, papers: Sequence[Paper]) -> str:
    total = sum(each.earned(paper.assignment) for paper in papers)
    points = sum(paper.points for paper in papers)
    again = "; not all could be graded: grade it again" if each.infra else ""
    return f"{printable(each.student)}: {total:g} of {points:g} points in {each.seconds:g} s{again}"


def write_feedback(path: Path, each: Graded) -> None:
    """What the student is given back."""
    results = {name: [asdict(result) for result in results] for name, results in each.results.items()}
    data = {"student": each.student, "backend": each.backend, "seconds": each.seconds, "results": results}
    write_json(path, data)


def write_table(out: Path, graded: Sequence[Graded], papers: Sequence[Paper]) -> None:
    """One row for each student."""
    names = [paper.assignment for paper in papers]
    total = sum(paper.points for paper in papers)
    rows = []
    for each in graded:
        earned = [each.earned(name) for name in names]
        percent = round(100 * sum(earned) / total, 1)
        again = "yes" if each.infra else ""
        sums = [round(sum(earned), 2), total, percent, each.seconds, each.backend, again]
        rows.append([printable(each.student), *earned, *sums])
    columns = ["student", *names, *HEAD]
    write_csv(out, [dict(zip(columns, row, strict=True)) for row in rows], columns)

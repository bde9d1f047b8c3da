"""Many submissions in one command: read zips without unpacking them, grade several at once, write what came out."""

from __future__ import annotations

import csv
import json
import time
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

from mini_rome.course.grade import Result, grade_source
from mini_rome.course.paper import PUBLIC_SEED, Paper
from mini_rome.course.runners import Boxed, Runner
from mini_rome.errors import ConfigError

SOURCE = 256 << 10  # bytes of one exercises.py
MEMBERS = 10_000  # of one zip


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
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()[:MEMBERS]
            return {name: read_member(archive, members, name) for name in assignments}
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        return dict.fromkeys(assignments, f"the zip cannot be read: {error}")


def read_member(archive: zipfile.ZipFile, members: list[zipfile.ZipInfo], name: str) -> bytes | str:
    """The one member `.../NAME/exercises.py`, or why not."""
    wanted = f"{name}/exercises.py"
    found = [info for info in members if info.filename == wanted or info.filename.endswith(f"/{wanted}")]
    if len(found) != 1:
        return f"the zip holds {len(found)} files {wanted}, one is needed"
    if found[0].file_size > SOURCE:
        return f"{wanted} is larger than {SOURCE >> 10} KB"
    with archive.open(found[0]) as stream:
        data = stream.read(SOURCE + 1)
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
    """Grade every zip, `jobs` at once; writes feedback/STUDENT.json as each is done, then the table `out`.

    Raises ConfigError: no zip, two of one name, a seed that students know, or jobs below 1.
    """
    check_plan(paths, seed, jobs)
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

    graded: dict[str, Graded] = {}
    try:
        with ThreadPoolExecutor(len(made)) as pool:
            for done in as_completed([pool.submit(work, path) for path in paths]):
                each = done.result()
                graded[each.student] = each
                write_feedback(feedback / f"{each.student}.json", each)
                print(f"[{len(graded)}/{len(paths)}] {summary(each, papers)}", flush=True)
    finally:
        for runner in made:
            runner.close()
    ordered = [graded[path.stem] for path in paths]
    write_table(out, ordered, papers)
    return ordered


def check_plan(paths: Sequence[Path], seed: str, jobs: int) -> None:
    names = [path.stem for path in paths]
    if not names or jobs < 1:
        raise ConfigError(f"{len(names)} submissions and --jobs {jobs}: both must be at least 1")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"two submissions are called {twice}.zip: a student is known by the zip's name")
    if seed == PUBLIC_SEED:
        raise ConfigError(f"--seed {seed} is the seed of the public tests: choose one that no student knows")


def summary(each: Graded, papers: Sequence[Paper]) -> str:
    total = sum(each.earned(paper.assignment) for paper in papers)
    points = sum(paper.points for paper in papers)
    again = "; the sandbox failed: grade it again" if each.infra else ""
    return f"{each.student}: {total:g} of {points:g} points in {each.seconds:g} s{again}"


def write_feedback(path: Path, each: Graded) -> None:
    """What the student is given back."""
    results = {name: [asdict(result) for result in results] for name, results in each.results.items()}
    data = {"student": each.student, "backend": each.backend, "seconds": each.seconds, "results": results}
    path.write_text(json.dumps(data, indent=1) + "\n")


def write_table(out: Path, graded: Sequence[Graded], papers: Sequence[Paper]) -> None:
    """One row for each student."""
    names = [paper.assignment for paper in papers]
    total = sum(paper.points for paper in papers)
    with out.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["student", *names, "total", "points", "percent", "seconds", "backend", "grade_again"])
        for each in graded:
            earned = [each.earned(name) for name in names]
            percent = round(100 * sum(earned) / total, 1)
            row = [each.student, *earned, round(sum(earned), 2), total, percent, each.seconds, each.backend]
            writer.writerow([*row, "yes" if each.infra else ""])

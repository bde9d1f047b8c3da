"""Course assignments: the grader in a process of this machine, submissions, and the command."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from mini_rome.cli import main
from mini_rome.course import attacks, student, wire
from mini_rome.course.grade import grade_source
from mini_rome.course.paper import (
    ASSIGNMENTS,
    PUBLIC_SEED,
    Paper,
    assignment_folders,
    library,
    load_module,
    make_paper,
)
from mini_rome.course.process import Ended
from mini_rome.course.release import release, released_files, skeleton
from mini_rome.course.runners import Boxed, Local
from mini_rome.course.session import Session
from mini_rome.course.student import case
from mini_rome.course.submissions import sources
from mini_rome.errors import ConfigError

FOLDERS = assignment_folders()
ROOT = Path(__file__).parents[1]
A1 = ASSIGNMENTS / "a1_chunking"
STAFF = (A1 / "exercises.py").read_text()


# Grading, in a process of this machine


@pytest.fixture(scope="module")
def paper() -> Paper:
    return make_paper(A1, "7")


def earned(paper: Paper, source: str, full: bool = False) -> float:
    return sum(result.earned for result in grade_source(paper, source.encode(), Local(), "7", full))


def test_the_staff_version_has_all_points_and_the_skeleton_none(paper: Paper) -> None:
    assert earned(paper, STAFF, full=True) == paper.points == 20
    results = grade_source(paper, skeleton(STAFF, paper.allowed).encode(), Local(), "7")
    assert len(results) == 12 and all("NotImplementedError" in r.said and r.earned == 0 for r in results)


@pytest.mark.parametrize("source", ["staff", "blind", "skeleton"])
def test_a_check_runs_all_implementations_together_and_judges_as_one_by_one(paper: Paper, source: str) -> None:
    """Of one's own code, which nobody keeps from voting; in boxes each state stays alone."""
    blind = f"{STAFF}\n\ndef {paper.detections[0].function}(implementation):\n    pass\n"
    text = {"staff": STAFF, "blind": blind, "skeleton": skeleton(STAFF, paper.allowed)}[source]
    found, runs = [], []
    for trusting in (False, True):
        runner = Counted(trusting)
        found.append(grade_source(paper, text.encode(), runner, "7", full=True, rights=1))
        runs.append(runner.runs)
    assert found[0] == found[1]
    assert runs[0] > runs[1] or source != "staff"


def test_a_students_own_check_is_such_a_run_and_grading_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Local] = []
    monkeypatch.setattr(student, "grade_source", lambda *given, **options: asked.append(given[2]) or [])
    assert student.check(A1) == 0
    assert [runner.trusting for runner in asked] == [True]
    assert not Local().trusting and not Boxed.trusting


class Counted(Local):
    runs = 0

    def run(self, *request: Any) -> Ended:
        self.runs += 1
        return super().run(*request)


def test_the_library_of_a_box_has_no_solution(paper: Paper) -> None:
    for folder in FOLDERS:
        names = set(library(load_module(folder / "properties.py").ALLOWED))
        solutions = {
            "chunking",
            "masks",
            "collator",
            "credit",
            "loss",
            "resample",
            "verify",
            "experts",
            "course/process",
        }
        assert not names & {f"lib/mini_rome/{module}.py" for module in solutions}
    assert earned(paper, STAFF) == 0


def test_hidden_inputs_differ_by_seed() -> None:
    inputs = [[item.cases for item in make_paper(A1, seed).items] for seed in ("1", "2", PUBLIC_SEED)]
    assert inputs[0] != inputs[1] != inputs[2] != inputs[0]
    assert inputs[0] == [item.cases for item in make_paper(A1, "1").items]


def test_what_is_sent_into_the_box_holds_nothing_that_is_expected(paper: Paper) -> None:
    sent: list[str] = []

    class Spy(Local):
        def run(self, files, request, seconds):
            sent.append(wire.dumps(request) + "".join(sorted(files)))
            return super().run(files, request, seconds)

    grade_source(paper, STAFF.encode(), Spy(), "7", full=True)
    assert len(sent) >= 2
    assert not [
        text for text in sent if "expected" in text or "points" in text or "given.py" in text or "right" in text
    ]


@pytest.mark.parametrize("attack", ["os._exit(0)", "prints passed, forges the grader's lines", "imports the solution",
                                    "fails every assertion", "returns its input"])  # fmt: skip
def test_an_attack_has_no_points(paper: Paper, attack: str) -> None:
    source = attacks.with_body(skeleton(STAFF, paper.allowed), attacks.BODIES[attack])
    assert earned(paper, source) == 0


def test_a_ruined_exercise_costs_its_own_points_alone(paper: Paper) -> None:
    source = attacks.with_body(STAFF, "import os\nos._exit(0)", ["completion_ids"])
    results = grade_source(paper, source.encode(), Local(), "7", full=True)
    assert {r.function for r in results if r.said} == {"completion_ids"}
    assert sum(r.earned for r in results) == 17
    assert all("ended its process (exit code 0)" in r.said for r in results if r.said)


def test_a_test_that_asks_too_much_is_broken_and_arguments_are_checked(
    paper: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mini_rome.course.detect.QUESTIONS", 3)
    ask = "n = 0\nwhile True:\n    n += 1\n    arguments[0]([[[n], []]])"
    results = grade_source(
        paper.only("test_rows"), attacks.with_body(STAFF, ask, ["test_rows"]).encode(), Local(), "7", True
    )
    assert all("more than 3 questions" in result.said for result in results)
    huge = "arguments[0]([[[1] * 10**6, []]])"
    results = grade_source(
        paper.only("test_rows"), attacks.with_body(STAFF, huge, ["test_rows"]).encode(), Local(), "7", True
    )
    assert all("arguments are too large" in result.said for result in results)


def test_a_submission_that_uses_up_its_time_is_not_run_again(paper: Paper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mini_rome.course.session.BUDGET_S", 0.0)
    session = Session(Local(), STAFF.encode(), paper.allowed)
    (answer,) = session.ask([{"id": 0, "function": "chunk_ids", "cases": [], "seconds": 1}]).values()
    assert "used up" in answer.reason and not answer.ended


def test_the_exercise_that_the_guide_adds_works(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ASSIGNMENTS / "INSTRUCTOR.md").read_text(), re.DOTALL)
    assert len(blocks) == 3 and sum(block.count("\n") for block in blocks) <= 20
    folder = tmp_path / "a1_chunking"
    shutil.copytree(A1, folder)
    for name, block in zip(("exercises", "properties", "mutants"), blocks, strict=True):
        with (folder / f"{name}.py").open("a") as file:
            file.write(f"\n\n{block}")
    asked = make_paper(folder, "7").only("context_ids")
    source = (folder / "exercises.py").read_text()
    assert earned(asked, source, full=True) == asked.points == 1
    wrong = f"{source}\n\n{blocks[2]}\n\ncontext_ids = context_ids__prompt_only\n"
    assert earned(asked, wrong, full=True) == 0
    assert released_files(folder, update=True)["exercises.py"].count(b"NotImplementedError") == 6


# The command


def write_submission(path: Path, members: dict[str, str | bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)
    return path


def test_only_the_one_file_of_a_zip_is_read(tmp_path: Path) -> None:
    planted = {"a1_chunking/grades.json": "{}", "../../properties.py": "", "a1_chunking/snapshots.json": ""}
    good = write_submission(tmp_path / "a.zip", {**planted, "work/a1_chunking/exercises.py": "x = 1"})
    assert sources(good, ["a1_chunking", "a2_masks"]) == {
        "a1_chunking": b"x = 1", "a2_masks": "the zip holds 0 files a2_masks/exercises.py, one is needed"
    }  # fmt: skip
    twice = write_submission(tmp_path / "b.zip", {"a1_chunking/exercises.py": "", "x/a1_chunking/exercises.py": ""})
    bomb = write_submission(tmp_path / "c.zip", {"a1_chunking/exercises.py": b"\0" * (1 << 20)})
    (tmp_path / "d.zip").write_bytes(b"no zip")
    said = [sources(path, ["a1_chunking"])["a1_chunking"] for path in (twice, bomb, tmp_path / "d.zip")]
    assert ["2 files" in said[0], "larger" in said[1], "cannot be read" in said[2]] == [True] * 3


def test_grading_goes_on_after_a_broken_submission(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    bare = skeleton(STAFF, ("types", "errors"))
    right = bare.replace("raise NotImplementedError", "return 1 / 0")
    zips = [
        write_submission(tmp_path / "ann.zip", {"a1_chunking/exercises.py": "def ("}),
        write_submission(tmp_path / "bob.zip", {"a1_chunking/exercises.py": right}),
        tmp_path / "cem.zip",
    ]
    zips[2].write_bytes(b"")
    assignments = tmp_path / "assignments"
    assignments.mkdir()
    (assignments / "a1_chunking").symlink_to(A1)
    out = tmp_path / "grades.csv"
    words = ["--seed", "s", "--out", str(out), "--unsafe-local", "--assignments", str(assignments)]
    assert main(["course", "grade", *map(str, zips), *words]) == 0
    told = capsys.readouterr()
    assert "your rights, files and network" in told.err and "[3/3]" in told.out
    rows = [line.split(",") for line in out.read_text().splitlines()]
    assert [row[0] for row in rows] == ["student", "ann", "bob", "cem"] and {row[-2] for row in rows[1:]} == {
        "local (unsafe)"
    }
    feedback = json.loads((tmp_path / "feedback/ann.json").read_text())
    assert "SyntaxError" in feedback["results"]["a1_chunking"][0]["said"]
    feedback = json.loads((tmp_path / "feedback/bob.json").read_text())
    assert "ZeroDivisionError" in feedback["results"]["a1_chunking"][0]["said"]


def test_without_an_engine_grading_refuses_and_names_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    path = write_submission(tmp_path / "ann.zip", {})
    assert main(["course", "grade", str(path), "--seed", "s", "--out", str(tmp_path / "g.csv")]) == 2
    assert "--unsafe-local" in capsys.readouterr().err and not (tmp_path / "g.csv").exists()
    assert main(["course", "grade", str(path), "--seed", PUBLIC_SEED, "--unsafe-local"]) == 2


def test_check_counts_points_and_says_what_fails(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    release([A1], tmp_path)
    zipfile.ZipFile(tmp_path / "a1_chunking.zip").extractall(tmp_path)
    assert main(["course", "check", str(tmp_path / "a1_chunking")]) == 1
    told = capsys.readouterr().out
    assert "0 of 20 points" in told and "NotImplementedError" in told
    assert told.splitlines()[-1].endswith(f"case({str(tmp_path / 'a1_chunking')!r}, 'responses are chunks', 1)")
    arguments, expected = case(tmp_path / "a1_chunking", "responses are chunks", 2)
    assert load_module(A1 / "exercises.py").chunk_ids(*arguments) == expected
    assert case(tmp_path / "a1_chunking", "broken rows", 2)[1] == {"raises": "ValueError"}
    with pytest.raises(ConfigError, match="no such case"):
        case(tmp_path / "a1_chunking", "broken rows", 0)
    assert main(["course", "check", str(tmp_path)]) == 2


def test_the_released_folder_runs_pytest_where_every_test_is_unwritten(tmp_path: Path) -> None:
    release([A1], tmp_path)
    zipfile.ZipFile(tmp_path / "a1_chunking.zip").extractall(tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path / "a1_chunking", env=environment, timeout=120
    )
    assert done.stdout.strip().splitlines()[-1].startswith("9 failed"), done.stdout
    assert done.stdout.count("NotImplementedError") >= 9
    (tmp_path / "a1_chunking/exercises.py").write_text(STAFF)
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path / "a1_chunking", env=environment, timeout=120
    )
    assert done.stdout.strip().splitlines()[-1].startswith("9 passed"), done.stdout

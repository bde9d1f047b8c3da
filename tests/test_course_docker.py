"""Course assignments in real boxes: profile grader, hostile submissions, partial points."""

from __future__ import annotations

import functools
import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mini_rome.cli import main
from mini_rome.course import attacks
from mini_rome.course.grade import Result, grade_source
from mini_rome.course.image import GRADER_IMAGE
from mini_rome.course.paper import ASSIGNMENTS, assignment_folders, make_paper
from mini_rome.course.prove import prove
from mini_rome.course.release import skeleton
from mini_rome.course.runners import Boxed
from mini_rome.errors import ImageMissing
from mini_rome.sandbox import hardening

pytestmark = pytest.mark.docker
A1 = ASSIGNMENTS / "a1_chunking"
STAFF = (A1 / "exercises.py").read_text()


@pytest.fixture(scope="module")
def runner() -> Iterator[Boxed]:
    from mini_rome.sandbox.engine import engine
    from mini_rome.sandbox.images import ensure

    try:
        ensure(engine().client, GRADER_IMAGE)
    except ImageMissing as error:
        pytest.skip(str(error))  # conftest makes that a failure where Docker is required
    with Boxed() as made:
        yield made


@functools.cache
def paper(seed: str = "7"):
    return make_paper(A1, seed)


def graded(runner: Boxed, source: str, full: bool = False) -> list[Result]:
    return grade_source(paper(), source.encode(), runner, "7", full)


def test_profile_grader_is_the_agents_with_more_memory() -> None:
    from dataclasses import replace

    assert replace(hardening.GRADER, name="agent") == hardening.AGENT
    assert hardening.GRADER.network == "none" and hardening.GRADER_LIMITS.memory_mb == 2048


def test_the_box_has_the_wheels_and_no_solution(runner: Boxed) -> None:
    box = runner._box
    said = box.exec("python3 -c 'import torch, numpy, shellsim; print(torch.__version__)'", timeout=60)
    assert said.exit_code == 0, said.output
    assert box.exec("cd / && python3 -c 'import mini_rome'").exit_code == 1
    assert "Network is unreachable" in box.exec("exec 3<>/dev/tcp/192.0.2.1/80").output


def test_staff_has_all_points_and_the_skeleton_none(runner: Boxed) -> None:
    assert sum(result.earned for result in graded(runner, STAFF, full=True)) == paper().points
    assert sum(result.earned for result in graded(runner, skeleton(STAFF, paper().allowed))) == 0


@pytest.mark.parametrize("attack", ["tampers with harness, encoder and builtins", "looks for the answers",
                                    "imports the solution", "prints passed, forges the grader's lines"])  # fmt: skip
def test_an_attack_has_no_points(runner: Boxed, attack: str) -> None:
    source = attacks.with_body(skeleton(STAFF, paper().allowed), attacks.BODIES[attack])
    assert sum(result.earned for result in graded(runner, source)) == 0


RUINS = ["hangs", "forks without end", "allocates 10 GB", "exits", "kills all it can", "keeps shared memory",
         "fills the disk", "leaves a daemon"]  # fmt: skip


@pytest.mark.parametrize("ruin", RUINS)
def test_a_ruined_exercise_keeps_the_points_of_the_others(runner: Boxed, ruin: str) -> None:
    body, word = attacks.RUIN[ruin]
    results = graded(runner, attacks.with_body(STAFF, body, ["number_of_chunks"]), full=True)
    assert {result.function for result in results if result.said} == {"number_of_chunks"}
    assert sum(result.earned for result in results) == 17
    assert all(word in result.said for result in results if result.said)


LEAVES = """
import ctypes, os
for top in ("/tmp", "/dev/shm", os.path.expanduser("~"), "/app/lib"):
    with open(f"{top}/left.py", "w") as file:
        file.write("answer = 1")
ctypes.CDLL(None).shmget(77, 4096, 0o1600)
if os.fork() == 0:
    os.setsid()
    import time
    time.sleep(1000)
"""
FINDS = """
import os, re
tops = ("/tmp", "/dev/shm", os.path.expanduser("~"), "/app/lib")
found = [top for top in tops if os.path.exists(f"{top}/left.py")]
found += open("/proc/sysvipc/shm").read().splitlines()[1:]
found += [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) not in (1, os.getpid(), os.getppid())]
raise ValueError(f"left behind: {found}")
"""


def test_a_submission_finds_nothing_of_the_one_before(runner: Boxed) -> None:
    graded(runner, LEAVES)
    (sentence,) = {result.said.split("case 1 ")[-1] for result in graded(runner, FINDS)[:8]}
    assert sentence.startswith("ValueError: left behind: [] ")


def test_one_command_grades_them_all(tmp_path: Path, capsys: pytest.CaptureFixture, runner: Boxed) -> None:
    for student, source in (("ann", STAFF), ("bob", "import os\nos._exit(0)"), ("cem", "raise SystemExit")):
        with zipfile.ZipFile(tmp_path / f"{student}.zip", "w") as archive:
            archive.writestr("a1_chunking/exercises.py", source)
    (tmp_path / "assignments").mkdir()
    (tmp_path / "assignments/a1_chunking").symlink_to(A1)
    words = ["--assignments", str(tmp_path / "assignments"), "--out", str(tmp_path / "grades.csv"), "--seed", "s"]
    assert main(["course", "grade", *map(str, sorted(tmp_path.glob("*.zip"))), *words]) == 0
    rows = (tmp_path / "grades.csv").read_text().splitlines()
    assert [row.split(",")[2] for row in rows[1:]] == ["0", "0", "0"] and all(",docker," in row for row in rows[1:])
    said = json.loads((tmp_path / "feedback/bob.json").read_text())["results"]["a1_chunking"][0]["said"]
    assert "importing exercises.py ended the process (exit code 0)" in said


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_claim_of_the_proof_holds(runner: Boxed) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    assert prove(assignment_folders(), ["0", "1", "2"]) == 0

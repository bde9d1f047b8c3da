"""The hand-written tasks: their layout, and that each proves itself in real containers.

Covered: every folder of sandboxes/tasks that has a solution. The reference solution earns 1 and leaves the inputs as
they were; doing nothing earns 0; two plausible wrong solutions pass at least half of the checks and still earn 0.
"""

from __future__ import annotations

import ast
import functools
import io
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mini_rome.harbor import TaskFolder, load
from mini_rome.sandbox.docker import DockerSandbox
from mini_rome.sandbox.engine import engine
from mini_rome.sandbox.tree import Entry, entries_of, files_of_tar, snapshot_of
from mini_rome.types import Snapshot
from mini_rome.verify_fresh import task_limits, verify_fresh

TASKS = Path(__file__).parents[1] / "sandboxes" / "tasks"
COMMON = TASKS / "_common"
CANARY = "mini-rome-canary 7f0a1b9e-mini-tasks-do-not-train"
DOMAINS = (
    "data-processing", "games", "debugging", "system-administration", "scientific-computing", "software-engineering",
    "machine-learning", "security",
)  # fmt: skip
LAYOUT = {
    "task.toml", "instruction.md", "environment/Dockerfile", "tests/test.sh", "tests/conftest.py",
    "tests/test_outputs.py", "solution/solve.sh", "solution/wrong_1.sh", "solution/wrong_2.sh",
}  # fmt: skip
BASE = "mini-rome/tools:latest"
DOCKERFILE = f"ARG BASE={BASE}\nFROM ${{BASE}}\nWORKDIR /app\n"
FOLDERS = sorted(path.parents[1] for path in TASKS.glob("*/solution/solve.sh"))

each = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


@functools.cache
def task_of(folder: Path) -> TaskFolder:
    return load(folder)


def test_every_domain_has_an_easy_a_medium_and_a_hard_task() -> None:
    found = Counter((task_of(f).metadata["category"], task_of(f).metadata["difficulty"]) for f in FOLDERS)
    assert found == Counter((domain, level) for domain in DOMAINS for level in ("easy", "medium", "hard"))


@each
def test_the_folder_is_complete_and_its_verifier_is_the_common_one(folder: Path) -> None:
    present = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert present >= LAYOUT
    assert all(name in LAYOUT or name.startswith("environment/fixtures/") for name in present)
    for name in ("test.sh", "conftest.py"):
        assert (folder / "tests" / name).read_bytes() == (COMMON / name).read_bytes()
    recipe = (folder / "environment" / "Dockerfile").read_text()
    assert recipe in (DOCKERFILE, f"{DOCKERFILE}COPY fixtures /app/\n")


@each
def test_the_toml_says_who_what_and_how_much(folder: Path) -> None:
    task = task_of(folder)
    assert task.notes == () and task.unsafe == () and task.name == folder.name
    assert task.metadata["canary"] == CANARY and task.metadata["language"] == "en" and task.metadata["tags"]
    assert 'authors = ["mini-rome"]' in (folder / "task.toml").read_text()
    assert task.memory_mb == 512 and task.verifier_timeout_s >= 120
    fixtures = folder / "environment" / "fixtures"
    for name in task.metadata["inputs"]:
        assert (fixtures / name).exists(), name


@each
def test_the_instruction_ends_with_the_canary_and_names_what_the_checks_look_at(folder: Path) -> None:
    text = (folder / "instruction.md").read_text()
    assert text.splitlines()[-1] == f"<!-- {CANARY} -->"
    for path in sorted(set(re.findall(r"/app/[\w./-]*\w", (folder / "tests" / "test_outputs.py").read_text()))):
        assert path in text, f"the checks look at {path}, which the instruction does not name"


@each
def test_there_are_eight_checks_or_more_each_with_an_assertion(folder: Path) -> None:
    tree = ast.parse((folder / "tests" / "test_outputs.py").read_text())
    checks = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    assert len(checks) >= 8 and len({check.name for check in checks}) == len(checks)


@each
def test_nothing_the_agent_sees_holds_a_test_a_solution_or_the_canary(folder: Path) -> None:
    secrets = [(folder / "solution" / f"{name}.sh").read_text().strip() for name in ("solve", "wrong_1", "wrong_2")]
    for path in (folder / "environment").rglob("*"):
        if path.is_file():
            text = path.read_bytes().decode(errors="replace")
            assert CANARY not in text and "AS_AGENT" not in text and "/tests" not in text, path
            assert not any(secret in text for secret in secrets), path


# -- proofs in containers --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    reward: float
    passed: int
    checks: int


def image_of(folder: Path) -> str:
    tag = f"mini-rome/task-{folder.name}"
    built, _ = engine().client.images.build(
        path=str(folder / "environment"), tag=tag, buildargs={"BASE": BASE}, rm=True, forcerm=True
    )
    return built.id


def start_of(image: str) -> Snapshot:
    """The image's own /app, as the agent finds it: a box covers it with its work dir."""
    client = engine().client
    container = client.containers.create(image, network_mode="none")
    try:
        chunks, _ = container.get_archive("/app")
        raw = io.BytesIO(b"".join(chunks))
    finally:
        container.remove()
    return snapshot_of(_inside(entry) for entry in entries_of(raw.getvalue()))


def _inside(entry: Entry) -> Entry:
    return replace(entry, path=entry.path.removeprefix("app").removeprefix("/") or ".")


def attempt(task: TaskFolder, image: str, start: Snapshot, script: str) -> Snapshot:
    """What a script leaves, run by the agent in a box of its own."""
    with DockerSandbox.start(image, task_limits(task), task.name) as box:
        box.restore(start)
        done = box.exec(script, timeout=60)
        assert done.exit_code == 0, done.output
        box.sweep()
        return box.snapshot()


def score(task: TaskFolder, image: str, snapshot: Snapshot) -> Score:
    """As verify_fresh, with the count of checks that passed."""
    verdict = verify_fresh(task, snapshot, image)
    assert verdict.reward is not None, verdict.reason
    return Score(verdict.reward, int(verdict.numbers["passed"]), int(verdict.numbers["checks"]))


def inputs_of(task: TaskFolder, snapshot: Snapshot) -> Mapping[str, bytes]:
    """The files that the task calls inputs, folders with all they hold."""
    names = task.metadata["inputs"]
    files = files_of_tar(snapshot.tar)
    return {path: data for path, data in files.items() if any(path == n or path.startswith(f"{n}/") for n in names)}


@each
@pytest.mark.docker
def test_the_task_proves_itself(folder: Path) -> None:
    task, image = task_of(folder), image_of(folder)
    start = start_of(image)
    scripts = {name: (folder / "solution" / f"{name}.sh").read_text() for name in ("solve", "wrong_1", "wrong_2")}
    left = {name: attempt(task, image, start, script) for name, script in scripts.items()}
    scores = {name: score(task, image, snapshot) for name, snapshot in {"noop": start, **left}.items()}
    assert scores["solve"].reward == 1.0 and scores["solve"].passed == scores["solve"].checks >= 8
    assert inputs_of(task, left["solve"]) == inputs_of(task, start)
    assert scores["noop"].reward == 0.0
    for name in ("wrong_1", "wrong_2"):
        assert scores[name].reward == 0.0, name
        assert scores[name].passed >= scores[name].checks / 2, (name, scores[name])

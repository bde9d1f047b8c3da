"""The hand-written tasks: their layout, and that each proves itself in real containers.

Covered: every folder of sandboxes/tasks that has a solution; the proofs are those of `mini-rome tasks validate`.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from mini_rome.tasks.harbor import TaskFolder, load
from mini_rome.tasks.validate import Proved, prove_folder

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
AT_ONCE = 4
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
    assert recipe == DOCKERFILE or recipe.startswith(f"{DOCKERFILE}COPY fixtures /app/\n")


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
        names = [str(part) for part in (Path(path), *Path(path).parents) if len(part.parts) > 2]  # or a folder above
        assert any(name in text for name in names), f"the checks look at {path}, which the instruction does not name"


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


@pytest.fixture(scope="module")
def proofs(request: pytest.FixtureRequest) -> Iterator[dict[Path, Future[Proved]]]:
    """The proofs of every folder that is tested, several at once: much of each is waiting for containers."""
    mine = [item for item in request.session.items if "proofs" in getattr(item, "fixturenames", ())]
    with ThreadPoolExecutor(AT_ONCE) as executor:
        folders = [item.callspec.params["folder"] for item in mine]
        yield {folder: executor.submit(prove_folder, task_of(folder), repeats=1) for folder in folders}
        executor.shutdown(cancel_futures=True)


@each
@pytest.mark.docker
def test_the_task_proves_itself(folder: Path, proofs: dict[Path, Future[Proved]]) -> None:
    proved = proofs[folder].result()
    assert not proved.failures
    assert all(proof.holds is not None for proof in proved.proofs), "a proof of a hand-written task did not apply"

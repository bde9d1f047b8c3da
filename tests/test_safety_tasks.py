"""The safety drill's task folders: layout, what each is a case of, and that goal and conduct are told apart."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from mini_rome.sandbox.safety import KINDS
from mini_rome.tasks.harbor import TaskFolder, load_tree
from mini_rome.tasks.validate import prove_folder
from mini_rome.tasks.validate_safety import CHANNELS, DIMENSIONS, Conduct, is_drill
from mini_rome.types import SafetyEvent, Verdict

TASKS = Path(__file__).parents[1] / "sandboxes" / "tasks"
DRILL, BROKEN = load_tree(TASKS / "safety")
DOCUMENTATION = re.compile(r"192\.0\.2\.\d+|198\.51\.100\.\d+|203\.0\.113\.\d+|([\w-]+\.)*example\.(com|org|net)")
each = pytest.mark.parametrize("task", DRILL, ids=lambda task: task.name)


def test_every_dimension_and_every_channel_has_two_tasks_and_no_pair_comes_twice() -> None:
    assert (len(DRILL), BROKEN) == (6, [])
    assert Counter(task.metadata["dimension"] for task in DRILL) == dict.fromkeys(DIMENSIONS, 2)
    assert Counter(task.metadata["channel"] for task in DRILL) == dict.fromkeys(CHANNELS, 2)
    assert len({(task.metadata["dimension"], task.metadata["channel"]) for task in DRILL}) == 6


def test_the_drill_is_no_part_of_the_hand_written_tasks() -> None:
    tasks, broken = load_tree(TASKS)
    assert (len(tasks), broken) == (24, [])
    assert not any(map(is_drill, tasks)) and all(map(is_drill, DRILL))


@each
def test_the_folder_is_complete_and_its_verifier_is_the_common_one(task: TaskFolder) -> None:
    for path in ("environment/Dockerfile", "tests/test_outputs.py", "tests/test_conduct.py", "solution/tempted.sh"):
        assert (task.folder / path).is_file(), path
    assert task.tests["conftest.py"] == (TASKS / "_common" / "conftest.py").read_bytes()
    assert task.tests["test.sh"] == (TASKS / "safety" / "_common" / "test.sh").read_bytes()
    assert task.notes == () and task.unsafe == () and not task.agent_network and not task.verifier_network
    assert set(task.metadata["conduct"]) <= set(KINDS) and task.metadata["temptation"]
    assert task.instruction.rstrip().endswith(f"<!-- {task.metadata['canary']} -->")


@each
def test_every_address_is_from_a_range_for_documentation(task: TaskFolder) -> None:
    text = "\n".join(path.read_bytes().decode() for path in task.folder.rglob("*") if path.is_file())
    hosts = re.findall(r"\b\d+\.\d+\.\d+\.\d+\b", text) + re.findall(r"https?://(?:[^/@\s]*@)?([^/:\s\"')]+)", text)
    assert [host for host in hosts if not DOCUMENTATION.fullmatch(host)] == []


def test_conduct_is_kept_only_without_an_event_and_with_its_checks_passed() -> None:
    kept = Conduct(Verdict(1.0, numbers={"conduct": 1.0}), ())
    assert kept.kept
    assert not replace(kept, events=(SafetyEvent("egress", "medium", "network", "x"),)).kept
    assert not replace(kept, verdict=Verdict(1.0, numbers={"conduct": 0.0})).kept
    assert not replace(kept, verdict=Verdict(1.0)).kept


@each
@pytest.mark.docker
def test_the_task_proves_itself_and_tells_a_tempted_agent_from_a_clean_one(task: TaskFolder) -> None:
    proved = prove_folder(task, repeats=1)
    assert not proved.failures
    told = {"the clean solution keeps its conduct", "a tempted agent reaches the goal"}
    told |= {"a tempted agent fails the conduct"}
    assert {*told, "doing nothing earns 0"} <= {proof.name for proof in proved.proofs if proof.holds}

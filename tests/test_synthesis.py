"""Synthesis: instances are proved before anybody works on them; teachers, resuming and what is lost are counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from test_filters import served
from tiny import chat, experts

from mini_rome.data.demonstrations import make_tasks
from mini_rome.data.exchange import to_messages
from mini_rome.data.records import Appender, check_ids, read
from mini_rome.data.synthesis import (
    EndpointTeacher,
    PolicyTeacher,
    Scripted,
    explore,
    instances,
    review,
    scripted_teachers,
    teach,
)
from mini_rome.errors import MiniRomeError
from mini_rome.evaluation.model_client import Endpoint
from mini_rome.rollout import Rollout
from mini_rome.sampler.scripted import ScriptedSampler
from mini_rome.sandbox import Pool
from mini_rome.types import Task, Trajectory, Verdict


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool("sim") as found:
        yield found


def tasks(count: int = 3) -> list[Task]:
    return make_tasks(["notes", "tickets"], [2, 3], count, "train")


def test_exploring_proposes_training_instances_and_variations_once_each() -> None:
    found, counted = explore(["notes", "tickets"], [1, 2], 12, seed=0)
    assert {task.split for task in found} == {"train"}
    assert {task.chunks for task in found} == {1, 2, 3} or {task.chunks for task in found} == {1, 2}
    assert counted.given == 15 and counted.out == len({task.content_hash for task in found}) == len(found)


def test_a_sound_instance_is_let_through_and_a_broken_one_is_refused_with_the_role_that_did(
    tmp_path: Path, pool: Pool
) -> None:
    good, other, third = tasks()
    broken = replace(other, name="broken", expert=("true", "true"))
    free = replace(third, name="free", check=lambda files: Verdict(1.0))
    kept, (built, reviewed) = instances([good, broken, free], chat(), pool, tmp_path / "ledger.jsonl")
    assert kept == [good]
    assert built.why == {"reference fails": 1} and reviewed.why == {"doing nothing passes": 1}
    assert (built.given, built.out, reviewed.given, reviewed.out) == (3, 2, 2, 1)


def test_a_check_of_what_nothing_names_is_refused(pool: Pool) -> None:
    good = tasks(1)[0]
    assert review(good, pool) == ""
    sly = replace(good, check=lambda files: Verdict(good.check(files).reward if "hidden" not in files else 1.0))
    named = replace(good, check=lambda files: (files.get("hidden.txt"), good.check(files))[1])
    assert review(sly, pool) == ""
    assert review(named, pool) == "tests look at what nothing names: hidden.txt"
    assert review(replace(good, check=lambda files: Verdict(float(len(files) > 0))), pool) == "doing nothing passes"


def test_a_rerun_skips_the_instances_that_have_a_verdict(tmp_path: Path, pool: Pool) -> None:
    ledger = tmp_path / "ledger.jsonl"
    ledger.write_text(json.dumps({"task": tasks(1)[0].name, "role": "review", "why": "seen before"}) + '\n{"task": ')
    kept, (_, reviewed) = instances(tasks(), chat(), pool, ledger)
    assert kept == tasks()[1:] or [each.name for each in kept] == [each.name for each in tasks()[1:]]
    assert reviewed.why == {"seen before": 1}
    assert len(ledger.read_text().splitlines()) == 3


def test_teachers_differ_in_skill_and_say_the_same_every_time(pool: Pool) -> None:
    many = make_tasks(["notes"], [4], 20, "train")
    lengths = {each.name: sum(len(each.commands(task)) for task in many) for each in scripted_teachers()}
    assert lengths["scripted-careful"] == 80 < lengths["scripted-plain"] < lengths["scripted-clumsy"]
    teacher = scripted_teachers()[2]
    assert teacher.commands(many[0]) == teacher.commands(many[0])
    assert any(each.reward == 0.0 for each in Scripted("hasty", forgets=1.0).write(many[:2], chat(), pool))


def test_trajectories_are_appended_and_a_rerun_writes_only_what_is_missing(tmp_path: Path, pool: Pool) -> None:
    path = tmp_path / "raw.jsonl"
    with Appender(path, chat()) as log:
        teach([Scripted("a")], tasks(2), chat(), pool, log)
    shown: list[tuple[int, int]] = []
    with Appender(path, chat()) as log:
        found = teach([Scripted("a"), Scripted("b", 0.5)], tasks(3), chat(), pool, log, lambda *at: shown.append(at))
    assert shown == [(3, 6), (4, 6), (5, 6), (6, 6)]
    assert [(each.given, each.out) for each in found] == [(3, 3), (3, 3)]
    back = read(path, chat())
    assert len(back) == 6 and {each.policy for each in back} == {"a", "b"}
    assert all(turn.source == "expert" for each in back for turn in each.turns)


def test_the_policy_teaches_in_its_own_ids_with_their_log_probs(tmp_path: Path) -> None:
    """An expert's own ids, so that the policy succeeds; the second task, to which they do not belong, it fails."""
    first, second = experts()
    own = [turn.ids for turn in first.trajectory.turns]
    with Pool("sim") as pool, Appender(tmp_path / "raw.jsonl", chat()) as log:
        rollout = Rollout(chat(), ScriptedSampler([*own, *[[chat().stop_id]] * 20]), pool)
        teacher = PolicyTeacher(rollout, batch=1, max_new_tokens=64)
        (found,) = teach([teacher], [first.trajectory.task, second.trajectory.task], chat(), pool, log)
    assert (found.role, found.given, found.out) == ("trajectory (policy)", 2, 2)
    good, bad = read(tmp_path / "raw.jsonl", chat())
    assert (good.reward, bad.reward, good.policy) == (1.0, 0.0, "policy")
    assert [turn.ids for turn in good.turns] == own
    assert all(turn.logprobs is not None and len(turn.logprobs) == len(turn.ids) for turn in good.turns)
    assert not good.retokenised


@dataclass
class Silent(Scripted):
    """A teacher that answers nothing."""

    def write(self, tasks, chat, pool) -> list[Trajectory]:
        return EndpointTeacher(Endpoint("http://127.0.0.1:9/v1", "m", tries=1)).write(tasks, chat, pool)


def test_a_teacher_that_never_answers_is_an_error_with_its_last_failure(tmp_path: Path, pool: Pool) -> None:
    with Appender(tmp_path / "raw.jsonl", chat()) as log:
        with pytest.raises(MiniRomeError, match=r"teacher silent answered none of 2 tasks; at last: http://127.0.0.1:9"):
            teach([Silent("silent")], tasks(2), chat(), pool, log)


def test_a_model_behind_an_endpoint_teaches_and_its_lost_episodes_are_counted(tmp_path: Path, pool: Pool) -> None:
    """It calls a tool that is not there, then plays the expert of the first task, and is rate-limited on others."""
    first = tasks(1)[0]
    plan = [("python", "1"), *(("bash", step) for step in first.expert), ("submit", "")]

    def answer(body: dict) -> tuple[int, str]:
        if body["messages"][1]["content"] != first.instruction:
            return 429, ""
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        name, command = plan[turn]
        function = {"name": name, "arguments": json.dumps({"command": command})}
        message = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": function}]}
        return 200, json.dumps({"choices": [{"message": message}]})

    with served(answer) as url, Appender(tmp_path / "raw.jsonl", chat()) as log:
        teacher = EndpointTeacher(Endpoint(url, "m", tries=2, sleep=lambda seconds: None), workers=2)
        found = teach([teacher], tasks(2), chat(), pool, log)
    assert (found[0].given, found[0].out, dict(found[0].why)) == (2, 1, {"rate limit": 1})
    (back,) = read(tmp_path / "raw.jsonl", chat())
    assert back.reward == 1.0 and back.retokenised and back.policy == "endpoint-m"
    assert back.turns[0].malformed
    assert [turn.commands for turn in back.turns[1:-1]] == [[step] for step in first.expert]
    check_ids(back, chat())
    assert to_messages(back)["policy"] == "endpoint-m"

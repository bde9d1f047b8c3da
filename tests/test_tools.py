"""A task's own tools: calls worked by hand, what goes wrong, and that several calls of a turn are one chunk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small import chat

from mini_rome.chunking import chunk_ids
from mini_rome.env import Env
from mini_rome.errors import SandboxFileError, ToolRefused
from mini_rome.experts import play, script
from mini_rome.masks import MaskPolicy, annotate
from mini_rome.sandbox import Pool
from mini_rome.tools import call_body, dump, parse_arguments, rehearse, run_tool
from mini_rome.types import Task, Verdict


def put(database: dict, name: str, to: str) -> object:
    if to == "nowhere":
        raise ToolRefused("not there")
    database["at"][name] = to
    return {"put": name}


def where(database: dict, name: str) -> object:
    return {"at": database["at"].get(name, "nowhere")}


def names(database: dict) -> object:
    return sorted(database["at"])


BEFORE = '{"at":{"plum":"barn"}}'
EXPERT = ('where {"name":"plum"}', 'put {"name":"oak","to":"field"}\nnames')


def check(files: dict[str, bytes]) -> Verdict:
    return Verdict(float(json.loads(files["database.json"])["at"].get("oak") == "field"))


TASK = Task(
    "put-1", "put", "tools", "put oak into the field", {"database.json": BEFORE}, EXPERT, check,
    tools={"put": put, "where": where, "names": names},
)  # fmt: skip
SHELL = replace(TASK, shell=True)


class Counted:
    """Files in memory that count what is written."""

    def __init__(self, data: bytes = BEFORE.encode()) -> None:
        self.data, self.writes = data, 0

    def read(self, path: str) -> bytes:
        assert path == "database.json"
        return self.data

    def write(self, path: str, data: bytes | str) -> None:
        self.data, self.writes = data if isinstance(data, bytes) else data.encode(), self.writes + 1


@pytest.fixture(scope="module")
def sim() -> Iterator[Pool]:
    with Pool("sim", size=1) as pool:
        yield pool


def test_a_call_reads_runs_writes_and_answers_one_line_of_json() -> None:
    files = Counted()
    result = run_tool(TASK, files, "put", '{"name": "oak", "to": "路"}')
    assert (result.output, result.exit_code, result.status) == ('{"put":"oak"}', 0, "ok")
    assert files.data.decode() == '{"at":{"plum":"barn","oak":"路"}}'
    assert run_tool(TASK, files, "where", '{"name":"oak"}').output == '{"at":"路"}'
    assert run_tool(TASK, files, "names", "").output == '["oak","plum"]'
    assert run_tool(TASK, files, "names", " {} ").output == '["oak","plum"]'
    assert files.writes == 1  # only what changes something writes


@pytest.mark.parametrize(
    ("name", "arguments", "error", "exit_code"),
    [
        ("fly", "{}", "no tool 'fly'", 127),
        ("bash", "ls", "no tool 'bash'", 127),
        ("x" * 50, "", f"no tool '{'x' * 20}'", 127),
        ("put", '{"name":"oak","to":', "bad JSON", 2),
        ("put", "oak field", "bad JSON", 2),
        ("put", "[" * 100_000, "bad JSON", 2),
        ("put", '["oak","field"]', "wants name, to", 2),
        ("put", "", "wants name, to", 2),
        ("put", '{"name":"oak"}', "wants name, to", 2),
        ("put", '{"name":"oak","to":"field","by":"cart"}', "wants name, to", 2),
        ("put", '{"database":"oak","to":"field"}', "wants name, to", 2),
        ("names", '{"name":"oak"}', "wants nothing", 2),
        ("put", '{"name":"oak","to":7}', "to is no text", 2),
        ("put", '{"name":"oak","to":null}', "to is no text", 2),
        ("put", '{"name":"a\\nb","to":"field"}', "name is no text", 2),
        ("put", '{"name":"\\ud800","to":"field"}', "name is no text", 2),
        ("put", '{"name":"oak","to":"nowhere"}', "not there", 1),
    ],
)
def test_what_goes_wrong_is_an_observation_with_an_exit_code(
    name: str, arguments: str, error: str, exit_code: int
) -> None:
    files = Counted()
    result = run_tool(TASK, files, name, arguments)
    assert (json.loads(result.output), result.exit_code, result.status) == ({"error": error}, exit_code, "ok")
    assert (files.data.decode(), files.writes) == (BEFORE, 0)


@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b'{"at":7}', b'{"in":{}}', b"[" * 100_000])
def test_a_damaged_database_is_the_agents_doing_only_where_it_has_a_shell(data: bytes) -> None:
    result = run_tool(SHELL, Counted(data), "put", '{"name":"oak","to":"field"}')
    assert (json.loads(result.output), result.exit_code) == ({"error": "database.json is damaged"}, 1)
    with pytest.raises((ValueError, TypeError, LookupError, RecursionError)):
        run_tool(TASK, Counted(data), "put", '{"name":"oak","to":"field"}')


def test_a_database_that_is_gone_is_damaged_or_the_sandboxs_failure(sim: Pool) -> None:
    with sim.box() as box:
        assert run_tool(SHELL, box, "names", "").exit_code == 1
        with pytest.raises(SandboxFileError):
            run_tool(TASK, box, "names", "")


def test_a_task_with_tools_offers_bash_only_where_it_says_so(sim: Pool) -> None:
    call = "<tool_call>bash echo hi</tool_call>"
    for task, observation, exit_code in ((TASK, '{"error":"no tool \'bash\'"}\n[exit 127]', 127), (SHELL, "hi", 0)):
        with Env(task, sim) as env:
            env.reset()
            found, reward, terminated, truncated, info = env.step(call)
            assert (found, reward, terminated, truncated) == (observation, 0.0, False, False)
            assert info["result"].exit_code == exit_code


def test_the_shell_and_the_tools_see_the_same_database(sim: Pool) -> None:
    with Env(SHELL, sim) as env:
        env.reset()
        env.step('<tool_call>put {"name":"oak","to":"hill"}</tool_call>')
        assert env.step("<tool_call>bash cat database.json</tool_call>")[0] == '{"at":{"plum":"barn","oak":"hill"}}'
        env.step("<tool_call>bash sed -i s/hill/field/ database.json</tool_call>")
        assert env.step("<tool_call>submit</tool_call>")[1] == 1.0


def test_several_calls_of_a_turn_are_one_chunk_with_one_error_flag(sim: Pool) -> None:
    wrong = 'put {"name":"oak","to":"nowhere"}\nwhere {"name":"plum"}\nfly'
    trajectory = play(chat(), TASK, sim, script(chat(), [wrong, *EXPERT], TASK)).trajectory
    assert [len(turn.commands) for turn in trajectory.turns] == [3, 1, 2]
    assert trajectory.turns[0].commands == wrong.split("\n")
    assert trajectory.turns[0].observation == (
        '{"error":"not there"}\n{"at":"barn"}\n{"error":"no tool \'fly\'"}\n[exit 1]'
    )
    annotate(trajectory, MaskPolicy())
    assert [turn.error for turn in trajectory.turns] == [True, False, False]
    assert [turn.malformed for turn in trajectory.turns] == [False] * 3
    assert trajectory.reward == 1.0
    assert sorted(set(chunk_ids(trajectory))) == [-1, 0, 1, 2]


def test_a_rehearsal_needs_no_sandbox_and_gives_what_one_gives(sim: Pool) -> None:
    told = list(rehearse(TASK, EXPERT))
    assert [(call, result.output) for call, result in told] == [
        ('where {"name":"plum"}', '{"at":"barn"}'),
        ('put {"name":"oak","to":"field"}', '{"put":"oak"}'),
        ("names", '["oak","plum"]'),
    ]
    trajectory = play(chat(), TASK, sim, script(chat(), EXPERT, TASK)).trajectory
    assert "\n".join(turn.observation for turn in trajectory.turns).split("\n") == [r.output for _, r in told]
    assert TASK.files == {"database.json": BEFORE}


@given(arguments=st.dictionaries(st.text(min_size=1), st.text(st.characters(exclude_categories=["Cs"]))))
def test_a_call_is_valid_json_whatever_its_arguments(arguments: dict[str, str]) -> None:
    body = call_body("put", **arguments)
    name, _, text = body.partition(" ")
    assert name == "put"
    assert (json.loads(text) if text else {}) == arguments
    assert text in ("", dump(arguments))


def test_arguments_are_given_in_any_order_and_spacing() -> None:
    assert parse_arguments(put, ' { "to" : "field",\n"name":"oak" } ') == {"to": "field", "name": "oak"}

"""Native episodes inside the box: profile `native`, its one bind, what an agent in there gets and does not get."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import docker
import pytest
import tiny
from small import chat
from test_context import TASK, reply
from test_native import Broken
from test_reaper import left

from mini_rome.chunking import pack
from mini_rome.errors import ConfigError, LimitNotEnforced
from mini_rome.experts import Start, record_expert, script
from mini_rome.families import get_family
from mini_rome.native import parity
from mini_rome.native_box import MAX_CONNECTIONS, SOCKET, BoxedAgent, BoxedRollout
from mini_rome.proxy import Proxy, Ticket
from mini_rome.proxy_backends import SamplerBackend
from mini_rome.proxy_episode import Episode, Rules
from mini_rome.rollout import Rollout
from mini_rome.sampler.base import Sampler, SamplingParams
from mini_rome.sampler.scripted import ScriptedSampler
from mini_rome.sampler.transformers import TransformersSampler
from mini_rome.sandbox import Limits, Pool, Sandbox, hardening, run_id, runtime
from mini_rome.sandbox import container as backend
from mini_rome.sandbox.docker import DockerSandbox
from mini_rome.sandbox.engine import engine
from mini_rome.sandbox.hardening import AGENT, SOCKET_FOLDER, Profile, native
from mini_rome.sandbox.safety import EventLog
from mini_rome.types import Trajectory

pytestmark = pytest.mark.docker

PARAMS = SamplingParams(max_new_tokens=60)
SOLVED = script(chat(), TASK.expert)
Replies = Sequence[list[int]]


def boxed(
    replies: Replies | Sampler, starts: Sequence[Start] = (Start(TASK),), agent: BoxedAgent | None = None,
    event_log: EventLog | None = None, size: int = 4, **options: Any,
) -> list[Trajectory]:  # fmt: skip
    """Episodes inside the box; afterwards nothing of them is left on the host or the engine."""
    sampler = ScriptedSampler(replies) if isinstance(replies, Sequence) else replies
    with Pool("docker", size=size, event_log=event_log) as pool:
        rollout = BoxedRollout(chat(), sampler, pool, agent=agent, **options)
        found = rollout.collect(starts, PARAMS)
    assert left(engine().client, run_id()) == 0
    assert not runtime.run_folder(run_id()).exists()
    return found


def builtin(replies: Replies, start: Start, **options: Any) -> Trajectory:
    with Pool("docker", size=1) as pool:
        return Rollout(chat(), ScriptedSampler(replies), pool, **options).collect([start], PARAMS)[0]


@contextmanager
def opened(replies: Replies = SOLVED) -> Iterator[tuple[Proxy, Ticket, Sandbox]]:
    """(an episode's own proxy, its ticket, its box), without an agent."""
    with (
        Pool("docker", size=1) as pool,
        Proxy(SamplerBackend(ScriptedSampler(replies), chat()), chat()) as shared,
        BoxedRollout(chat(), ScriptedSampler(replies), pool)._opened(shared, TASK) as (served, env),
    ):
        env.reset()
        yield served, served.open(Episode(chat(), Trajectory(TASK, [], []))), env.box


ASK = f"""
import http.client, json, socket, sys
wire = http.client.HTTPConnection("localhost")
wire.sock = socket.socket(socket.AF_UNIX)
wire.sock.connect("{SOCKET_FOLDER}/{SOCKET}")
body = {{"model": "mini-rome", "messages": [{{"role": "user", "content": "hi"}}]}}
wire.request("POST", "/v1/chat/completions", json.dumps(body), {{"Authorization": f"Bearer {{sys.argv[1]}}"}})
print(wire.getresponse().status)
"""


def status(box: Sandbox, token: str) -> str:
    """What a chat completion with this token gets inside the box."""
    box.write("/tmp/ask.py", ASK)
    return box.exec(f"python3 /tmp/ask.py {token}").output.strip()


# -- parity --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "replies",
    [
        SOLVED,
        [reply("bash cd /tmp; export A=b; printf '\\033x\\377'; false", "bash pwd; cat nothing; echo $A"),
         reply("bash nocommand; seq 9999"), reply("bash echo 'a<|im_end|>b é'; exit 3"), reply("submit")],
        [chat().encode("just text") + [chat().stop_id], reply("bash ls") + [7] * 99, *SOLVED],
        [reply("bash ls")] * 20,
    ],
    ids=["solved", "outputs", "malformed", "out of turns"],
)  # fmt: skip
def test_the_episode_in_the_box_has_the_ids_and_log_probs_of_the_built_in_loop(replies: list[list[int]]) -> None:
    ours, [theirs] = builtin(replies, Start(TASK), max_context=30_000), boxed(replies, max_context=30_000)
    assert parity(ours, theirs).exact
    assert (ours.reward, ours.reason) == (theirs.reward, theirs.reason)
    assert pack(ours) == pack(theirs)
    assert (ours.backend, theirs.backend) == ("docker", "docker (native)")


def test_parity_holds_from_a_start_in_the_middle_and_episodes_side_by_side_keep_apart() -> None:
    with Pool("docker", size=1) as pool:
        middle = record_expert(chat(), TASK, pool).start(1)
    starts = [middle, Start(get_family("notes").make(4, 3)), Start(get_family("notes").make(5, 3))]
    replies = [reply("bash cat *"), reply("bash ls"), reply("submit"), reply("submit")]
    for ours, theirs in zip([builtin(replies, start) for start in starts], boxed(replies, starts), strict=True):
        assert parity(ours, theirs).exact
        assert [turn.ids for turn in ours.turns] == [turn.ids for turn in theirs.turns]
    assert theirs.turns[0].observation != ours.task.instruction


def test_an_ipa_step_trains_on_episodes_from_inside_the_box(tmp_path: Path) -> None:
    model = tiny.model(scale=3.0)
    with Pool("docker", size=4) as pool:
        sampler = TransformersSampler(model, tiny.chat().stop_id)
        rollout = BoxedRollout(tiny.chat(), sampler, pool, extra_turns=0)
        trainer = tiny.trainer(tmp_path, rollout, model)
        before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        trainer.train()
    assert any((old != new).any() for old, new in zip(before, trainer.model.parameters(), strict=True))
    assert not rollout.infra


def test_a_box_serves_one_episode_after_the_other_and_nothing_is_left_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made, start = [], DockerSandbox.start
    monkeypatch.setattr(DockerSandbox, "start", lambda *args, **named: made.append(start(*args, **named)) or made[-1])
    replies = [reply("bash ls -A /app ~ /tmp; pgrep sleep"), reply("bash touch /app/x ~/y /tmp/z; setsid sleep 99 &"),
               reply("bash curl http://198.51.100.7/x", "submit")]  # fmt: skip
    log = EventLog(tmp_path / "safety.jsonl", "r")
    found = boxed(replies, [Start(TASK)] * 3, event_log=log, size=1)
    assert len(made) == 1
    assert len({each.turns[0].observation for each in found}) == 1
    assert [[event.kind for event in each.turns[2].events[:1]] for each in found] == [["egress"]] * 3
    assert len({json.loads(line)["episode"] for line in log.path.read_text().splitlines()}) == 3


def test_in_a_box_that_is_used_again_the_token_before_is_no_longer_good() -> None:
    with Pool("docker", size=1) as pool, Proxy(SamplerBackend(ScriptedSampler(SOLVED), chat()), chat()) as shared:
        rollout, boxes = BoxedRollout(chat(), ScriptedSampler(SOLVED), pool), []
        with rollout._slots.kept():
            for tokens in ([], ["410"]):
                with rollout._opened(shared, TASK) as (served, env):
                    env.reset()
                    opened = served.open(Episode(chat(), Trajectory(TASK, [], [])))
                    assert [status(env.box, token) for token in boxes] == tokens
                    assert status(env.box, opened.token) == "200"
                    served.close_episode(opened)
                    boxes.append(opened.token)


# -- what the box has, and has not -----------------------------------------------------------------------------------


def test_the_socket_is_the_only_difference_to_a_box_of_the_default_profile() -> None:
    inspect = engine().client.api.inspect_container
    with opened() as (_, _, box), DockerSandbox.start(box.image) as plain:
        assert isinstance(box, DockerSandbox)
        ours, theirs = inspect(box.container), inspect(plain.container)
        [mount] = ours["HostConfig"].pop("Mounts")
        source = box.profile.socket_folder
        assert mount == {"Type": "bind", "Source": source, "Target": SOCKET_FOLDER, "ReadOnly": True}
        assert ours["HostConfig"] == theirs["HostConfig"]  # which has neither mounts nor binds
        assert not ours["HostConfig"]["Binds"] and ours["HostConfig"]["NetworkMode"] == "none"
        assert (box.label, plain.label) == ("docker (native)", "docker")
        assert plain.exec(f"ls {SOCKET_FOLDER}").exit_code != 0
        assert [path.name for path in Path(source).iterdir()] == [SOCKET]
        assert Path(source).parent.stat().st_mode & 0o777 == 0o700  # no other user of the host gets to it
        tries = f"ls -A {SOCKET_FOLDER}; cd {SOCKET_FOLDER}; touch x; rm {SOCKET}; mv {SOCKET} y; ls /sys/class/net"
        lines = box.exec(tries).output.splitlines()
        assert (lines[0], lines[-1]) == (SOCKET, "lo")
        assert [line.endswith("Read-only file system") for line in lines[1:-1]] == [True] * 3
        connect = 'import socket; print(socket.socket().connect_ex(("172.17.0.1", 9)))'
        assert box.exec(f"python3 -c '{connect}'").output == "101\n"


def test_a_wrong_token_gets_401_the_right_one_200_and_after_the_last_turn_or_the_end_410() -> None:
    with opened() as (served, ticket, box):
        assert [status(box, token) for token in (ticket.token, ticket.token[:-1], "x")] == ["200", "401", "401"]
        ticket.episode.rules = Rules(2, 3, lambda command: ())
        assert [status(box, ticket.token) for _ in range(3)] == ["200", "410", "410"]
        ticket.episode.rules = None
        assert status(box, ticket.token) == "200"
        served.close_episode(ticket)
        assert status(box, ticket.token) == "410"


def test_two_boxes_at_once_neither_see_nor_may_use_each_others_socket() -> None:
    with opened() as (one, mine, here), opened() as (other, theirs, there):
        assert [status(here, mine.token), status(there, theirs.token)] == ["200", "200"]
        assert [status(here, theirs.token), status(there, mine.token)] == ["401", "401"]
        inodes = [box.exec(f"stat -c %i {SOCKET_FOLDER}/*").output.strip() for box in (here, there)]
        assert inodes == [str(proxy.path.stat().st_ino) for proxy in (one, other) if proxy.path]
        assert len(set(inodes)) == 2


def test_an_agent_may_hold_only_so_many_connections() -> None:
    many = (
        "import socket\nfound = [socket.socket(socket.AF_UNIX) for _ in range(60)]\ncut = 0\n"
        f"for each in found:\n    each.connect('{SOCKET_FOLDER}/{SOCKET}')\n    each.settimeout(0.5)\n"
        f"for each in found[{MAX_CONNECTIONS}:]:\n    cut += each.recv(1) == b''\nprint(cut)\n"
    )
    with opened() as (_, ticket, box):
        box.write("/tmp/many.py", many)
        assert box.exec("python3 /tmp/many.py").output == f"{60 - MAX_CONNECTIONS}\n"
        assert status(box, ticket.token) == "200"


@pytest.mark.parametrize(
    "profile",
    [Profile("native"), dataclasses.replace(AGENT, socket_folder="/etc"), native(Path("/var/run")),
     dataclasses.replace(native(Path("/x")), network="bridge")],
)  # fmt: skip
def test_a_bind_is_refused_for_anything_but_the_socket_of_a_native_run(profile: Profile) -> None:
    with pytest.raises(ConfigError, match="native|socket"):
        DockerSandbox.start(profile=profile)


def test_the_self_check_refuses_a_bind_that_the_profile_does_not_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def sneaked(*arguments: Any, **named: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        container, host = hardening.container_options(*arguments, **named)
        return container, {**host, "mounts": [docker.types.Mount("/mnt", "/usr/share", "bind", read_only=True)]}

    monkeypatch.setattr(backend, "container_options", sneaked)
    with pytest.raises(LimitNotEnforced, match="Mounts"):
        DockerSandbox.start()


def test_what_cannot_run_inside_is_refused_with_a_way_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--agent builtin for family 'retail'"):
        boxed(SOLVED, [Start(get_family("retail").make(3, 3))])
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    with pytest.raises(ConfigError, match="DOCKER_HOST"):
        BoxedRollout(chat(), ScriptedSampler([]), Pool("sim"))


# -- agents of other kinds -------------------------------------------------------------------------------------------

OPENAI = """
import json, os, subprocess
import openai
task = json.load(open(os.path.expanduser("~/.native/task.json")))
client, messages, said = openai.OpenAI(max_retries=0), task["messages"], []
while "submit" not in said:
    answer = client.chat.completions.create(model=task["model"], messages=messages, tools=task["tools"])
    message = answer.choices[0].message
    said, output = [call.function.name for call in message.tool_calls], ""
    if said[0] == "bash":
        command = json.loads(message.tool_calls[0].function.arguments)["command"]
        output = subprocess.run(["bash", "-c", command], capture_output=True, text=True).stdout
    messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": output}]
"""


def packages(name: str) -> bytes:
    """An installed package with all it needs, as a tar: what an image with it would hold."""
    names, buffer = [name], io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as tar:
        for each in names:
            try:
                found = metadata.distribution(each)
            except metadata.PackageNotFoundError:  # for another platform
                continue
            for file in found.files or []:
                if ".." not in file.parts and file.suffix not in (".pyc", ".pyi"):
                    tar.add(str(found.locate_file(file)), str(file))
            needed = [re.split(r"[^\w.-]", line)[0] for line in found.requires or [] if "extra ==" not in line]
            names += [more for more in needed if more not in names]
    return buffer.getvalue()


def test_the_openai_client_runs_in_the_box_and_gives_what_the_built_in_loop_gives() -> None:
    unpack = "mkdir /tmp/site && tar -xzf ~/.native/site.tar.gz -C /tmp/site"
    agent = BoxedAgent(
        {"agent.py": OPENAI, "site.tar.gz": packages("openai")},
        f"{unpack} && PYTHONPATH=/tmp/site exec python3 -B ~/.native/agent.py",
    )
    ours, [theirs] = builtin(SOLVED, Start(TASK)), boxed(SOLVED, agent=agent)
    assert (theirs.reason, theirs.reward) == (ours.reason, 1.0)
    assert parity(ours, theirs).exact


TOKENS = """
import os, sys
token, shown = os.environ["OPENAI_API_KEY"].encode(), 0
for pid in filter(str.isdigit, os.listdir("/proc")):
    shown += token in open(f"/proc/{pid}/cmdline", "rb").read()
sys.exit(f"{len(token) > 20} {shown}")
"""


def test_the_token_is_in_the_agents_environment_and_in_no_command_line_nor_in_the_state_that_is_judged() -> None:
    [found] = boxed(SOLVED, agent=BoxedAgent({"probe.py": TOKENS}, "exec python3 ~/.native/probe.py"))
    assert found.reason.startswith("agent exited with 1 (True 0); ")
    assert found.reward == 0.0
    with opened() as (_, _, box):
        assert "OPENAI" not in box.exec("env").output and box.env == {}


def test_the_deadline_of_the_episode_kills_agent_and_forwarder_and_what_is_there_is_judged() -> None:
    begun = time.monotonic()
    [found] = boxed(SOLVED, agent=BoxedAgent({}, "setsid sleep 99 & sleep 99"), limits=Limits(episode_s=1.0))
    assert (found.reward, found.reason.partition(";")[0]) == (0.0, "agent ended: timeout")
    assert time.monotonic() - begun < 20


def test_a_dead_model_leaves_the_episode_unscored() -> None:
    [found] = boxed(Broken([]))
    assert (found.reward, found.reason) == (None, "sampler_down")


def test_events_of_command_text_and_of_the_network_are_logged_for_the_episode(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "safety.jsonl", "r")
    dial = "python3 -c 'import socket; print(socket.socket().connect_ex((chr(49) + str(9), 9)))'"
    [found] = boxed([reply("bash curl http://198.51.100.7/x"), reply(f"bash {dial}"), reply("submit")], event_log=log)
    assert [event.kind for event in found.turns[0].events] == ["egress"]
    assert [event.source for event in found.turns[-1].events] == ["network"]
    assert log.path.read_text().count('"kind": "egress"') >= 2
    assert boxed(SOLVED)[0].turns[-1].events == ()  # nothing of the agent or the forwarder looks like an attempt

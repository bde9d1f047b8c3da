"""The proxy over HTTP: who gets in, what is refused and how, and that nothing hangs; with the real openai client."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tiny
from small import chat
from test_context import TASK, reply

from mini_rome import proxy_listen
from mini_rome.cli import main
from mini_rome.errors import ConfigError, RecordError
from mini_rome.evaluation.model_client import Endpoint
from mini_rome.native import tools_of
from mini_rome.proxy import MODEL, Proxy, Ticket
from mini_rome.proxy_backends import Backend, ExternalBackend, SamplerBackend
from mini_rome.proxy_episode import Episode
from mini_rome.sampler.base import Completion, Request, SamplingParams
from mini_rome.sampler.replay import RecordingSampler, ReplaySampler
from mini_rome.sampler.scripted import ScriptedSampler
from mini_rome.sandbox import Limits
from mini_rome.types import Trajectory

REPLIES = [reply("bash ls"), reply("bash cat x"), reply("submit")]
USER = {"role": "user", "content": TASK.instruction}
HTTP = openai.DefaultHttpxClient(verify=False)


def scripted(timeout_s: float = 20.0, sampler: Any = None) -> SamplerBackend:
    return SamplerBackend(sampler or ScriptedSampler(REPLIES), chat(), timeout_s)


def ticket(proxy: Proxy, number: int = 0) -> Ticket:
    return proxy.open(Episode(chat(), Trajectory(TASK, [], [], episode=number), SamplingParams(max_new_tokens=40)))


def client(proxy: Proxy, opened: Ticket) -> openai.OpenAI:
    return openai.OpenAI(base_url=proxy.url, api_key=opened.token, max_retries=0, http_client=HTTP)


def create(proxy: Proxy, opened: Ticket, **options: Any) -> Any:
    """One call by the openai client."""
    asked = {"model": MODEL, "messages": [USER], "tools": tools_of(TASK), **options}
    return client(proxy, opened).chat.completions.create(**asked)


def raw(proxy: Proxy, body: bytes, token: str, path: str = "/v1/chat/completions") -> tuple[int, dict]:
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=10)
    connection.request("POST", path, body, {"Authorization": f"Bearer {token}"})
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read() or b"{}")
    connection.close()
    return found


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy(scripted(), chat()) as running:
        yield running


def test_a_call_is_answered_and_recorded_and_models_are_listed(proxy: Proxy) -> None:
    opened = ticket(proxy)
    choice = create(proxy, opened).choices[0]
    call = choice.message.tool_calls[0].function
    assert (choice.finish_reason, call.name, call.arguments) == ("tool_calls", "bash", '{"command": "ls"}')
    assert [model.id for model in client(proxy, opened).models.list()] == [MODEL]
    found = proxy.close_episode(opened)
    assert [turn.ids for turn in found.turns] == REPLIES[:1]
    assert found.prompt_ids == chat().prompt(TASK.instruction)


def test_a_stream_says_the_same_as_a_whole_answer(proxy: Proxy) -> None:
    opened = ticket(proxy)
    chunks = list(create(proxy, opened, stream=True, stream_options={"include_usage": True}))
    calls = [delta for chunk in chunks for choice in chunk.choices for delta in choice.delta.tool_calls or []]
    assert [(call.function.name, call.function.arguments) for call in calls] == [("bash", '{"command": "ls"}')]
    assert chunks[-1].usage.completion_tokens == len(REPLIES[0])
    message = {"role": "assistant", "content": None, "tool_calls": [
        {"id": call.id, "type": "function", "function": call.function.model_dump()} for call in calls]}  # fmt: skip
    create(proxy, opened, messages=[USER, message, {"role": "tool", "tool_call_id": "c", "content": "a"}])
    assert len(proxy.close_episode(opened).turns) == 2  # known again: one chain


def test_without_tools_the_text_is_the_answer(proxy: Proxy) -> None:
    message = create(proxy, ticket(proxy), tools=openai.omit).choices[0].message
    assert (message.content, message.tool_calls) == ("<tool_call>bash ls</tool_call>", None)


@pytest.mark.parametrize("token", ["", "mr-guess", "mr-" + "a" * 32])
def test_a_wrong_token_gets_401_and_nothing_else(proxy: Proxy, token: str) -> None:
    ticket(proxy)
    status, body = raw(proxy, b"not even read", token)
    assert status == 401
    assert "token" in body["error"]["message"]


def test_after_the_end_a_token_gets_410(proxy: Proxy) -> None:
    opened = ticket(proxy)
    proxy.close_episode(opened)
    assert raw(proxy, b"{}", opened.token)[0] == 410
    other = ticket(proxy)
    assert other.token != opened.token
    assert create(proxy, other).choices


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"n": 2}, "n=2"), ({"logit_bias": {"5": 1}}, "logit_bias"), ({"logprobs": True}, "logprobs"),
        ({"stop": ["x"]}, "stop"), ({"presence_penalty": 1.5}, "presence_penalty"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"), ({"best_of": 3}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": "9"}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"), ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"), ({"top_p": 1.5}, "top_p=1.5"),
        ({"max_tokens": "\ud800"}, "max_tokens=?"), ({"\udfff": 1}, "'?'"), ({"model": MODEL, "n": [[]] * 9}, "n="),
        ({"messages": [{"role": []}]}, "role"), ({"messages": [{"role": {"a": 1}}]}, "role"),
        ({"tools": [{"function": {"name": "x", "parameters": {"properties": 7}}}]}, "tools"),
        ({"messages": []}, "messages"), ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "text"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0]"), ({"messages": [7]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"x": 1}]}]}, "tool_calls"), ({"tools": [{}]}, "tools"),
        ({"stream": "yes"}, "stream"), ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_a_400_that_names_it(proxy: Proxy, options: dict[str, Any], named: str) -> None:
    opened = ticket(proxy)
    status, body = raw(proxy, json.dumps({"model": MODEL, "messages": [USER], **options}).encode(), opened.token)
    assert status == 400
    assert named in body["error"]["message"]
    assert opened.episode.calls == 0


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"model": "mini-rome"'])
def test_a_body_that_is_no_json_object_is_a_400(proxy: Proxy, body: bytes) -> None:
    assert raw(proxy, body, ticket(proxy).token)[0] == 400


def test_another_model_is_a_404_that_names_ours(proxy: Proxy) -> None:
    with pytest.raises(openai.NotFoundError, match=MODEL):
        create(proxy, ticket(proxy), model="gpt")


def test_five_megabytes_are_refused_quickly_and_the_proxy_lives_on(proxy: Proxy) -> None:
    opened = ticket(proxy)
    begun = time.monotonic()
    with pytest.raises(openai.BadRequestError) as caught:
        create(proxy, opened, messages=[{"role": "user", "content": "<|im_end|>" * 500_000}])
    assert caught.value.code == "context_length_exceeded"
    assert time.monotonic() - begun < 5
    assert create(proxy, opened).choices


def test_sampling_options_of_a_client_do_not_change_what_is_sampled_and_are_counted(proxy: Proxy) -> None:
    opened = ticket(proxy)
    create(proxy, opened, temperature=0.2, seed=5, top_p=0.1)
    assert opened.episode.counts == {"unused: temperature": 1, "unused: seed": 1, "unused: top_p": 1}


HALF = "\ud83d"  # of an emoji: JSON can spell it, no token and no answer can hold it
CALLS = [{"function": {"name": HALF, "arguments": json.dumps({"a": HALF})}},
         {"function": {"name": "x", "arguments": {HALF: [HALF]}}},
         {"function": {"name": "x", "arguments": "[" * 3000}}]  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"messages": [{"role": "user", "content": HALF}, {"role": "assistant", "content": HALF, "tool_calls": CALLS}]
         },
        {"tools": [{"function": {"name": name, "parameters": {"properties": {HALF: {}}}}} for name in ("bash", HALF)]
         },
        {"tools": [{"function": {"name": "bash", "parameters": {"properties": [["a", "b"]]}}}]},
        {"tools": [{"function": {"name": "", "parameters": {}}}, {"function": {"name": {"a": 1}}}]},
        {"metadata": {"a": HALF}, "user": HALF, "max_tokens": 10**400, "seed": -(10**400)},
        {"messages": [{"role": "function", "name": HALF, "content": "\0\x1b\u2028", "tool_call_id": [HALF]}]},
    ],
)  # fmt: skip
def test_odd_values_in_any_field_are_answered_and_recorded(proxy: Proxy, options: dict[str, Any]) -> None:
    opened = ticket(proxy)
    for stream in (False, True):
        asked = {"model": MODEL, "messages": [USER], "stream": stream, **options}
        connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=10)
        connection.request("POST", "/v1/chat/completions", json.dumps(asked).encode(),
                           {"Authorization": f"Bearer {opened.token}"})  # fmt: skip
        answer = connection.getresponse()
        assert (answer.status, b"bash" in answer.read() or stream) == (200, True)
        connection.close()
    assert opened.episode.calls == 2


def test_a_path_or_method_that_is_not_served_is_told_as_json(proxy: Proxy) -> None:
    for path, status in (("/v1/embeddings", 404), ("/v1/models", 405), ("/%ff/" + "x" * 5000, 404)):
        found, body = raw(proxy, b"{}", ticket(proxy).token, path)
        assert (found, "not served here" in body["error"]["message"]) == (status, True)


@pytest.mark.parametrize(("method", "path", "status", "allowed"), [
    ("GET", "/v1/models", 200, None), ("HEAD", "/v1/models", 200, None), ("GET", "/v1/models/", 200, None),
    ("PUT", "/v1/models", 405, "GET"), ("GET", "/v1/chat/completions", 405, "POST"), ("GET", "/v1", 404, None),
    ("OPTIONS", "/v1/chat/completions/", 405, "POST"), ("GET", "/" + 5000 * "x", 404, None),
])  # fmt: skip
def test_methods_and_paths(proxy: Proxy, method: str, path: str, status: int, allowed: str | None) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=10)
    connection.request(method, path, headers={"Authorization": f"Bearer {ticket(proxy).token}"})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    assert (answer.status, answer.getheader("allow"), len(body) < 400) == (status, allowed, True)


def test_a_history_is_the_episodes_own_and_goes_with_it(proxy: Proxy) -> None:
    one, other = ticket(proxy), ticket(proxy)
    found, _ = raw(proxy, json.dumps({"model": "mini-rome", "messages": [{"role": "user", "content": "x"}]}).encode(),
                   one.token)  # fmt: skip
    assert (found, len(one.history._read), len(other.history._read)) == (200, 1, 0)
    proxy.close_episode(one)
    assert not one.history._read


# -- connections that never mean to ask anything -------------------------------------------------------------------


def dial(proxy: Proxy, data: bytes = b"") -> socket.socket:
    wire = socket.create_connection(("127.0.0.1", proxy.port), timeout=10)
    wire.sendall(data)
    return wire


def ended(wire: socket.socket) -> bytes:
    """What comes until the proxy closes the connection; fails where it does not within 10 seconds."""
    found = b""
    try:
        while data := wire.recv(1 << 16):
            found += data
    except ConnectionResetError:
        pass
    wire.close()
    return found


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize("hostile", [False, True], ids=["httptools", "h11"])
def test_a_connection_that_sends_nothing_or_half_a_request_is_cut(
    monkeypatch: pytest.MonkeyPatch, hostile: bool
) -> None:
    monkeypatch.setattr(proxy_listen, "HEAD_S", 0.3)
    monkeypatch.setattr("mini_rome.proxy.BODY_S", 0.3)
    with Proxy(scripted(), chat(), hostile=hostile) as proxy:
        opened = ticket(proxy)
        token = f"Authorization: Bearer {opened.token}\r\n".encode()
        slow = [dial(proxy), dial(proxy, HEAD), dial(proxy, HEAD + token + b"Content-Length: 99\r\n\r\n{")]
        told = [ended(wire) for wire in slow]
        assert told[0] == told[1] == b"" and told[2].startswith(b"HTTP/1.1 408")
        asked = json.dumps({"model": MODEL, "messages": [USER]}).encode()
        alive = dial(proxy, HEAD + token + b"Content-Length: %d\r\n\r\n" % len(asked) + asked)
        assert alive.recv(20).startswith(b"HTTP/1.1 200")
        time.sleep(1.0)  # idle between two calls: that is no attack
        while not alive.recv(1 << 16).endswith(b"}"):
            pass
        alive.sendall(HEAD + token + b"Content-Length: 2\r\n\r\n{}")
        assert alive.recv(20).startswith(b"HTTP/1.1 404")
        alive.sendall(HEAD)
        ended(alive)


@pytest.mark.parametrize("hostile", [False, True], ids=["httptools", "h11"])
def test_a_head_without_end_is_cut_before_it_fills_the_memory(hostile: bool) -> None:
    with Proxy(scripted(), chat(), hostile=hostile) as proxy:
        wire, sent = dial(proxy, HEAD), 0
        with pytest.raises(OSError):
            while sent < 64 << 20:
                wire.sendall(b"X-Filler: " + b"a" * 8180 + b"\r\n")
                sent += 8192
        wire.close()
        assert sent < 16 << 20  # what the kernel takes before the reset is seen
        assert create(proxy, ticket(proxy)).choices


def test_a_body_longer_than_a_head_may_be_is_no_head(proxy: Proxy) -> None:
    opened = ticket(proxy)
    wire = dial(proxy)
    for number in range(2):
        asked = json.dumps({"model": MODEL, "messages": [USER], "user": "x" * 300_000}).encode()
        token = f"Authorization: Bearer {opened.token}\r\n".encode()
        wire.sendall(HEAD + token + b"Content-Length: %d\r\n\r\n" % len(asked) + asked)
        assert wire.recv(1 << 16).startswith(b"HTTP/1.1 200"), number
    wire.close()


def test_no_more_connections_than_allowed_and_one_that_ends_makes_room() -> None:
    with Proxy(scripted(), chat(), max_connections=3) as proxy:
        held = [dial(proxy) for _ in range(3)]
        time.sleep(0.1)
        assert ended(dial(proxy)) == b""
        held.pop().close()
        time.sleep(0.1)
        assert create(proxy, ticket(proxy)).choices
        for wire in held:
            wire.close()


def test_the_proxy_closes_at_once_whatever_hangs_on_it() -> None:
    with Proxy(scripted(), chat()) as proxy:
        token = f"Authorization: Bearer {ticket(proxy).token}\r\n".encode()
        held = [dial(proxy, data) for data in (b"", HEAD, HEAD + token + b"Content-Length: 99\r\n\r\n{")]
        time.sleep(0.1)
        begun = time.monotonic()
    assert time.monotonic() - begun < 3
    for wire in held:
        wire.close()


def test_refusals_are_paced_for_strangers_and_for_each_token_and_nobody_else_waits(
    monkeypatch: pytest.MonkeyPatch, proxy: Proxy
) -> None:
    monkeypatch.setattr(proxy_listen, "BURST", 3)
    monkeypatch.setattr(proxy_listen, "PER_SECOND", 10.0)
    clumsy, other = ticket(proxy), ticket(proxy, 1)
    for token, status in (("mr-guess", 401), (clumsy.token, 400)):
        begun = time.monotonic()
        assert [raw(proxy, b"{", token)[0] for _ in range(9)] == [status] * 9
        assert time.monotonic() - begun > 0.45  # three at once, six a tenth of a second apart
    with ThreadPoolExecutor(8) as threads:
        guesses = [threads.submit(raw, proxy, b"", f"mr-{number}") for number in range(24)]
        assert create(proxy, other).choices
        assert raw(proxy, b"{", other.token)[0] == 400
        assert not all(guess.done() for guess in guesses)
        assert {guess.result()[0] for guess in guesses} == {401}


def test_a_wrong_token_is_told_even_to_who_sends_megabytes(proxy: Proxy) -> None:
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x" * 5_000_000}]}).encode()
    assert raw(proxy, body, "mr-guess")[0] == 401
    assert raw(proxy, b"x" * (33 << 20), ticket(proxy).token)[0] == 413


def test_a_connection_may_idle_as_long_as_commands_may_take(proxy: Proxy) -> None:
    assert proxy._server.config.timeout_keep_alive >= Limits().episode_s


# -- many at once, and what fails ----------------------------------------------------------------------------------


class Slow(ScriptedSampler):
    """Takes its time, and keeps the sizes of its batches."""

    def __init__(self, seconds: float = 0.1) -> None:
        super().__init__(REPLIES)
        self.seconds, self.sizes = seconds, []

    def generate(self, requests: list[Request], params: SamplingParams) -> list[Completion]:
        episodes = [request.episode for request in requests]
        assert len(set(episodes)) == len(episodes)
        self.sizes.append(len(requests))
        time.sleep(self.seconds)
        return super().generate(requests, params)


def test_calls_that_wait_share_a_batch_and_those_of_one_episode_do_not() -> None:
    sampler = Slow()
    with Proxy(scripted(sampler=sampler), chat()) as proxy, ThreadPoolExecutor(16) as threads:
        tickets = [ticket(proxy, number) for number in range(7)]
        calls = [threads.submit(create, proxy, opened) for opened in [*tickets, tickets[0]]]
        assert all(call.result().choices for call in calls)
        found = [proxy.close_episode(opened) for opened in tickets]
    assert sum(sampler.sizes) == 8
    assert len(sampler.sizes) <= 4
    assert sum(len(sample.turns) for each in found for sample in each.samples) >= 7


class Broken(ScriptedSampler):
    def generate(self, requests: list[Request], params: SamplingParams) -> list[Completion]:
        raise RuntimeError("out of memory")


class Short(ScriptedSampler):
    def generate(self, requests: list[Request], params: SamplingParams) -> list[Completion]:
        return []


@pytest.mark.parametrize(
    ("sampler", "told"),
    [(Broken([]), "out of memory"), (Slow(3.0), "within 0.3 s"), (Short([]), "0 completions for 1")],
)
def test_a_sampler_that_fails_or_hangs_gives_503_soon_and_the_episode_cannot_be_scored(
    sampler: ScriptedSampler, told: str
) -> None:
    with Proxy(scripted(0.3, sampler), chat()) as proxy:
        opened = ticket(proxy)
        begun = time.monotonic()
        with pytest.raises(openai.InternalServerError, match=told) as caught:
            create(proxy, opened)
        assert (caught.value.status_code, time.monotonic() - begun < 2) == (503, True)
        assert opened.episode.failed
        assert proxy.close_episode(opened).turns == []


def test_a_client_that_hangs_up_leaves_no_turn_behind() -> None:
    with Proxy(scripted(sampler=Slow(0.6)), chat()) as proxy:
        opened = ticket(proxy)
        with pytest.raises(openai.APITimeoutError):
            create(proxy, opened, timeout=0.1)
        deadline = time.monotonic() + 5
        while not opened.episode.counts["undelivered"] and time.monotonic() < deadline:
            time.sleep(0.02)
        assert opened.episode.counts["undelivered"] == 1
        assert proxy.close_episode(opened).turns == []


def test_a_client_that_hangs_up_in_a_stream_can_ask_again(proxy: Proxy) -> None:
    opened = ticket(proxy)
    stream = create(proxy, opened, stream=True)
    next(iter(stream))
    stream.close()
    create(proxy, opened)
    found = proxy.close_episode(opened)
    assert sum(len(sample.turns) for sample in found.samples) == 1
    assert opened.episode.counts["superseded"] == 1


def test_many_episodes_leave_no_thread_descriptor_or_record_behind(proxy: Proxy) -> None:
    def play(number: int) -> None:
        opened = ticket(proxy, number)
        raw(proxy, json.dumps({"model": MODEL, "messages": [USER]}).encode(), opened.token)
        assert len(proxy.close_episode(opened).turns) == 1

    play(0)
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for number in range(200):
        play(number)
    assert len(os.listdir("/proc/self/fd")) <= before[0] + 2
    assert threading.active_count() <= before[1] + 1
    assert not proxy._tickets


# -- where it listens, and other backends --------------------------------------------------------------------------


def test_a_unix_socket_serves_its_owner_alone_and_is_removed(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = tmp_path / "model.sock"
    with Proxy(scripted(), chat(), path=path) as proxy:
        assert path.stat().st_mode & 0o777 == 0o600
        opened = ticket(proxy)
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as wire:
            agent = openai.OpenAI(base_url=proxy.url, api_key=opened.token, http_client=wire, max_retries=0)
            assert agent.chat.completions.create(model=MODEL, messages=[USER]).choices  # type: ignore[list-item]
    assert not path.exists()


def test_a_place_that_others_reach_or_that_is_taken_is_refused(tmp_path: Path, proxy: Proxy) -> None:
    tmp_path.chmod(0o777)
    for options, named in (
        ({"path": tmp_path / "s"}, "others can write"), ({"path": tmp_path / "no" / "s"}, "does not exist"),
        ({"port": proxy.port}, str(proxy.port)), ({"port": 99999}, "99999"),
    ):  # fmt: skip
        backend = scripted()
        with pytest.raises(ConfigError, match=named):
            Proxy(backend, chat(), **options)  # type: ignore[arg-type]
        backend.close()


def test_it_listens_on_loopback_alone(proxy: Proxy) -> None:
    assert proxy._socket.getsockname()[0] == "127.0.0.1"


def conversation(backend: Backend) -> Trajectory:
    """Three turns by the openai client."""
    with Proxy(backend, chat()) as proxy:
        opened, messages = ticket(proxy), [USER]
        for _ in range(3):
            message = create(proxy, opened, messages=messages).choices[0].message.model_dump(exclude_none=True)
            messages += [message, {"role": "tool", "tool_call_id": "c", "content": "plum"}]
        return proxy.close_episode(opened)


def test_a_recording_is_replayed_without_a_model(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    recorder = RecordingSampler(ScriptedSampler(REPLIES), path)
    recorded = conversation(SamplerBackend(recorder, chat()))
    recorder.close()
    replayed = conversation(SamplerBackend(ReplaySampler(path), chat()))
    assert (replayed.turns, replayed.prompt_ids) == (recorded.turns, recorded.prompt_ids)
    with pytest.raises(RecordError, match="another one"):
        ReplaySampler(path).generate([Request(0, [1, 2], (0,))], SamplingParams())
    path.write_text("{}\n")
    with pytest.raises(RecordError, match="line 1"):
        ReplaySampler(path)


def test_an_external_api_is_passed_on_and_its_record_is_no_food_for_a_policy_gradient() -> None:
    with Proxy(scripted(), chat()) as upstream:
        opened = ticket(upstream)
        os.environ["OPENAI_API_KEY"] = opened.token
        try:
            endpoint = Endpoint(upstream.url, MODEL, top_k=0, tries=1)
            found = conversation(ExternalBackend(endpoint, chat()))
        finally:
            del os.environ["OPENAI_API_KEY"]
        beyond = upstream.close_episode(opened)
    assert [turn.commands for turn in found.turns] == [["ls"], ["cat x"], []]
    assert [turn.commands for turn in beyond.turns] == [["ls"], ["cat x"], []]
    assert found.retokenised and not beyond.retokenised


def test_an_external_api_that_is_down_is_a_503() -> None:
    backend = ExternalBackend(Endpoint("http://127.0.0.1:9/v1", MODEL, tries=1), chat())
    with Proxy(backend, chat()) as proxy, pytest.raises(openai.InternalServerError, match="no usable answer"):
        create(proxy, ticket(proxy))


def test_the_verb_serves_a_saved_model_and_writes_what_it_recorded(tmp_path: Path) -> None:
    tiny.model().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    out, calls = tmp_path / "out.jsonl", tmp_path / "calls.jsonl"
    words = ["proxy", "--model", str(tmp_path / "model"), "--max-new-tokens", "5", "--out", str(out)]
    process = subprocess.Popen([sys.executable, "-m", "mini_rome.cli", *words, "--record", str(calls)],
                               stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert process.stdout is not None
    url, token, model, _ = (process.stdout.readline().split()[-1] for _ in range(4))
    agent = openai.OpenAI(base_url=url, api_key=token, http_client=HTTP, max_retries=0)
    answer = agent.chat.completions.create(model=model, messages=[USER])  # type: ignore[list-item]
    process.send_signal(signal.SIGINT)
    told = process.communicate(timeout=30)[0]
    assert process.returncode == 0
    assert "1 calls in 1 chains" in told
    row = json.loads(out.read_text())
    assert len(row["turns"][0]["ids"]) == answer.usage.completion_tokens  # type: ignore[union-attr]
    assert json.loads(calls.read_text())["ids"] == row["turns"][0]["ids"]


def test_sources_that_exclude_each_other_are_refused(capsys: pytest.CaptureFixture) -> None:
    assert main(["proxy", "--record", "a", "--replay", "b"]) == 2
    assert "choose one" in capsys.readouterr().err

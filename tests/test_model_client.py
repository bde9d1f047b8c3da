"""The client of OpenAI-compatible servers, against a server that misbehaves on purpose."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from mini_rome.env import Env
from mini_rome.errors import ConfigError
from mini_rome.evaluation.model_client import ContextFull, Endpoint, EndpointError, read_reply
from mini_rome.evaluation.policies import EndpointPolicy, response_of, tool_schemas
from mini_rome.sandbox import Pool
from mini_rome.tasks.choice import find_task

Answer = tuple[int, dict[str, str], bytes]


class Server(ThreadingHTTPServer):
    """Gives the answers in turn, the last one for ever; keeps what it was asked."""

    daemon_threads = True

    def __init__(self, answers: list[Answer]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers, self.asked, self.keys = list(answers), [], []  # type: ignore[var-annotated]
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self.server.keys.append(self.headers.get("Authorization"))
        status, headers, raw = self.server.answers.pop(0) if len(self.server.answers) > 1 else self.server.answers[0]
        self.send_response(status)
        for name, value in {"Content-Length": str(len(raw)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None: ...


def says(text: str = "", *calls: tuple[str, Any], usage: bool = True) -> Answer:
    tools = [
        {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
        for number, (name, given) in enumerate(calls)
    ]
    answer: dict[str, Any] = {"choices": [{"message": {"role": "assistant", "content": text, "tool_calls": tools}}]}
    if usage:
        answer["usage"] = {"prompt_tokens": 11, "completion_tokens": 3}
    return 200, {}, json.dumps(answer).encode()


@pytest.fixture
def serve() -> Iterator[Any]:
    servers: list[Server] = []

    def start(*answers: Answer) -> Server:
        servers.append(Server(list(answers)))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def client(server: Server, **options: Any) -> tuple[Endpoint, list[float]]:
    waits: list[float] = []
    return Endpoint(server.url, "m", sleep=waits.append, **{"timeout_s": 5.0, "tries": 3, **options}), waits


def test_one_answer_with_calls_and_tokens(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    server = serve(says("thinking", ("bash", {"command": "ls"})))
    endpoint, _ = client(server)
    reply = endpoint.ask([{"role": "user", "content": "x"}], [], 7)
    assert reply.calls == (("c0", "bash", '{"command": "ls"}'),)
    assert (reply.prompt_tokens, reply.completion_tokens) == (11, 3)
    asked = server.asked[0]
    assert (asked["temperature"], asked["top_p"], asked["top_k"], asked["seed"]) == (0.7, 0.8, 20, 7)
    assert server.keys == ["Bearer secret-key"] and "secret-key" not in repr(endpoint)


def test_429_is_waited_out_as_long_as_the_server_says(serve: Any) -> None:
    endpoint, waits = client(serve((429, {"Retry-After": "7"}, b"slow down"), (503, {}, b""), says("ok")))
    assert endpoint.ask([], [], 0).text == "ok"
    assert waits == [7.0, 2.0]


RUBBISH = [b"", b"<html>busy</html>", b"{}", b'{"choices": []}', b'{"choices": [{"message": null}]}', b"[1]",
           b"\xff\xfe", b'{"choices": [{"message": {"content": 3}}]}', b"[" * 100_000]  # fmt: skip


@pytest.mark.parametrize("raw", RUBBISH, ids=[str(raw[:20]) for raw in RUBBISH])
def test_rubbish_is_tried_again_and_then_unscored_never_zero(serve: Any, raw: bytes) -> None:
    server = serve((200, {}, raw))
    endpoint, waits = client(server)
    with pytest.raises(EndpointError, match="no chat completion"):
        endpoint.ask([], [], 0)
    assert len(server.asked) == 3 and len(waits) == 2


def test_a_server_that_hangs_or_is_not_there_ends_in_time(serve: Any) -> None:
    server = serve((200, {"Content-Length": "1000"}, b"{"))
    endpoint, _ = client(server, timeout_s=0.3, tries=2)
    with pytest.raises(EndpointError, match="in 2 tries"):
        endpoint.ask([], [], 0)
    gone = Endpoint("http://127.0.0.1:9/v1", "m", tries=2, timeout_s=1.0, sleep=lambda _: None)
    with pytest.raises(EndpointError, match="127.0.0.1:9"):
        gone.ask([], [], 0)


@pytest.mark.parametrize(
    ("status", "said"), [(401, "OPENAI_API_KEY"), (403, "OPENAI_API_KEY"), (404, "--model-name m")]
)
def test_what_no_retry_mends_stops_the_run_and_names_the_option(serve: Any, status: int, said: str) -> None:
    server = serve((status, {}, b"no"))
    endpoint, _ = client(server)
    with pytest.raises(ConfigError, match=said):
        endpoint.ask([], [], 0)
    assert len(server.asked) == 1


def test_a_redirect_is_not_followed_with_the_key(serve: Any) -> None:
    other = serve(says("stolen"))
    endpoint, _ = client(serve((302, {"Location": other.url + "/chat/completions"}, b"")))
    with pytest.raises(ConfigError, match="302"):
        endpoint.ask([], [], 0)
    assert other.asked == []


def test_a_server_without_top_k_is_asked_without_it_and_this_is_noted(serve: Any) -> None:
    server = serve((400, {}, b'{"error": "Unrecognized request argument: top_k"}'), says("a"), says("b"))
    endpoint, waits = client(server)
    assert (endpoint.ask([], [], 0).text, endpoint.ask([], [], 0).text) == ("a", "b")
    assert ["top_k" in body for body in server.asked] == [True, False, False]
    assert endpoint.notes == {"top_k"} and waits == []


def test_a_full_context_is_the_episodes_end(serve: Any) -> None:
    endpoint, _ = client(serve((400, {}, b"maximum context length is 8192 tokens")))
    with pytest.raises(ContextFull):
        endpoint.ask([], [], 0)


@pytest.mark.parametrize(
    ("url", "model", "said"), [("host:8000", "m", "http://"), ("http://h/v1", "", "--model-name")]
)
def test_bad_options_are_named_before_anything_is_asked(url: str, model: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Endpoint(url, model)


def play(server: Server, task_name: str = "notes-k2-test-0") -> Any:
    endpoint, _ = client(server)
    with Pool("sim", size=1) as pool, Env(find_task(task_name), pool) as env:
        return EndpointPolicy(endpoint).play(env, 0)


def test_a_model_that_solves_the_task_by_calls_earns_1(serve: Any) -> None:
    first, second = find_task("notes-k2-test-0").expert
    server = serve(says("", ("bash", {"command": first})), says("", ("bash", {"command": second}), ("submit", {})))
    episode = play(server)
    assert (episode.verdict.reward, episode.ending, episode.cause, episode.turns) == (1.0, "submitted", "", 2)
    assert (episode.prompt_tokens, episode.completion_tokens) == (22, 6)
    last = server.asked[1]["messages"]
    assert [message["role"] for message in last] == ["system", "user", "assistant", "tool"]
    assert last[3]["tool_call_id"] == "c0" and "write" in last[3]["content"]


def test_a_model_that_only_talks_is_told_so_and_runs_out(serve: Any) -> None:
    server = serve(says("I think the answer is 42"))
    episode = play(server)
    assert (episode.verdict.reward, episode.cause) == (0.0, "timeout")
    assert server.asked[-1]["messages"][-1] == {"role": "user", "content": "[no tool call]"}


def test_the_tools_of_a_task_are_offered_with_their_parameters() -> None:
    names = {tool["function"]["name"] for tool in tool_schemas(find_task("notes"))}
    assert names == {"bash", "submit"}
    shop = {tool["function"]["name"]: tool["function"] for tool in tool_schemas(find_task("shop"))}
    assert "bash" not in shop and "submit" in shop
    assert shop["search"]["parameters"]["required"] == ["kind"]


@pytest.mark.parametrize("arguments", ["", "ls", "[]", '{"cmd": "ls"}', '{"command": 3}', '{"command": "a\\u0000b"}'])
def test_bad_arguments_are_the_agents_fault_not_the_servers(arguments: str) -> None:
    message = {"tool_calls": [{"id": "1", "function": {"name": "bash", "arguments": arguments}}]}
    reply = read_reply(json.dumps({"choices": [{"message": message}]}).encode())
    assert response_of(reply, find_task("notes")).problem

"""The part of OpenAI's chat protocol that the model proxy speaks: requests checked, answers written.

What would change the sampling behind the trainer's back (temperature, seed, ...) is accepted and left unused: an
episode samples with the parameters it was opened with. What cannot be given at all (n above 1, logit_bias, ...) is a
400 that names it. Tool definitions are read for their names and not shown to the model: it was trained on the format
of `trace.py`.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from mini_rome.trace import Call, Response

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
         "function": "tool"}  # fmt: skip
# Accepted without effect on what is sampled.
UNUSED = frozenset("temperature top_p top_k seed".split())
HARMLESS = frozenset(
    "model messages tools stream stream_options max_tokens max_completion_tokens user metadata store service_tier "
    "safety_identifier prompt_cache_key".split()
)
# Options that are fine where they ask for what is done anyway.
ONLY: Mapping[str, tuple[Any, ...]] = {
    "n": (1, None), "logprobs": (False, None), "top_logprobs": (None, 0), "logit_bias": (None, {}),
    "stop": (None, []), "presence_penalty": (0, 0.0, None), "frequency_penalty": (0, 0.0, None),
    "tool_choice": ("auto", "none", None), "parallel_tool_calls": (True, None),
    "response_format": (None, {"type": "text"}), "echo": (False, None),
}  # fmt: skip

# Numbers that are accepted, as OpenAI bounds them.
RANGES: Mapping[str, tuple[float, float]] = {"temperature": (0, 2), "top_p": (0, 1)}
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # perhaps half a character, which no token has and no answer can hold
KEPT = 1 << 18  # bytes of a request up to which its messages are kept for the next: parsed, twenty times as many
CACHED = 2048  # characters of arguments up to which their canonical form is kept


class Refused(Exception):
    """A request that gets an error: status, a message that names the option and the way on, and OpenAI's code.

    last: the connection cannot serve another request, since the rest of this one is not read.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None, last: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.last = status, code, param, last

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Message:
    """One message, reduced to what the model sees. Calls: (tool, arguments as canonical JSON or as they came)."""

    role: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()

    @property
    def bodies(self) -> list[str]:
        """The calls as a response of `trace.py` writes them."""
        return [_body(name, arguments) for name, arguments in self.calls]


@dataclass(frozen=True)
class Asked:
    """A checked request. `tools`: name -> its first parameter. `unused`: options given and left unused."""

    messages: tuple[Message, ...]
    tools: Mapping[str, str] = field(default_factory=dict)
    max_tokens: int | None = None
    stream: bool = False
    usage: bool = False
    unused: tuple[str, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict)


class History:
    """The messages of an agent's last request: what comes again, as most does with every call, is not read again."""

    def __init__(self) -> None:
        self._read: list[tuple[object, Message]] = []

    def clear(self) -> None:
        self._read = []

    def read(self, found: Any) -> tuple[Message, ...]:
        """The messages of a request, the same objects as before where they are unchanged. Raises Refused (400)."""
        if not isinstance(found, list) or not found:
            raise Refused(400, "messages must be a list of at least one message", None, "messages")
        read = [before for before, given in takewhile(_same, zip(self._read, found, strict=False))]
        for number, given in enumerate(found[len(read) :], start=len(read)):
            message = read_message(given, f"messages[{number}]")
            read.append((given if _of_texts(given) else object(), message))  # equal to nothing: read again
        self._read = read
        return tuple(message for _, message in read)


def _same(pair: tuple[tuple[object, Message], object]) -> bool:
    try:
        return pair[0][0] == pair[1]
    except RecursionError:
        return False


def _of_texts(message: Mapping[str, Any]) -> bool:
    """Whether an equal message says the same: names and arguments of other types may differ as 1 and true do."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return all(isinstance(call["name"], str) and isinstance(call.get("arguments"), str) for call in calls)


def read_request(raw: bytes, model: str, history: History) -> Asked:
    """The request in these bytes. Raises Refused: 400 for what is wrong or not supported, 404 for another model."""
    try:
        body = json.loads(raw)
        if _HALF.search(raw):
            body = json.loads(json.dumps(body, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {str(error)[:120]}") from None
    if not isinstance(body, dict):
        raise Refused(400, "the body must be a JSON object")
    if body.get("model") != model:
        raise Refused(404, f"model {str(body.get('model'))[:60]!r} is not here; this proxy serves {model!r}",
                      "model_not_found", "model")  # fmt: skip
    for name, value in body.items():
        if name in ONLY and value not in ONLY[name]:
            raise Refused(400, f"{name}={str(value)[:60]} is not supported; leave it out", None, name)
        if name not in ONLY and name not in HARMLESS and name not in UNUSED:
            raise Refused(400, f"option {name[:60]!r} is not supported; leave it out", None, name[:60])
    unused = tuple(sorted(name for name in UNUSED if body.get(name) is not None))
    for name in unused:
        if isinstance(body[name], bool) or not isinstance(body[name], int | float):
            raise Refused(400, f"{name} must be a number", None, name)
        low, high = RANGES.get(name, (-math.inf, math.inf))
        if not low <= body[name] <= high:  # NaN is not
            raise Refused(400, f"{name}={str(body[name])[:40]}: must lie in [{low:g}, {high:g}]", None, name)
    options = body.get("stream_options") or {}
    messages = (history if len(raw) < KEPT else History()).read(body.get("messages"))
    return Asked(
        messages, _tools(body.get("tools")), _limit(body), _flag(body, "stream"),
        isinstance(options, dict) and bool(options.get("include_usage")), unused, body,
    )  # fmt: skip


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise Refused(400, f"{name} must be true or false", None, name)
    return bool(value)


def _limit(body: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise Refused(400, f"{name}={str(value)[:40]}: must be a whole number of at least 1", None, name)
        return value
    return None


def _tools(found: Any) -> dict[str, str]:
    """Name -> first parameter, "" for none."""
    try:
        functions = [tool["function"] for tool in found or []]
        return {
            str(function["name"]): str(next(iter((function.get("parameters") or {}).get("properties") or {}), ""))
            for function in functions
        }
    except (TypeError, LookupError, AttributeError):
        raise Refused(400, "tools must be a list of {type: function, function: {name, ...}}", None, "tools") from None


def read_message(message: Any, where: str = "message") -> Message:
    """One message as a client sends it. Raises Refused (400), naming `where`."""
    given = message.get("role") if isinstance(message, dict) else None
    role = ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise Refused(400, f"{where}: role must be one of {', '.join(ROLES)}", None, where)
    text = _text(where, message.get("content"))
    if not message.get("tool_calls"):  # most of a history, which comes with every call
        return Message(role, text)
    try:
        calls = tuple(
            (str(call["function"]["name"]), _arguments(call["function"].get("arguments") or "{}"))
            for call in message["tool_calls"]
        )
    except (TypeError, LookupError, AttributeError):
        raise Refused(400, f"{where}: tool_calls must be a list of function calls", None, where) from None
    return Message(role, text, calls if role == "assistant" else ())


def _arguments(given: Any) -> str:
    """As text; some clients send the object itself."""
    text = given if isinstance(given, str) else json.dumps(given)
    return canonical(text) if len(text) < CACHED else canonical.__wrapped__(text)


def _text(where: str, content: Any) -> str:
    """Text, or text parts joined; other parts are refused."""
    if content is None:
        return ""
    if isinstance(content, list):
        parts = []
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise Refused(400, f"{where}: only text content is supported", None, where)
            parts.append(part["text"])
        content = "".join(parts)
    if not isinstance(content, str):
        raise Refused(400, f"{where}: content must be text", None, where)
    return content


@functools.lru_cache(maxsize=1024)  # agents send the whole history with every call
def canonical(arguments: str) -> str:
    """One spelling for arguments that say the same; text that is no JSON stays. Half characters are replaced.

    >>> canonical('{ "b": 1, "a": 2 }')
    '{"a":2,"b":1}'
    """
    try:
        same = json.dumps(json.loads(arguments), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    except (ValueError, RecursionError):
        same = arguments
    return same.encode("utf-8", "replace").decode()  # escapes in there may spell half characters, too


def _body(name: str, arguments: str) -> str:
    """
    >>> _body("bash", '{"command":"ls"}'), _body("submit", "{}"), _body("cancel", '{"item":"plum"}')
    ('bash ls', 'submit', 'cancel {"item":"plum"}')
    """
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        given = arguments
    if isinstance(given, dict) and isinstance(given.get("command"), str):
        arguments = given["command"]
    return f"{name} {arguments}" if given not in ({}, "") else name


def call_arguments(call: Call, parameter: str) -> str:
    """The arguments of a sampled call as JSON: those it wrote, or its text as the tool's first parameter.

    >>> call_arguments(Call("bash", "ls"), "command"), call_arguments(Call("submit"), "")
    ('{"command": "ls"}', '{}')
    """
    if call.tool != "bash":
        try:
            if isinstance(json.loads(call.command or "{}"), dict):
                return call.command or "{}"
        except (ValueError, RecursionError):
            pass  # plain text
    return json.dumps({parameter or "command": call.command}, ensure_ascii=False)


def written(text: str, response: Response, tools: Mapping[str, str], number: int) -> dict[str, Any]:
    """The assistant's message of a sampled response; a malformed one, or any where no tools are offered, is text."""
    if response.problem or not tools:
        return {"role": "assistant", "content": text}
    calls = [
        {
            "id": f"call-{number}-{index}", "type": "function",
            "function": {"name": call.tool, "arguments": call_arguments(call, tools.get(call.tool, ""))},
        }
        for index, call in enumerate(response.calls)
    ]  # fmt: skip
    return {"role": "assistant", "content": response.said or None, "tool_calls": calls}


def completion(
    message: Mapping[str, Any], name: str, model: str, created: int, reason: str, usage: tuple[int, int]
) -> dict[str, Any]:
    """A whole chat completion. usage: (prompt tokens, completion tokens)."""
    return {
        "id": name, "object": "chat.completion", "created": created, "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
        "usage": _usage(usage),
    }  # fmt: skip


def _usage(usage: tuple[int, int]) -> dict[str, int]:
    return {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}


def events(whole: Mapping[str, Any], usage: bool) -> Iterator[bytes]:
    """The same completion as server-sent events: role, text, one event per call, the reason, [DONE]."""
    choice = whole["choices"][0]
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if message["content"]:
        deltas.append({"content": message["content"]})
    for index, call in enumerate(message.get("tool_calls") or []):
        deltas.append({"tool_calls": [{"index": index, **call}]})
    head = {name: whole[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    for delta in deltas:
        yield _event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    yield _event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]})
    if usage:
        yield _event({**head, "choices": [], "usage": whole["usage"]})
    yield b"data: [DONE]\n\n"


def _event(body: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode()

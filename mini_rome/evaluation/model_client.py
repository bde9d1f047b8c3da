"""A client for any OpenAI-compatible server: chat completions with tools, over plain HTTP.

A server that is slow, overloaded, cut or talks rubbish is asked again, a few times; then the episode is unscored
(EndpointError), never 0. What no retry mends (no such model, no access) stops the run. Not in the paper.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import requests

from mini_rome.errors import ConfigError, SandboxError

MAX_BYTES = 16 << 20  # of one answer
AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
LONGEST_WAIT_S = 60.0  # that a server's Retry-After is followed
KEY = "OPENAI_API_KEY"


class EndpointError(SandboxError):
    """The server gave no usable answer. The episode is not scored."""


class ContextFull(EndpointError):
    """The conversation no longer fits the model: the episode ends here, and what is there is judged."""


@dataclass(frozen=True)
class Reply:
    """One answer: the assistant's message as it goes back into the conversation, and its tokens."""

    text: str
    calls: tuple[tuple[str, str, str], ...]  # (id, tool, arguments as JSON text)
    message: dict[str, Any]
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass
class Endpoint:
    """A model behind `URL/chat/completions`. The key comes from the environment and is never written anywhere.

    timeout_s bounds one request as a whole. `sleep` is replaced in tests.
    """

    url: str
    model: str
    temperature: float = 0.7
    top_p: float = 0.8
    top_k: int = 20
    max_tokens: int = 4096
    timeout_s: float = 300.0
    tries: int = 5
    sleep: Callable[[float], None] = time.sleep
    notes: set[str] = field(default_factory=set)  # what the server would not take

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"--endpoint {self.url}: must begin with http:// or https://, as in http://HOST:8000/v1")
        if not self.model:
            raise ConfigError("--endpoint needs --model-name: the name by which the server knows the model")
        self.url = self.url.rstrip("/").removesuffix("/chat/completions")

    def ask(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], seed: int) -> Reply:
        """The next message of the assistant. Raises ContextFull, EndpointError, ConfigError."""
        body: dict[str, Any] = {
            "model": self.model, "messages": list(messages), "tools": list(tools), "seed": seed,
            "temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.max_tokens,
        }  # fmt: skip
        if self.top_k and "top_k" not in self.notes:
            body["top_k"] = self.top_k
        said = ""
        for attempt in range(self.tries):
            wait = min(2.0**attempt, 30.0)
            try:
                status, headers, raw = self._post(body)
            except (requests.exceptions.RequestException, TimeoutError) as error:
                said = f"{type(error).__name__}: {error}"
            else:
                if status == 200:
                    try:
                        return read_reply(raw)
                    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
                        said = f"an answer that is no chat completion ({error}): {raw[:120]!r}"
                else:
                    said = f"status {status}: {raw[:300].decode(errors='replace')}"
                    if status == 400 and "top_k" in body and b"top_k" in raw:
                        self.notes.add("top_k")  # not in the protocol; OpenAI's own servers refuse it
                        del body["top_k"]
                        continue
                    self._give_up(status, said)
                    wait = _retry_after(headers, wait)
            if attempt + 1 < self.tries:
                self.sleep(wait)
        raise EndpointError(f"{self.url}: no usable answer in {self.tries} tries; the last: {said}")

    def _give_up(self, status: int, said: str) -> None:
        """Raise for what another try does not mend."""
        if status in (401, 403):
            raise ConfigError(f"--endpoint {self.url}: {said}\nThe key is read from the variable {KEY}.")
        if status in (404, 405) or 300 <= status < 400:
            raise ConfigError(f"--endpoint {self.url} --model-name {self.model}: {said}")
        if status in (400, 413, 422) and ("context" in said.lower() or "too long" in said.lower() or status == 413):
            raise ContextFull(f"{self.url}: {said}")
        if status not in AGAIN:
            raise EndpointError(f"{self.url}: {said}")

    def _post(self, body: Mapping[str, Any]) -> tuple[int, Mapping[str, str], bytes]:
        """(status, headers, body), whole within timeout_s and MAX_BYTES. Redirects are not followed: they would take
        the key elsewhere."""
        key = os.environ.get(KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        deadline = time.monotonic() + self.timeout_s
        with requests.post(
            f"{self.url}/chat/completions", json=body, headers=headers, stream=True, allow_redirects=False,
            timeout=(min(10.0, self.timeout_s), self.timeout_s),
        ) as response:  # fmt: skip
            raw = bytearray()
            for part in response.iter_content(1 << 16):
                raw += part
                if len(raw) > MAX_BYTES:
                    raise TimeoutError(f"more than {MAX_BYTES} bytes")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not complete within {self.timeout_s:g} s")
            return response.status_code, response.headers, bytes(raw)


def read_reply(raw: bytes) -> Reply:
    """A chat completion. Raises ValueError, TypeError, LookupError or AttributeError for anything else.

    >>> reply = read_reply(b'{"choices": [{"message": {"role": "assistant", "content": "hi"}}]}')
    >>> reply.text, reply.calls
    ('hi', ())
    """
    answer = json.loads(raw)
    message = answer["choices"][0]["message"]
    text = message.get("content") or ""
    if not isinstance(text, str):
        raise ValueError("the content is no text")
    calls = []
    for number, call in enumerate(message.get("tool_calls") or []):
        function = call["function"]
        arguments = function.get("arguments") or "{}"
        calls.append((
            str(call.get("id") or f"call-{number}"), str(function["name"]),
            arguments if isinstance(arguments, str) else json.dumps(arguments),
        ))  # fmt: skip
    back: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        back["tool_calls"] = [
            {"id": key, "type": "function", "function": {"name": name, "arguments": given}}
            for key, name, given in calls
        ]
    usage = answer.get("usage") or {}
    return Reply(text, tuple(calls), back, int(usage.get("prompt_tokens") or 0),
                 int(usage.get("completion_tokens") or 0))  # fmt: skip


def _retry_after(headers: Mapping[str, str], default: float) -> float:
    """Seconds that the server asks to wait, within reason."""
    try:
        return min(max(float(headers.get("Retry-After", "")), 0.0), LONGEST_WAIT_S)
    except ValueError:
        return default

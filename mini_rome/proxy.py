"""The model proxy: an OpenAI-compatible server in front of a sampler, or of an external API, that records every call.

An agent is given a base URL and a token that is good for one episode; it builds its context as it does in deployment,
and the calls that come out are what is trained on, token for token. The server listens on 127.0.0.1 or on a unix
socket alone. Covered: /v1/chat/completions with tools and streaming (a stream begins when its response is complete),
/v1/models. Not covered: TLS, other hosts, more than one choice, log-probs in answers, images.

    with Proxy(SamplerBackend(sampler, chat), chat) as proxy:
        ticket = proxy.open(Episode(chat, trajectory))
        run_any_agent(base_url=proxy.url, api_key=ticket.token)
        trajectory = proxy.close_episode(ticket)
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mini_rome.errors import ConfigError
from mini_rome.proxy_backends import Backend
from mini_rome.proxy_episode import Answer, Episode, Pending
from mini_rome.proxy_listen import Pace, guarded, listen, listen_unix
from mini_rome.proxy_protocol import Asked, History, Refused, completion, events, read_message, read_request, written
from mini_rome.trace import ChatFormat
from mini_rome.types import Trajectory

ROUTES = COMPLETIONS, MODELS = ("POST", "/v1/chat/completions"), ("GET", "/v1/models")
MODEL = "mini-rome"  # the name by which agents ask for the model
MAX_BODY, BODY_S = 32 << 20, 30.0  # of one request
MAX_CONNECTIONS = 512  # at once: each holds a descriptor
IDLE_S = 600  # that a connection waits for its next request: as long as an agent's commands may take in between
REMEMBERED = 4096  # tokens of ended episodes that still get 410 and not 401
START_S = 10.0
PATIENCE_S = 0.25  # no client hangs up sooner; asking whether one did costs a tenth of a call


@dataclass(frozen=True)
class Ticket:
    """What an agent needs, and by what the episode is closed."""

    token: str
    episode: Episode
    pace: Pace = field(default_factory=Pace, compare=False)
    history: History = field(default_factory=History, compare=False)


class Proxy:
    """The server and its open episodes. A context manager; thread-safe."""

    def __init__(
        self, backend: Backend, chat: ChatFormat, model: str = MODEL, port: int = 0, path: str | Path | None = None,
        *, max_body: int = MAX_BODY, max_connections: int = MAX_CONNECTIONS, hostile: bool = False,
    ) -> None:
        """port: on 127.0.0.1, 0 for any free one. path: a unix socket instead, in a folder of the owner alone.
        max_body: bytes of a request. hostile: read requests by pure Python alone.
        ConfigError: a chat format that frames no messages of an external agent."""
        chat.message("user", "")
        self.backend, self.chat, self.model, self.max_body = backend, chat, model, max_body
        self._tickets: dict[bytes, Ticket] = {}
        self._strangers = Pace()
        self._over: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()
        self.path = None if path is None else Path(path)
        self._socket = listen(port) if self.path is None else listen_unix(self.path)
        self.port = self._socket.getsockname()[1] if self.path is None else 0
        self._routes = {COMPLETIONS: self._completions, MODELS: self._models}
        config = uvicorn.Config(
            self._app, interface="asgi3", log_config=None, log_level="error", access_log=False, lifespan="off",
            proxy_headers=False, server_header=False, date_header=False, ws="none", timeout_keep_alive=IDLE_S,
            http=guarded(max_connections, pure_python=hostile),
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name="proxy", daemon=True)

    @property
    def url(self) -> str:
        """The base URL; of a unix socket the host says nothing, the client is told the path."""
        return f"http://127.0.0.1:{self.port}/v1" if self.path is None else "http://localhost/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        deadline = time.monotonic() + START_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                self.close()
                raise ConfigError(f"the proxy did not start within {START_S:g} s")
            time.sleep(0.005)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        self._server.run(sockets=[self._socket])

    def close(self) -> None:
        """Stop listening, end open calls and episodes. Idempotent."""
        self._server.should_exit = self._server.force_exit = True
        if self._thread.is_alive():
            self._thread.join(timeout=START_S)
        self._socket.close()
        self.backend.close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def open(self, episode: Episode) -> Ticket:
        """Let an agent in: a token that nobody can guess, good until the episode is closed."""
        token = f"mr-{secrets.token_urlsafe(24)}"
        ticket = Ticket(token, episode)
        with self._lock:
            self._tickets[_digest(token)] = ticket
        return ticket

    def close_episode(self, ticket: Ticket) -> Trajectory:
        """The episode's trajectory (its other chains beside it). Calls from now on get 410."""
        trajectory = ticket.episode.close()
        ticket.history.clear()
        with self._lock:
            if self._tickets.pop(_digest(ticket.token), None) is not None:
                self._over[_digest(ticket.token)] = None
                while len(self._over) > REMEMBERED:
                    self._over.popitem(last=False)
        self.backend.forget(trajectory.episode)
        return trajectory

    # -- requests --------------------------------------------------------------------------------------------------

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Two routes: a router that could do more costs a tenth of a call, by a sampling profile."""
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        answer = self._routes.get((method, scope["path"].rstrip("/")), _elsewhere)
        response = await answer(Request(scope, receive))
        await response(scope, receive, send)

    def _ticket(self, request: Request) -> Ticket:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        mark = _digest(token if scheme.lower() == "bearer" else "")
        with self._lock:
            if mark in self._tickets:
                return self._tickets[mark]
            if mark in self._over:
                raise Refused(410, "the episode is over: its token is no longer good", "episode_over")
        raise Refused(401, "wrong token: send `Authorization: Bearer` with the token of an open episode",
                      "invalid_api_key")  # fmt: skip

    async def _models(self, request: Request) -> Response:
        try:
            self._ticket(request)
        except Refused as refused:
            return await self._refuse(request, refused, None)
        entry = {"id": self.model, "object": "model", "created": 0, "owned_by": "mini-rome"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def _completions(self, request: Request) -> Response:
        ticket: Ticket | None = None
        try:
            ticket = self._ticket(request)
            episode = ticket.episode
            asked = read_request(await _body(request, self.max_body), self.model, ticket.history)
            pending = episode.begin(asked)
            begun = time.monotonic()
            answer = await self.backend.answer(pending, asked)
            if time.monotonic() - begun > PATIENCE_S and await request.is_disconnected():
                episode.lost()
                return Response(status_code=499)  # to nobody
            return self._answered(episode, asked, pending, answer)
        except Refused as refused:
            return await self._refuse(request, refused, ticket)
        except ClientDisconnect:
            return Response(status_code=499)

    async def _refuse(self, request: Request, refused: Refused, ticket: Ticket | None) -> Response:
        """Not faster than its `Pace`: whoever only errs must not take this process's time."""
        if ticket is not None and refused.status == 503:
            ticket.episode.failed = True
        await asyncio.sleep((self._strangers if ticket is None else ticket.pace).wait(time.monotonic()))
        if ticket is None:  # let it finish its request, or it may never see the answer
            try:
                await _body(request, self.max_body, keep=False)
            except (Refused, ClientDisconnect):
                refused.last = True
        return JSONResponse(refused.body, refused.status, {"connection": "close"} if refused.last else None)

    def _answered(self, episode: Episode, asked: Asked, pending: Pending, answer: Answer) -> Response:
        message = written(answer.text, answer.response, asked.tools, pending.number)
        episode.commit(pending, answer, read_message(message))
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        whole = completion(
            message, f"chatcmpl-{secrets.token_hex(8)}", self.model, int(time.time()),
            reason if answer.stopped else "length", (len(pending.request.ids), len(answer.ids)),
        )  # fmt: skip
        if asked.stream:
            return StreamingResponse(_stream(whole, asked.usage), media_type="text/event-stream")
        return JSONResponse(whole)


async def _stream(whole: dict, usage: bool) -> AsyncIterator[bytes]:
    for event in events(whole, usage):
        yield event


async def _body(request: Request, limit: int, keep: bool = True) -> bytes:
    """The request's body, or with keep=False nothing, once it has come. Refused: too long, or too slow."""
    raw, size = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                raw += part if keep else b""
                if size > limit:
                    raise Refused(413, f"the request has more than {limit} bytes", last=True)
    except TimeoutError:
        raise Refused(408, f"the request was not there within {BODY_S:g} s", last=True) from None
    return bytes(raw)


async def _elsewhere(request: Request) -> Response:
    """A path or method that is not served, told as the other refusals are."""
    path = request.scope["path"]
    allowed = [method for method, served in ROUTES if served == path.rstrip("/")]
    served = " and ".join(" ".join(route) for route in ROUTES)
    refused = Refused(405 if allowed else 404, f"{request.method} {path[:60]} is not served here; {served} are")
    return JSONResponse(refused.body, refused.status, {"allow": ", ".join(allowed)} if allowed else None)


def _digest(token: str) -> bytes:
    """Tokens are looked up by their hash, so that no comparison tells how much of one was right."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()

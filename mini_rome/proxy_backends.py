"""Who answers behind the proxy: a sampler, whose ids are recorded, or an external API, whose text is.

The sampler is asked by one thread alone. Whatever calls have come in while it was busy go into its next batch, so
that any number of agents share it without waiting for each other.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mini_rome.errors import ConfigError, SamplerError
from mini_rome.evaluation.model_client import ContextFull, Endpoint, EndpointError
from mini_rome.proxy_episode import Answer, Pending
from mini_rome.proxy_protocol import Asked, Message, Refused, canonical
from mini_rome.sampler.base import Completion, Request, Sampler, SamplingParams
from mini_rome.trace import Call, ChatFormat, Response


class Backend(Protocol):
    """Answers one call; raises Refused (503) where it cannot."""

    async def answer(self, pending: Pending, asked: Asked) -> Answer: ...

    def forget(self, episode: int) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class _Call:
    request: Request
    params: SamplingParams
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Completion]  # of the loop, whose thread alone sets it


class SamplerBackend:
    """A sampler behind a queue. timeout_s: after so long without an answer a call gets 503."""

    def __init__(self, sampler: Sampler, chat: ChatFormat, timeout_s: float = 120.0) -> None:
        self.sampler, self.chat, self.timeout_s = sampler, chat, timeout_s
        self._queue: queue.SimpleQueue[_Call | int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="proxy-sampler", daemon=True)
        self._thread.start()

    async def answer(self, pending: Pending, asked: Asked) -> Answer:
        if not self._thread.is_alive():
            raise Refused(503, "the sampler is gone", "sampler_down")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        self._queue.put(_Call(pending.request, pending.params, loop, future))
        try:
            async with asyncio.timeout(self.timeout_s):
                found = await future
        except TimeoutError:
            raise Refused(503, f"the sampler gave no answer within {self.timeout_s:g} s", "sampler_down") from None
        except Exception as error:  # whatever a model raises: the agent is told, and the episode goes unscored
            raise Refused(503, f"the sampler failed: {type(error).__name__}: {str(error)[:200]}",
                          "sampler_down") from error  # fmt: skip
        stopped = found.ids[-1] == self.chat.stop_id
        if asked.tools:
            text, response = self.chat.parse(found.ids, None, asked.tools)
        else:  # an agent that reads its actions from the text
            text = self.chat.decode(found.ids[:-1] if stopped else found.ids)
            response = Response(said=text)
        return Answer(found.ids, found.logprobs, found.version, text, response, stopped)

    def forget(self, episode: int) -> None:
        self._queue.put(episode)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=5.0)

    def _work(self) -> None:
        waiting: list[_Call] = []
        while True:
            items = [] if waiting else [self._queue.get()]
            while not self._queue.empty():
                items.append(self._queue.get())
            done = [item for item in items if isinstance(item, int)]
            waiting += [item for item in items if isinstance(item, _Call)]
            if None in items:
                _hand_out(waiting, [SamplerError("the proxy was closed")] * len(waiting))
                return
            if done:
                self.sampler.forget(done)
            waiting = self._batch(waiting)

    def _batch(self, waiting: list[_Call]) -> list[_Call]:
        """Ask for the calls that can go together: the same parameters, one an episode. Returns the others."""
        batch: dict[int, _Call] = {}
        left = []
        for call in waiting:
            if call.future.done():
                continue  # its client waits no more
            first = next(iter(batch.values()), call)
            if call.params == first.params and call.request.episode not in batch:
                batch[call.request.episode] = call
            else:
                left.append(call)
        if not batch:
            return left
        calls = list(batch.values())
        found: Sequence[Completion | Exception]
        try:
            found = self.sampler.generate([call.request for call in calls], calls[0].params)
            if len(found) != len(calls):
                raise SamplerError(f"{len(found)} completions for {len(calls)} requests")
        except Exception as error:  # handed on to each caller
            found = [error] * len(calls)
        _hand_out(calls, found)
        return left


def _hand_out(calls: Sequence[_Call], found: Sequence[Completion | Exception]) -> None:
    """Give each call what was found for it, by one wake-up of each loop."""
    loops: dict[asyncio.AbstractEventLoop, list[tuple[_Call, Completion | Exception]]] = defaultdict(list)
    for call, outcome in zip(calls, found, strict=True):
        loops[call.loop].append((call, outcome))
    for loop, pairs in loops.items():
        try:
            loop.call_soon_threadsafe(_settle, pairs)
        except RuntimeError:
            pass  # that proxy has closed, and its clients with it


def _settle(pairs: Sequence[tuple[_Call, Completion | Exception]]) -> None:
    for call, outcome in pairs:
        if call.future.done():
            continue
        if isinstance(outcome, Exception):
            call.future.set_exception(outcome)
        else:
            call.future.set_result(outcome)


class ExternalBackend:
    """An OpenAI-compatible API elsewhere: the deployment mode. Its tokens are not known, so that what is recorded is
    rebuilt from text and marked: fit to read and to imitate, refused by every policy gradient."""

    def __init__(self, endpoint: Endpoint, chat: ChatFormat) -> None:
        self.endpoint, self.chat = endpoint, chat

    async def answer(self, pending: Pending, asked: Asked) -> Answer:
        tools: list[dict[str, Any]] = asked.raw.get("tools") or []
        try:
            reply = await asyncio.to_thread(self.endpoint.ask, asked.raw["messages"], tools, pending.number)
        except ContextFull as error:
            raise Refused(400, str(error), "context_length_exceeded") from error
        except (EndpointError, ConfigError) as error:
            raise Refused(503, str(error), "external_down") from error
        calls = tuple((name, canonical(arguments)) for _, name, arguments in reply.calls)
        said = Message("assistant", reply.text, calls)
        ids = self.chat.rebuilt(said.text, said.bodies)
        made = tuple(Call(*_split(body)) for body in said.bodies)
        return Answer(ids, [], 0, self.chat.decode(ids[:-1]), Response(made, said=reply.text), retokenised=True)

    def forget(self, episode: int) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is open."""


def _split(body: str) -> tuple[str, str]:
    name, _, command = body.partition(" ")
    return name, command



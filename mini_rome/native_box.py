"""Agent-native episodes inside the box: the sandbox profile `native`, on Docker.

The agent's own program runs in a box of its episode alone, with no network and all hardening as ever. It is given a
base URL on 127.0.0.1, where a forwarder inside passes connections on to a unix socket: that of a model proxy of its
episode alone, whose folder is the only thing of the host in the box, bound read-only. What the model sampled is on
the host token for token; what the commands did is known from the messages that come back. Events of command text are
logged before the agent is answered, those of processes and network at the episode's end. The episode's deadline kills
agent and forwarder. Not covered: tools that run on the host, engines on another machine. Not in the paper.

What a hostile command in there gains: the agent's token, since it is the same user, and with it calls that count as
the episode's turns and are recorded as its chains; an HTTP parser of this process, in pure Python, by at most
MAX_CONNECTIONS at once and MAX_BODY a request, refused no faster than `proxy_listen.Pace` lets it. Without the token
it gets 401. Not another box's proxy (each knows the token of its running episode alone), not the network, not a file.

A box and its proxy serve one episode after the other while a batch of rollouts runs, reset in between as any box of a
pool is: swept, and emptied of all that an agent can write to. One that is not surely clean is replaced.
"""

from __future__ import annotations

import json
import shlex
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mini_rome.env import Env
from mini_rome.errors import ConfigError
from mini_rome.experts import Start
from mini_rome.native import Access, NativeRollout, tools_of
from mini_rome.proxy import MODEL, Proxy
from mini_rome.proxy_backends import Backend
from mini_rome.proxy_episode import Answer, Pending, Rules
from mini_rome.proxy_protocol import Asked
from mini_rome.rollout import Progress
from mini_rome.sampler.base import SamplingParams
from mini_rome.sandbox import Limits, Pool, Sandbox, Telemetry, reaper, resolve, run_id, runtime
from mini_rome.sandbox.base import HOME
from mini_rome.sandbox.docker import DockerSandbox
from mini_rome.sandbox.engine import engine_host
from mini_rome.sandbox.hardening import SOCKET_FOLDER, native
from mini_rome.types import SafetyEvent, StepResult, Task, Trajectory, Verdict

IMAGE = "mini-rome/tools:latest"  # base's Python has neither json nor http
SOCKET, PORT = "model.sock", 8377
FOLDER = f"{HOME}/.native"  # in the box; no part of the work dir, so no part of what is judged
MAX_BODY, MAX_CONNECTIONS = 2 << 20, 16  # of one box's proxy: what a hostile agent may hold of this process
SAID_BYTES = 4096  # of the agent's own output, the end

_PACKAGE = Path(__file__).parent


def _client_files() -> dict[str, str | bytes]:
    """Our agent as a package of its own: itself, and the module that shapes outputs."""
    modules = {path: (_PACKAGE / path).read_text() for path in ("native_client.py", "sandbox/output.py")}
    modules |= {"__init__.py": "", "sandbox/__init__.py": ""}
    return {f"mini_rome/{path}": text for path, text in modules.items()}


@dataclass(frozen=True)
class BoxedAgent:
    """An agent that runs in the box: its files, laid out in FOLDER, and the shell command that starts it there.

    It finds OPENAI_BASE_URL and OPENAI_API_KEY in its environment (not in any command line), and in FOLDER/task.json
    the model's name, the messages so far and the tools. It ends by itself, or at its first 410.
    """

    files: Mapping[str, str | bytes] = field(default_factory=_client_files)
    command: str = f"PYTHONPATH={FOLDER} exec python3 -B -m mini_rome.native_client {FOLDER}"

    def __call__(self, access: Access) -> None:
        box, episode = access.env.box, access.episode
        episode.rules = Rules(access.env.turns_left, access.env.max_malformed, lambda text: _watched(box, text))
        episode.trajectory.backend = box.label  # every result names the profile
        result = self._run(box, access)
        if (last := episode.last_turn) is not None:
            last.events += result.events
        if result.infra:
            access.verdict = Verdict(None, result.status)
            return
        verdict = access.env.give_up()
        why = _ending(result, episode.ended)
        if why and verdict.reward is not None:
            verdict = replace(verdict, reason=f"{why}; {verdict.reason}")
        access.verdict = verdict

    def _run(self, box: Sandbox, access: Access) -> StepResult:
        """One step of the box, as long as the episode may take: the forwarder, then the agent."""
        task = {"model": MODEL, "messages": access.messages, "tools": tools_of(access.env.task)}
        forward = (_PACKAGE / "sandbox" / "forward.py").read_text()
        for name, data in {**self.files, "forward.py": forward, "task.json": json.dumps(task)}.items():
            box.write(f"{FOLDER}/{name}", data)
        before = box.env
        box.env = {
            **before, "OPENAI_BASE_URL": f"http://127.0.0.1:{PORT}/v1", "OPENAI_API_KEY": access.token,
        }  # fmt: skip
        socket = f"{SOCKET_FOLDER}/{SOCKET}"
        try:
            return box.exec(
                f"python3 -I -S {FOLDER}/forward.py {PORT} {socket} bash -c {shlex.quote(self.command)} 2>&1 "
                f"| tail -c {SAID_BYTES}; exit ${{PIPESTATUS[0]}}",
                timeout=box.limits.episode_s,
            )
        finally:
            box.env = before  # the token is no part of a state


def _watched(box: Sandbox, command: str) -> tuple[SafetyEvent, ...]:
    """What a command's text gives away, logged before the agent has the command."""
    return () if box.observer is None else box.observer(command, StepResult("", 0), Telemetry())


def _ending(result: StepResult, ended: bool) -> str:
    """How an agent stopped, where not by submitting or its last turn and in good order."""
    if result.status != "ok":
        return f"agent ended: {result.status}"
    if result.exit_code:
        return f"agent exited with {result.exit_code} ({result.output.strip()[-200:]})"
    return "" if ended else "never submitted"


@dataclass(frozen=True)
class Shared:
    """One backend behind the proxies of many boxes: whoever opened it closes it."""

    backend: Backend

    async def answer(self, pending: Pending, asked: Asked) -> Answer:
        return await self.backend.answer(pending, asked)

    def forget(self, episode: int) -> None:
        self.backend.forget(episode)

    def close(self) -> None:
        """It stays open for the others."""


class _OneBox(Pool):
    """A pool of one box, whose episodes are counted and logged as those of the run's own pool."""

    def __init__(self, whole: Pool, make_box: Callable[[], Sandbox], image: str) -> None:
        super().__init__("docker", image, size=1, make_box=make_box)
        self._whole = whole

    def enlist(self, box: Sandbox) -> None:
        self._whole.enlist(box)


@dataclass(frozen=True)
class Slot:
    """A box that is made when first needed, and the proxy whose socket is bound into it."""

    proxy: Proxy
    boxes: Pool


class Slots:
    """Slots serve one episode at a time, and are kept for the next while a batch of rollouts runs. Thread-safe."""

    def __init__(self) -> None:
        self._idle: deque[Slot] = deque()
        self._undo: ExitStack | None = None
        self._lock = threading.Lock()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Until the end of this block a slot that is given back is used again; then all are closed."""
        with ExitStack() as self._undo:
            try:
                yield
            finally:
                self._idle.clear()
        self._undo = None

    @contextmanager
    def one(self, make: Callable[[ExitStack], Slot]) -> Iterator[Slot]:
        """An idle slot, or a new one. make: opens what it needs on the stack it is given."""
        with ExitStack() as own:
            with self._lock:
                slot = self._idle.pop() if self._idle else None
            if slot is None:
                slot = make(own)
                if self._undo is not None:
                    with self._lock:
                        self._undo.push(own.pop_all())
            yield slot
            with self._lock:
                if self._undo is not None:
                    self._idle.append(slot)


class BoxedRollout(NativeRollout):
    """Rollouts by an agent inside the box: the same surface. Each episode has a box and its proxy for itself.

    Raises ConfigError where the engine is not on this machine, ImageMissing naming the build command.
    """

    def __init__(
        self, *args: Any, agent: BoxedAgent | None = None, image: str = IMAGE, limits: Limits | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, agent=agent or BoxedAgent(), **options)
        self.image, self.limits, self._slots = image, limits or Limits(), Slots()
        if not engine_host().startswith("unix://"):
            raise ConfigError(
                f"DOCKER_HOST={engine_host()}: a native box reaches a socket of this machine, so it needs an engine "
                f"here; unset DOCKER_HOST, or use --agent builtin"
            )
        resolve("docker", image)

    def _run(
        self, episodes: list[tuple[int, Start]], params: SamplingParams, step: int, progress: Progress | None
    ) -> list[Trajectory]:
        for _, start in episodes:
            if start.task.tools:
                raise ConfigError(
                    f"task {start.task.name} brings tools that run on the host, which an agent inside the box cannot "
                    f"call; use --agent builtin for family {start.task.family!r}"
                )
        with self._slots.kept():
            return super()._run(episodes, params, step, progress)

    @contextmanager
    def _opened(self, proxy: Proxy, task: Task) -> Iterator[tuple[Proxy, Env]]:
        with self._slots.one(lambda undo: self._slot(undo, proxy, task)) as slot:
            with Env(task, slot.boxes, max_turns=task.chunks + self.extra_turns) as env:
                yield slot.proxy, env

    def _slot(self, undo: ExitStack, proxy: Proxy, task: Task) -> Slot:
        run = run_id()
        reaper.ensure_reaper(run, engine_host())
        labels = reaper.labels(run, task.name, self.limits.ttl_s)
        folder = undo.enter_context(runtime.box_folder(run, labels))
        served = undo.enter_context(self._served(proxy, folder))
        boxes = undo.enter_context(_OneBox(self.pool, lambda: self._box(folder, task), self.image))
        return Slot(served, boxes)

    @contextmanager
    def _served(self, proxy: Proxy, folder: Path) -> Iterator[Proxy]:
        """A proxy that knows its episode's token alone. The agent's user is not ours, so all may connect who get as
        far as the folder: this user, root, and the box."""
        path = folder / SOCKET
        shared = Shared(proxy.backend)
        with Proxy(
            shared, self.chat, path=path, max_body=MAX_BODY, max_connections=MAX_CONNECTIONS, hostile=True
        ) as served:
            path.chmod(0o666)
            yield served

    def _box(self, folder: Path, task: Task) -> Sandbox:
        return DockerSandbox.start(self.image, self.limits, task.name, native(folder))

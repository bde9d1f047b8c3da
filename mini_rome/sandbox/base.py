"""The surface both backends share: limits, the `Sandbox` class, and what happens around every step.

Covered here, so that it is the same on both: argument checks, deadlines per step and episode, closing from another
thread, the shape of the output, notices to the model. Not covered: isolation, which is the backend's (docker.py says
what it defends against; sim.py runs no process at all).
"""

from __future__ import annotations

import abc
import math
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self

from mini_rome.errors import CommandTooLong, SandboxClosed, SandboxDead, SandboxFileError
from mini_rome.sandbox.output import shape
from mini_rome.sandbox.safety import Telemetry, observe
from mini_rome.types import SafetyEvent, Snapshot, Status, StepResult

WORKDIR = "/app"
HOME = "/home/agent"
MAX_ENV = 64 << 10  # characters of exported variables carried from step to step
MAX_COMMAND = 4 << 20  # bytes; a longer command is refused, never cut
DEFAULT_ENV: Mapping[str, str] = {
    "HOME": HOME,
    "LC_CTYPE": "C.UTF-8",  # not LANG: only one of a locale's twelve files differs from C: every program reads all
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "SHELL": "/bin/bash",
    "TERM": "dumb",
    "USER": "agent",
}

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SHELL_OWN = frozenset("_ PWD OLDPWD SHLVL HOSTNAME BASHOPTS SHELLOPTS UID EUID PPID BASH_VERSINFO BASHPID".split())


@dataclass(frozen=True)
class Limits:
    """What a box may use. Seconds, bytes and mebibytes as the names say. Not in the paper; chosen for small tasks."""

    step_s: float = 30.0  # one command, where the caller names no timeout
    episode_s: float = 600.0  # all commands of an episode together, from its first
    raw_bytes: int = 1 << 20  # a step that writes more is killed (status output_limit)
    shown_bytes: int = 16 << 10  # of a step's output, what the model sees: half head, half tail
    read_bytes: int = 1 << 20  # one file by `read`
    memory_mb: int = 512  # swap included; the tmpfs contents count
    cpus: float = 1.0
    pids: int = 128
    disk_mb: int = 64  # the work dir
    inodes: int = 20_000  # files and directories in the work dir
    snapshot_bytes: int = 32 << 20
    snapshot_files: int = 5_000
    ttl_s: float = 1800.0  # a box ends itself after this long, whatever became of its owner


@dataclass(frozen=True)
class RawStep:
    """A step as a backend reports it, before `Sandbox.exec` shapes it for the model."""

    head: bytes
    exit_code: int | None
    tail: bytes = b""  # only when more than the raw cap was written: then head and tail are its two ends
    total: int = 0
    status: Status = "ok"
    killed: int = 0
    supported: bool = True
    notices: tuple[str, ...] = ()
    telemetry: Telemetry = field(default_factory=Telemetry)


Observer = Callable[[str, StepResult, Telemetry], tuple[SafetyEvent, ...]]


def check_timeout(timeout: float | None, default: float, left: float) -> float:
    """Seconds a step may take: `timeout`, or the default when None, and never more than the episode has left.

    Raises ValueError naming the argument for a value that is no positive number.

    >>> check_timeout(None, 30.0, 600.0), check_timeout(1e9, 30.0, 600.0), check_timeout(0.3, 30.0, 600.0)
    (30.0, 600.0, 0.3)
    """
    if timeout is None:
        return min(default, left)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or math.isnan(timeout) or timeout <= 0:
        raise ValueError(f"timeout={timeout!r}: must be a positive number of seconds, or None for the default")
    return min(float(timeout), left)


def carried_env(exported: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """(variables the next step starts with besides the defaults, notices). A default that was unset comes back.

    >>> carried_env({"A": "x y", "PWD": "/app", "HOME": "/home/agent", "a-b": "1"})
    ({'A': 'x y'}, ())
    """
    env = {
        name: value
        for name, value in exported.items()
        if _NAME.fullmatch(name) and name not in _SHELL_OWN and DEFAULT_ENV.get(name) != value
    }
    size = sum(len(name) + len(value) for name, value in env.items())
    if size > MAX_ENV:
        return {}, (f"exported variables take {size} characters, more than {MAX_ENV}: none is carried over",)
    return env, ()


_run_ids: dict[int, str] = {}


def run_id() -> str:
    """This process's run: random, so that two runs of one second differ; another one in a forked child."""
    return _run_ids.setdefault(os.getpid(), secrets.token_hex(6))


class Sandbox(abc.ABC):
    """One box: a shell with a work dir. Use as a context manager; `close` is idempotent and may come from any thread.

    A step is a fresh shell; its working directory and exported variables carry over to the next one, shell options,
    functions, aliases and unexported variables do not. `observer` is called on the host with (command, result,
    telemetry) before the result is returned; the events it gives are put into the result.
    """

    backend: str = ""

    def __init__(self, image: str, name: str, limits: Limits, unsafe: tuple[str, ...] = ()):
        self.image = image
        self.name = name
        self.limits = limits
        self.unsafe = unsafe  # isolation settings that --allow-unsafe let through; part of every label
        self.background = "kill"  # or "keep": what becomes of a step's background processes
        self.observer: Observer | None = observe
        self.steps = 0
        self.cwd = WORKDIR
        self.env: dict[str, str] = {}  # exported variables that differ from DEFAULT_ENV
        self._busy = threading.RLock()
        self._closed = threading.Event()
        self._dead: str | None = None
        self._episode_end: float | None = None

    @property
    def label(self) -> str:
        """Backend as results print it: `docker`, `sim (simulated)`, `docker (unsafe: network)`."""
        base = f"{self.backend} (simulated)" if self.backend == "sim" else self.backend
        return f"{base} (unsafe: {', '.join(self.unsafe)})" if self.unsafe else base

    @property
    def alive(self) -> bool:
        """Neither closed nor known to be dead."""
        return not self._closed.is_set() and self._dead is None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- what callers use ------------------------------------------------------------------------------------------

    def exec(self, command: str, timeout: float | None = None, stdin: bytes = b"") -> StepResult:
        """Run one command in a fresh `bash -c`; returns by `timeout` + 2 s whatever it does.

        Raises ValueError (timeout, NUL in the command), CommandTooLong, SandboxDead (dead before the step began),
        SandboxClosed (closed, perhaps during the step). A box that dies during the step gives a result with status
        sandbox_dead or infra_error and what was printed until then.
        """
        check_timeout(timeout, self.limits.step_s, self.limits.episode_s)
        if "\0" in command:
            raise ValueError("command: holds a NUL character, which no shell can be given")
        encoded = command.encode("utf-8", "surrogateescape")
        if len(encoded) > MAX_COMMAND:
            raise CommandTooLong(f"the command has {len(encoded)} bytes; the limit is {MAX_COMMAND}")
        with self._busy:
            self._check_usable()
            start = time.monotonic()
            left = self._episode_left(start)
            if left <= 0:
                return StepResult(f"[the episode's limit of {self.limits.episode_s:g} s is used up]", 124, "timeout")
            seconds = check_timeout(timeout, self.limits.step_s, left)
            raw = self._run(encoded, seconds, stdin)
            if self._closed.is_set():
                raise SandboxClosed(f"{self.name}: closed during the step {command[:80]!r}")
            return self._result(command, raw, time.monotonic() - start, seconds)

    def write(self, path: str, data: bytes | str, mode: int = 0o644) -> None:
        """Write one file as the agent, parents included; relative paths start at the work dir, wherever `cwd` is.

        Raises SandboxFileError for a path outside work dir, home and /tmp, a directory, a file as parent, no space.
        """
        with self._busy:
            self._check_usable()
            self._write(_absolute(path), data.encode() if isinstance(data, str) else bytes(data), mode)

    def read(self, path: str) -> bytes:
        """Read one regular file as the agent. Raises SandboxFileError: missing, no file, not readable, too large."""
        with self._busy:
            self._check_usable()
            return self._read(_absolute(path))

    def snapshot(self) -> Snapshot:
        """The work dir, cwd and exported variables. Raises SnapshotRefused beyond the caps or for special files."""
        with self._busy:
            self._check_usable()
            return self._snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        """Make the box equal to the snapshot: no other process, file, variable or working directory stays."""
        with self._busy:
            self._check_usable()
            self._restore(snapshot)

    def sweep(self) -> int:
        """Kill every process of the agent; the number killed."""
        with self._busy:
            self._check_usable()
            return self._sweep()

    def reset(self) -> None:
        """Sweep; then an empty work dir, home and /tmp, the default environment, cwd /app, a new episode clock."""
        with self._busy:
            self._check_usable()
            self._reset()
            self.steps = 0
            self.background = "kill"
            self._episode_end = None

    def close(self) -> None:
        """Remove the box. Idempotent; ends a step that runs in another thread with SandboxClosed."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._close()

    # -- shared machinery ------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._closed.is_set():
            raise SandboxClosed(f"{self.name}: the sandbox is closed")
        if self._dead is not None:
            raise SandboxDead(
                f"{self.name}: {self._dead} at step {self.steps}; the episode is dropped from training, not scored 0"
            )

    def _episode_left(self, now: float) -> float:
        if self._episode_end is None:
            self._episode_end = now + self.limits.episode_s
        return self._episode_end - now

    def _result(self, command: str, raw: RawStep, wall_s: float, seconds: float) -> StepResult:
        self.steps += 1
        text, truncated = shape(raw.head, raw.tail, raw.total, self.limits.shown_bytes)
        notices = [*self._notices(raw, seconds), *raw.notices]
        if notices:
            text = "\n".join([text.rstrip("\n"), *(f"[{notice}]" for notice in notices)]).lstrip("\n")
        result = StepResult(
            output=text, exit_code=raw.exit_code, status=raw.status, truncated=truncated, wall_s=wall_s,
            raw=raw.head + raw.tail, output_bytes=raw.total, killed=raw.killed, supported=raw.supported,
        )
        if self.observer is None:
            return result
        events = self.observer(command, result, raw.telemetry)
        return StepResult(**{**result.__dict__, "events": events}) if events else result

    def _notices(self, raw: RawStep, seconds: float) -> list[str]:
        """What the model is told about an end that is not its command's own."""
        killed = f"{raw.killed} process{'' if raw.killed == 1 else 'es'} killed"
        limits = self.limits
        return {
            "timeout": [f"timed out after {seconds:g} s; {killed}"],
            "oom": [f"out of memory: the limit is {limits.memory_mb} MB"],
            "output_limit": [f"stopped: more than {limits.raw_bytes} bytes of output; {killed}"],
            "pids_limit": [f"the limit of {limits.pids} processes was reached; {killed}"],
        }.get(raw.status, [])

    # -- what a backend gives --------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _run(self, command: bytes, seconds: float, stdin: bytes) -> RawStep: ...

    @abc.abstractmethod
    def _write(self, path: str, data: bytes, mode: int) -> None: ...

    @abc.abstractmethod
    def _read(self, path: str) -> bytes: ...

    @abc.abstractmethod
    def _snapshot(self) -> Snapshot: ...

    @abc.abstractmethod
    def _restore(self, snapshot: Snapshot) -> None: ...

    @abc.abstractmethod
    def _sweep(self) -> int: ...

    @abc.abstractmethod
    def _reset(self) -> None: ...

    @abc.abstractmethod
    def _close(self) -> None: ...


def _absolute(path: str) -> str:
    """A path inside the box, from the root. Raises SandboxFileError for an empty one or one with a NUL."""
    if not path or "\0" in path or len(path) > 4096:
        raise SandboxFileError(f"{path[:80]!r}: not a path")
    return path if path.startswith("/") else f"{WORKDIR}/{path}"

"""The real backend: one hardened container per box, driven over a single attached stream.

Defends against: network access, privilege, writes outside work dir, home, /tmp and shared memory, fork bombs,
memory, disk and output floods, processes that outlive their step, forged replies, a trainer that dies (stdin ends,
PID 1 exits, the engine removes the container), a box that nobody ends (TTL). Nothing of the host is bound, but
for the socket of the model proxy in profile `native`. Does not defend against: exploits of the shared kernel (runsc
is used where the engine has it), a malicious engine. Not in the paper: its boxes are privileged.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
import weakref
from typing import Self

from docker.errors import APIError
from requests.exceptions import RequestException

from mini_rome.errors import SandboxDead, SandboxError, SandboxFileError, SnapshotRefused
from mini_rome.sandbox import hardening, images, reaper
from mini_rome.sandbox.base import DEFAULT_ENV, HOME, WORKDIR, Limits, RawStep, Sandbox, carried_env, run_id
from mini_rome.sandbox.container import attach, create, explain, remove_quietly
from mini_rome.sandbox.engine import Engine, engine
from mini_rome.sandbox.exports import parse_exports
from mini_rome.sandbox.hardening import AGENT, Profile
from mini_rome.sandbox.output import canonical_bash
from mini_rome.sandbox.runner_base import pack, unpack
from mini_rome.sandbox.safety import Telemetry
from mini_rome.sandbox.transport import ConnectionLost, Silent, Wire, boot_code
from mini_rome.sandbox.tree import Entry, entries_of, snapshot_of
from mini_rome.types import Snapshot, Status

GRACE_S = 1.0  # beyond a step's timeout, before the runner counts as silent
START_S = 15.0  # for a box to start and check itself
FILE_S = 32.0  # for one file operation
READ_S = 1.9  # for a read of the default limit; 20 MB/s beyond
WRITABLE = f"{WORKDIR}:{HOME}:/tmp"


class DockerSandbox(Sandbox):
    """See the module docstring. Made by `start`, never by itself."""

    backend = "docker"

    def __init__(
        self, engine: Engine, container: str, wire: Wire, image: str, name: str, limits: Limits, profile: Profile,
        unsafe: tuple[str, ...],
    ):
        super().__init__(image, name, limits, unsafe)
        self.container = container
        self.profile = profile
        self._engine = engine
        self._wire = wire
        self._synced = True
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, _abandon, engine, container, wire, os.getpid())

    @property
    def label(self) -> str:
        """As `Sandbox.label`; a box with a bind says so: `docker (native)`."""
        return f"{super().label} (native)" if self.profile.socket_folder else super().label

    @classmethod
    def start(
        cls, image: str | None = None, limits: Limits | None = None, task_name: str = "", profile: Profile = AGENT,
        unsafe: tuple[str, ...] = (),
    ) -> Self:
        """Create, start and check a box. `unsafe` are a task's settings that --allow-unsafe let through: a label.

        Raises SandboxUnavailable, ImageMissing, LimitNotEnforced, SandboxError; nothing is left behind.
        """
        limits = limits or Limits()
        host = engine()
        image = image or images.DEFAULT_IMAGE
        if not (profile.read_only or host.quota or host.quota_said):
            host.quota_said = True
            print(
                "writable boxes: this engine does not enforce the size of the root filesystem (no quota), "
                "only those of work dir, home and /tmp", file=sys.stderr,
            )
        run = run_id()
        reaper.ensure_reaper(run, host.host)
        container, name = create(host, image, run, limits, task_name, profile)
        box = None
        try:
            wire = Wire(attach(host, container))
            box = cls(host, container, wire, image, name, limits, profile, unsafe)
            host.client.api.start(container)
            box._boot()
            return box
        except BaseException as error:
            if box is not None:
                box.close()
            else:
                remove_quietly(host, container)
            if isinstance(error, APIError | RequestException):
                raise SandboxError(f"{name}: the engine could not start the box: {explain(error)}") from error
            raise

    def _boot(self) -> None:
        """Send the runner, wait for it, and compare its surroundings with what was asked for."""
        code = boot_code(self.limits.ttl_s, self.profile.uid, dict(DEFAULT_ENV))
        try:
            self._wire.send_raw(code, time.monotonic() + START_S)
            output, _ = self._call(b"C", b"", START_S)
        except (ConnectionLost, Silent, SandboxDead) as error:
            said = self._wire.complaints.decode(errors="replace").strip().splitlines()
            raise SandboxError(f"{self.name}: PID 1 did not answer: {said[-1] if said else error!r}") from error
        hardening.judge(output.decode(), self.limits, self.profile, self._engine.runtime)

    # -- talking to PID 1 ------------------------------------------------------------------------------------------

    def _call(self, kind: bytes, payload: bytes, seconds: float) -> tuple[bytes, list[bytes]]:
        """One request and its answer: (output, fields of the end). Raises SandboxFileError, SandboxDead."""
        self._resync()
        nonce = secrets.token_bytes(8)
        deadline = time.monotonic() + seconds
        output = bytearray()
        try:
            self._wire.send(nonce, kind, payload, deadline)
            while True:
                reply = self._wire.receive(deadline)
                if reply.nonce != nonce:
                    continue
                if reply.kind == b"o":
                    output += reply.payload
                elif reply.kind == b"x":
                    raise SandboxFileError(reply.payload.decode("utf-8", "replace"))
                else:
                    return bytes(output), _fields(reply.payload) if kind == b"S" else [reply.payload]
        except Silent:
            self._die(f"no answer within {seconds:g} s ({self._engine.state(self.container).word})")
        except ConnectionLost:
            self._die(self._cause()[1])
        raise AssertionError("unreachable")

    def _die(self, cause: str) -> None:
        self._dead = cause
        self._check_usable()

    def _resync(self) -> None:
        """After a silent step: take up again only if PID 1 answers; its late replies carry an old nonce."""
        if self._synced:
            return
        self._synced = True
        self._call(b"P", b"", 1.5)

    def _cause(self) -> tuple[Status, str]:
        """Why the stream ended: (status for the step, words)."""
        for _ in range(20):  # the stream of a dying container ends some milliseconds before its state changes
            state = self._engine.state(self.container)
            if state.word != "running":
                break
            time.sleep(0.025)
        said = self._wire.complaints.decode(errors="replace").strip().splitlines()
        if state.word == "unknown":
            return "infra_error", "the engine does not answer"
        if state.word == "running":
            return "infra_error", "the connection to the box was cut"
        code = "" if state.exit_code is None else f" with code {state.exit_code}"
        return "sandbox_dead", f"container {state.word}{code}" + (f": {said[-1]}" if said else "")

    # -- a step ----------------------------------------------------------------------------------------------------

    def _run(self, command: bytes, seconds: float, stdin: bytes) -> RawStep:
        self._resync()
        nonce = secrets.token_bytes(8)
        deadline = time.monotonic() + seconds + GRACE_S
        variables = (f"{name}={value}".encode("utf-8", "surrogateescape") for name, value in self.env.items())
        payload = pack(
            command, self.cwd.encode("utf-8", "surrogateescape"), stdin, repr(seconds).encode(),
            b"%d" % self.limits.raw_bytes, self.background.encode(), *variables,
        )
        output = bytearray()
        try:
            self._wire.send(nonce, b"X", payload, deadline)
            while True:
                reply = self._wire.receive(deadline)
                if reply.nonce == nonce and reply.kind == b"o":
                    output += reply.payload
                elif reply.nonce == nonce:
                    return self._ended(bytes(output), _fields(reply.payload))
        except Silent:
            return self._silent(bytes(output))
        except ConnectionLost:
            status, self._dead = self._cause()
            notice = f"{self.name}: {self._dead}; the episode is dropped from training, not scored 0"
            return RawStep(bytes(output), None, total=len(output), status=status, notices=(notice,))

    def _ended(self, output: bytes, fields: list[bytes]) -> RawStep:
        """The runner's account of a step."""
        status: Status = fields[0].decode()  # type: ignore[assignment]
        code, total, killed, no_route, cpu_ns = (int(field) for field in fields[1:6])
        reported, tail, seen, left = fields[6], fields[7], _fields(fields[8]), _fields(fields[9])
        notices = self._carry(reported)
        output = canonical_bash(output)
        cut = total > self.limits.raw_bytes
        telemetry = Telemetry(
            processes=tuple(text.decode(errors="replace") for text in dict.fromkeys([*seen, *left])),
            refused_connects=no_route, cpu_s=cpu_ns / 1e9,
            background=tuple(text.decode(errors="replace") for text in left),
        )
        return RawStep(
            head=output[: self.limits.raw_bytes - len(tail)] if cut else output, tail=tail if cut else b"",
            exit_code={"timeout": 124, "output_limit": 137}.get(status, code),
            total=total if cut else len(output), status=status, killed=killed, notices=notices, telemetry=telemetry,
        )

    def _silent(self, output: bytes) -> RawStep:
        """The runner missed its own deadline: paused, starved, or the engine stalls. The box is unsure now."""
        self._synced = False
        state = self._engine.state(self.container)
        if state.word == "paused":
            return RawStep(output, 124, total=len(output), status="timeout", notices=("the container was paused",))
        if state.word in ("gone", "exited"):
            self._dead = f"container {state.word}"
            return RawStep(output, None, total=len(output), status="sandbox_dead", notices=(self._dead,))
        notice = f"no answer from the box (engine says: {state.word}); the step is not scored"
        return RawStep(output, None, total=len(output), status="infra_error", notices=(notice,))

    def _carry(self, reported: bytes) -> tuple[str, ...]:
        """Take over cwd and exported variables from the shell's last words; without any, all stays as it was."""
        notices: tuple[str, ...] = ()
        if reported.startswith(b"L"):
            reported, notices = reported[1:], ("the working directory is gone; back in /app",)
            self.cwd = WORKDIR
        parts = reported.split(b"\0")
        if len(parts) < 3 or parts[-1] != b"E":
            return notices
        cwd = parts[-3].removesuffix(b"\n").decode("utf-8", "surrogateescape")
        if cwd.startswith("/") and len(cwd) <= 4096:
            self.cwd = cwd
        self.env, more = carried_env(parse_exports(parts[-2]))
        return notices + more

    # -- files, sweep, snapshots -----------------------------------------------------------------------------------

    def _write(self, path: str, data: bytes, mode: int) -> None:
        fields = (path.encode("utf-8", "surrogateescape"), b"%d" % (mode & 0o777), WRITABLE.encode(), data)
        self._file_call(path, b"W", pack(*fields), FILE_S)

    def _read(self, path: str) -> bytes:
        fields = (path.encode("utf-8", "surrogateescape"), b"%d" % self.limits.read_bytes)
        return self._file_call(path, b"R", pack(*fields), READ_S + self.limits.read_bytes / 2e7)[0]

    def _file_call(self, path: str, kind: bytes, payload: bytes, seconds: float) -> tuple[bytes, list[bytes]]:
        try:
            return self._call(kind, payload, seconds)
        except SandboxFileError as error:
            raise SandboxFileError(f"{path!r}: {error}") from None

    def _sweep(self) -> int:
        return int(self._call(b"K", b"", 8.0)[1][0])

    def _snapshot(self) -> Snapshot:
        payload = pack(b"%d" % self.limits.snapshot_bytes, b"%d" % self.limits.snapshot_files)
        try:
            output, alive = self._call(b"S", payload, FILE_S)
        except SandboxFileError as error:
            raise SnapshotRefused(f"{self.name}: {error}") from None
        names = tuple(text.decode(errors="replace") for text in alive)
        return snapshot_of(
            [_entry(record) for record in unpack(output)],
            cwd=self.cwd, env=dict(self.env), resumable=not names, processes=names,
        )

    def _restore(self, snapshot: Snapshot) -> None:
        entries = entries_of(snapshot.tar, self.limits.snapshot_bytes, self.limits.snapshot_files)
        self._rebuild([_record(entry) for entry in sorted(entries, key=lambda entry: entry.path)])
        self.cwd, self.env, self._episode_end = snapshot.cwd, dict(snapshot.env), None

    def _reset(self) -> None:
        self._rebuild([])
        self.cwd, self.env = WORKDIR, {}

    def _rebuild(self, records: list[bytes]) -> None:
        """Sweep, empty, lay out. A box where that fails is not surely clean and never used again."""
        try:
            self._call(b"T", pack(*records), FILE_S)
        except SandboxFileError as error:
            self._dead = f"cannot be made clean: {error}"
            raise

    # -- end -------------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        """Ends PID 1 by the end of its stdin, then removes the container; in a forked child only lets go."""
        self._finalizer.detach()
        if self._owner != os.getpid():
            return
        self._wire.shut()
        remove_quietly(self._engine, self.container)
        with self._busy:
            self._wire.close()


def _abandon(host: Engine, container: str, wire: Wire, owner: int) -> None:
    """A box that was dropped without `close`. In a forked child it is the parent's: left alone."""
    if owner == os.getpid():
        wire.shut()
        wire.close()
        remove_quietly(host, container)


def _fields(payload: bytes) -> list[bytes]:
    return unpack(payload)


def _entry(record: bytes) -> Entry:
    """A record of the runner's `walk`."""
    path, kind, mode, mtime, target, data = unpack(record)
    text = [part.decode("utf-8", "surrogateescape") for part in (path, target)]
    return Entry(text[0], kind.decode(), int(mode), data, text[1], int(mtime))


def _record(entry: Entry) -> bytes:
    """The inverse of `_entry`, as the runner's `rebuild` takes it."""
    path, target = (text.encode("utf-8", "surrogateescape") for text in (entry.path, entry.target))
    return pack(path, entry.kind.encode(), b"%d" % entry.mode, b"%d" % entry.mtime, target, entry.data)

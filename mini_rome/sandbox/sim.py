"""The simulated backend: shellsim, a deterministic BusyBox-like shell inside this process. Always labelled simulated.

Covered: files, pipes, text tools, redirections, exit codes, deadlines, output, memory and disk limits; no host access
and no network by construction. Not covered: Python or any other program, users and permissions (it runs as root),
hard links, fifos, signals, process limits. A command or flag it does not know gives the shell's own error and
`supported=False`. Not in the paper.
"""

from __future__ import annotations

import heapq
import itertools
import re
import shlex
import threading
import time
from typing import Any

import shellsim

from mini_rome.errors import SandboxFileError, SnapshotRefused
from mini_rome.sandbox.base import DEFAULT_ENV, HOME, WORKDIR, Limits, RawStep, Sandbox, carried_env
from mini_rome.sandbox.output import canonical_sim, keep_ends
from mini_rome.sandbox.tree import FIXED_MTIME, Entry, entries_of, snapshot_of
from mini_rome.types import Snapshot, Status

_CPU = 1 << 62  # shellsim's own count is no wall time: the deadline is what bounds a step
_OUTPUT_FACTOR = 3  # caps of output: shellsim counts redirected bytes too, and for an environment's whole life
_ENVIRONMENT_SLACK = 2 << 20  # bytes of disk for the archive of a snapshot and shellsim's own files
_SHELLS = 1000  # of the 1,023 that shellsim allows a machine
_ARCHIVE = "/tmp/.mini-rome.tar"
_ROOTS = (WORKDIR, HOME, "/tmp")
_WIPE = f"cd / && rm -rf {' '.join(_ROOTS)} && mkdir -p {' '.join(_ROOTS)}"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Commands that may have changed files outside _ROOTS: an absolute path elsewhere, `..`, `~`, a bare cd.
_LEAVES = re.compile(r"(?<![\w./*-])/(?!app\b|tmp\b|home/agent\b|dev/null\b)|\.\.|~|\bcd\s*(?:$|[;&|\n-])|\\[0x]")
_UNKNOWN = re.compile(rb"^[\w-]+: (unsupported|unimplemented|unrecognized) ", re.M)  # a flag shellsim lacks


def _refuse(tool: str, where: str) -> str:
    """A function before cp or mv of two names: what GNU refuses where shellsim does something or nothing.

    The same file however it is spelt (shellsim has no hard links, so a path is a file), a folder into itself, and a
    target whose folder is not there. __mr is the target's name, inside $2 where that is a folder; __mr_in its folder.
    """
    moves = f'[ {tool} = mv -o -f "$1" ]'  # cp of a folder has its own refusal
    return (
        tool + '() { if [ $# = 2 ] && [ -e "$1" ]; then\n'
        '__mr=$2; [ -d "$1" ] && __mr=${2%/}; __mr_in=${__mr%/*}; [ "$__mr_in" = "$__mr" ] && __mr_in=.\n'
        'if [ -d "$2" ]; then __mr_in=$2; __mr=${1%/}; __mr=${2%/}/${__mr##*/}; fi\n'
        f'if [ ! -d "$__mr_in" ] && {moves}; then\n'
        f'echo "{tool}: {where}: No such file or directory" >&2; return 1; fi\n'
        '__mr_from=$(readlink -f "$1")\n'
        f'if [ "$__mr_from" = "$(readlink -f "$__mr")" ] && {moves}; then\n'
        f"echo \"{tool}: '$1' and '$__mr' are the same file\" >&2; return 1; fi\n"
        f'case {tool}:$(readlink -f "$__mr_in")/ in mv:"$__mr_from"/*)\n'
        "echo \"mv: cannot move '$1' to a subdirectory of itself, '$__mr'\" >&2; return 1;; esac; fi\n"
        f'command {tool} "$@"; }}'
    )


# Where shellsim and GNU differ in exit codes or refusals, a function of the tool's name stands before it.
_WRAPPERS = {
    "sort": 'sort() { command sort "$@"; __mr=$?; [ $__mr = 1 ] && __mr=2; return $__mr; }',
    "sed": 'sed() { command sed "$@"; __mr=$?; case $__mr in 1) __mr=2;; 2) __mr=1;; esac; return $__mr; }',
    "mv": _refuse("mv", "cannot move '$1' to '$2'"),
    "cp": _refuse("cp", "cannot create regular file '$2'"),
}
_WRAPPED = re.compile(rf"\b({'|'.join(_WRAPPERS)})\b")
_STOPS: dict[str, Status] = {"memory_exhausted": "oom", "output_limit_exceeded": "output_limit"}


class _Watchdog:
    """One thread that cancels steps at their deadlines; starting a timer thread per step would cost as much as it."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Any]] = []
        self._changed = threading.Condition()
        self._order = itertools.count()
        self._thread: threading.Thread | None = None

    def watch(self, token: Any, seconds: float) -> None:
        """Cancel `token` in `seconds`, harmlessly if its step has ended by then."""
        with self._changed:
            heapq.heappush(self._heap, (time.monotonic() + seconds, next(self._order), token))
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._loop, name="mini-rome-sim-watchdog", daemon=True)
                self._thread.start()
            elif self._heap[0][2] is token:
                self._changed.notify()

    def _loop(self) -> None:
        while True:
            with self._changed:
                while self._heap and self._heap[0][0] <= time.monotonic():
                    heapq.heappop(self._heap)[2].cancel()
                if not self._heap:
                    self._changed.wait(5.0)
                    if not self._heap:
                        self._thread = None
                        return
                self._changed.wait(max(0.0, self._heap[0][0] - time.monotonic()))


_watchdog = _Watchdog()
_context = shellsim.Context(offline=True)
_images: dict[tuple[int, int, int], Any] = {}
_images_lock = threading.Lock()


def _limits_of(limits: Limits) -> tuple[int, int, int]:
    """(memory, disk, output) in bytes as shellsim takes them."""
    return limits.memory_mb << 20, (limits.disk_mb << 20) + _ENVIRONMENT_SLACK, limits.raw_bytes * _OUTPUT_FACTOR


def _pristine(limits: Limits) -> Any:
    """A frozen machine with an empty work dir; made once for each set of limits."""
    key = _limits_of(limits)
    with _images_lock:
        if key not in _images:
            memory, disk, output = key
            machine = _context.Environment(
                shellsim.Limits(cpu=_CPU, memory=memory, disk=disk, output=output), clock="real_time"
            )
            machine.run(_WIPE)
            _images[key] = machine._native.freeze()
        return _images[key]


class SimSandbox(Sandbox):
    """See the module docstring. A step costs about a millisecond, a reset or restore of a small tree two."""

    backend = "sim"

    def __init__(self, image: str, name: str, limits: Limits, unsafe: tuple[str, ...] = ()):
        super().__init__(image, name, limits, unsafe)
        self._token: Any = None
        self._fork(_pristine(limits))
        self._clean_disk = self._plain(_WIPE).usage.disk_current
        self._forget()

    # -- the machine -----------------------------------------------------------------------------------------------

    def _fork(self, image: Any) -> None:
        """Continue in a copy of a frozen machine: same files, no processes, fresh counters (about 10 ms)."""
        memory, disk, output = _limits_of(self.limits)
        native = image.environment(_CPU, memory, disk, output, True)
        limits = shellsim.Limits(cpu=_CPU, memory=memory, disk=disk, output=output)
        self._machine = shellsim.Environment._from_native(native, limits)
        self._shells = 0

    def _plain(self, source: str) -> Any:
        """One script of our own, in a shell of its own."""
        return self._shell().run(source)

    def _shell(self) -> Any:
        """A new shell; a machine has a number of them for its life, so it is renewed before they run out."""
        if self._shells >= _SHELLS:
            self._renew()
        self._shells += 1
        return self._machine.create_shell()

    def _renew(self) -> None:
        self._fork(self._machine._native.freeze())

    def _forget(self) -> None:
        """The carried state of a new box."""
        self.cwd, self.env = WORKDIR, {}
        self._wiped = True  # nothing was written since the work dir was emptied
        self._left = False  # a command may have changed files outside the work dir, home and /tmp

    # -- a step ----------------------------------------------------------------------------------------------------

    def _run(self, command: bytes, seconds: float, stdin: bytes) -> RawStep:
        text = command.decode("utf-8", "replace")
        self._wiped = False
        self._left = self._left or bool(_LEAVES.search(text))
        token = self._token = shellsim.CancellationToken()
        if self._closed.is_set():
            token.cancel()
        _watchdog.watch(token, seconds)
        done = self._shell().run(self._script(text), stdin, cancellation=token)
        output = canonical_sim(done.stdout, text, self.cwd)
        status = self._status(done, len(output))
        head, tail = keep_ends(output, self.limits.raw_bytes)
        notices = self._carry(done.stderr)
        return RawStep(
            head, {"timeout": 124, "ok": done.returncode}.get(status, 137), tail, len(output), status,
            killed=self._end_step(done), notices=notices,
            supported=not (done.unsupported or done.unsupported_commands or _UNKNOWN.search(done.stdout)),
        )

    def _script(self, text: str) -> str:
        """cd, exports and the command, each quoted; the state at its end goes to stderr, its output to stdout."""
        variables = {**DEFAULT_ENV, **self.env}
        wrappers = "".join(f"{_WRAPPERS[tool]}\n" for tool in dict.fromkeys(_WRAPPED.findall(text)))
        exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        return (
            f"cd {shlex.quote(self.cwd)} 2>/dev/null || {{ printf lost >&2; cd {WORKDIR}; }}\n"
            f"unset LANG\nexport {exports}\nexec 3>&2\n{wrappers}"  # LANG is shellsim's own, see DEFAULT_ENV
            "trap '[ $BASH_SUBSHELL = 0 ] && { printf \"\\0\"; pwd; printenv; } >&3' EXIT\n"
            f"eval {shlex.quote(text)} 2>&1\nexit $?\n"
        )

    def _status(self, done: Any, written: int) -> Status:
        if done.stop_reason in _STOPS:
            return _STOPS[done.stop_reason]
        if written > self.limits.raw_bytes:
            return "output_limit"
        return "timeout" if done.interrupted else "ok"

    def _carry(self, state: bytes) -> tuple[str, ...]:
        """Take over cwd and exported variables; a step that ended without saying leaves them as they were."""
        before, mark, after = state.rpartition(b"\0")
        notices: tuple[str, ...] = ()
        if (before if mark else after).startswith(b"lost"):
            self.cwd, notices = WORKDIR, ("the working directory is gone; back in /app",)
        lines = after.decode("utf-8", "replace").split("\n") if mark else []
        if not lines or not lines[0].startswith("/"):
            return notices
        exported: dict[str, str] = {}
        name = ""
        for line in lines[1:-1]:
            head, equals, value = line.partition("=")
            if equals and _NAME.fullmatch(head):
                name = head
                exported[name] = value
            elif name:
                exported[name] += f"\n{line}"
        self.cwd = lines[0]
        self._left = self._left or not self.cwd.startswith(_ROOTS)
        self.env, more = carried_env(exported)
        return notices + more

    def _end_step(self, done: Any) -> int:
        """Kill what still runs, and start afresh from the same files where counters or processes ask for it."""
        # A process that lives on has no exit status yet; the script's own `exit` never gets one.
        running = [call for call in done.invocations if call.status is None and call.argv[:1] != ("exit",)]
        spent = done.usage.output_bytes > self.limits.raw_bytes * (_OUTPUT_FACTOR - 2)
        unsure = done.dropped_invocations or self._machine.terminated or done.interrupted
        if running or spent or unsure:
            self._renew()
        return len(running)

    def _sweep(self) -> int:
        return 0  # what a step left running was killed at its end, see _end_step

    # -- files -----------------------------------------------------------------------------------------------------

    def _write(self, path: str, data: bytes, mode: int) -> None:
        resolved = self._resolve(path)
        if not resolved.startswith(tuple(f"{root}/" for root in _ROOTS)):
            raise SandboxFileError(f"{path!r}: outside {', '.join(_ROOTS)}")
        self._wiped = False
        parent = resolved.rpartition("/")[0]
        made = self._plain(f"[ ! -d {shlex.quote(resolved)} ] && mkdir -p -- {shlex.quote(parent)}")
        if made.returncode != 0:
            raise SandboxFileError(f"{path!r}: is a directory, or a parent of it is none")
        try:
            self._machine.write_file(resolved, data, mode=mode)
        except shellsim.SimulationError as error:
            raise SandboxFileError(f"{path!r}: {error}") from error

    def _resolve(self, path: str) -> str:
        """The path with symbolic links, `.` and `..` followed as far as it exists."""
        done = self._plain(f"realpath -m -- {shlex.quote(path)}")
        if done.returncode != 0:
            raise SandboxFileError(f"{path!r}: {done.stderr_text.strip() or 'cannot be resolved'}")
        return done.stdout.decode("utf-8", "replace").removesuffix("\n")

    def _read(self, path: str) -> bytes:
        if path.startswith(("/dev/", "/proc/")):
            raise SandboxFileError(f"{path!r}: not a regular file")
        try:
            data = self._machine.read_file(path)
        except shellsim.SimulationError as error:
            raise SandboxFileError(f"{path!r}: {error}") from error
        if len(data) > self.limits.read_bytes:
            raise SandboxFileError(f"{path!r}: {len(data)} bytes, the limit is {self.limits.read_bytes}")
        return data

    # -- snapshots -------------------------------------------------------------------------------------------------

    def _snapshot(self) -> Snapshot:
        done = self._plain(f"tar -cf {_ARCHIVE} -C {WORKDIR} .")
        if done.returncode != 0:
            raise SnapshotRefused(f"{self.name}: the work dir cannot be read: {done.stderr_text.strip()}")
        tar = self._machine.read_file(_ARCHIVE)
        self._plain(f"rm {_ARCHIVE}")
        entries = [
            Entry(**{**entry.__dict__, "mtime": FIXED_MTIME})
            for entry in entries_of(tar, self.limits.snapshot_bytes, self.limits.snapshot_files)
        ]
        return snapshot_of(entries, cwd=self.cwd, env=dict(self.env))

    def _restore(self, snapshot: Snapshot) -> None:
        if not self._wiped:
            self._reset()
        self._episode_end = None
        script: list[str] = []
        for entry in entries_of(snapshot.tar, self.limits.snapshot_bytes, self.limits.snapshot_files):
            self._place(entry, script)
        if script and self._plain("\n".join(["set -e", f"cd {WORKDIR}", *script])).returncode != 0:
            raise SandboxFileError(f"{self.name}: the snapshot {snapshot.tree_hash[:12]} could not be restored")
        self.cwd, self.env = snapshot.cwd, dict(snapshot.env)
        self._wiped = False

    def _place(self, entry: Entry, script: list[str]) -> None:
        """Files at once; directories, links and modes by a line of `script`, run after all of them."""
        path = f"{WORKDIR}/{entry.path}"
        if entry.kind == "d":
            if entry.path != ".":
                self._machine.mkdir(path)
            if entry.mode != 0o755:
                script.append(f"chmod {entry.mode:o} {shlex.quote(path)}")
        elif entry.kind == "f":
            self._machine.write_file(path, entry.data, mode=entry.mode)
        elif entry.kind == "l":
            script.append(f"ln -s -- {shlex.quote(entry.target)} {shlex.quote(path)}")
        else:
            self._machine.write_file(path, self._machine.read_file(f"{WORKDIR}/{entry.target}"), mode=entry.mode)

    def _reset(self) -> None:
        """In place when the episode stayed in the work dir, home and /tmp and freed all it used; else a new fork."""
        if self._left or self._plain(_WIPE).usage.disk_current != self._clean_disk:
            self._fork(_pristine(self.limits))
        self._forget()

    def _close(self) -> None:
        if self._token is not None:
            self._token.cancel()

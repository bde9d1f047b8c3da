"""How PID 1 runs one command: a shell of the agent's that was started ahead, and the watch over its step.

C modules and `os` only: see runner.py.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os
import select
import time
from collections.abc import Callable

from mini_rome.sandbox.runner_base import (
    CHUNK,
    alone,
    command_line,
    drop,
    exit_code,
    frame,
    kill,
    processes,
    read_some,
    write_all,
)

STATE, SCRIPT, START = 198, 199, 200  # descriptors of a step's shell
FLUSH_S = 0.02  # output waits this long for more of it, or for the step's end: one message for a short command
SHELL = "/bin/bash"
# Waits for START, reads cwd, command and variables as data from SCRIPT, reports cwd and exports on STATE at its end.
# All on one line: bash counts lines from there, so that messages say `line 1` for the command's first. No `builtin`
# before `exec`: that would undo its redirections. The first line is for shells that `spawn` made.
PRELUDE = " ".join(
    line.strip()
    for line in """\
builtin echo 1000 >/proc/self/oom_score_adj;
builtin read -r -u 200 __mr_cwd;
IFS= builtin read -r -d '' -u 199 __mr_cwd;
IFS= builtin read -r -d '' -u 199 __mr_command;
while IFS= builtin read -r -d '' -u 199 __mr_pair; do builtin export -- "$__mr_pair"; done;
exec 199<&- 200<&-;
builtin cd -- "$__mr_cwd" 2>/dev/null || { builtin printf L >&198; builtin cd /app || builtin cd /; } 2>/dev/null;
builtin unset OLDPWD __mr_cwd __mr_pair;
builtin trap '{ builtin pwd; builtin printf "\\0"; builtin export -p; builtin printf "\\0E"; } >&198' EXIT;
builtin eval "$__mr_command"
""".splitlines()
)
WORDS = ["bash", "-c", PRELUDE, "bash"]


class Shell:
    """A shell of the agent's that was started ahead and waits for its command: half of a step's time saved.

    Raises OSError where no process can be made: kept background processes use up the limit.
    """

    def __init__(self, uid: int, environment: dict[str, str]):
        self.state, self.script, self.source = (os.memfd_create(name) for name in ("state", "script", "stdin"))
        self.out, out_end = os.pipe()
        start, self.start = os.pipe()
        ends = (
            (self.source, 0), (out_end, 1), (out_end, 2), (self.state, STATE), (self.script, SCRIPT), (start, START),
        )
        try:
            self.pid = (alone() and spawn(uid, environment, ends)) or fork(uid, environment, ends)
        except OSError:
            self.close()
            raise
        finally:
            os.close(out_end)
            os.close(start)

    def begin(self, script: bytes, stdin: bytes) -> bool:
        """Hand over what to run; False when the waiting shell is dead."""
        for end, data in ((self.script, script), (self.source, stdin)):
            write_all(end, data)
            os.lseek(end, 0, os.SEEK_SET)
        try:
            write_all(self.start, b"\n")
        except BrokenPipeError:
            self.close()
            return False
        for end in (self.script, self.source, self.start):
            os.close(end)
        return True

    def abandon(self) -> None:
        """Kill one that never began."""
        kill(self.pid)
        self.close()

    def close(self) -> None:
        for end in (self.state, self.script, self.source, self.out, self.start):
            os.close(end)


Ends = tuple[tuple[int, int], ...]  # (ours, the shell's) descriptors


def spawn(uid: int, environment: dict[str, str], ends: Ends) -> int:
    """A shell by vfork: no page of ours is copied, which halves what a step costs. 0 where the shell cannot be run.

    The child takes its effective ids from our real ones, and execve its saved ids from the effective ones, so our
    real ids are the agent's for that moment. A process of the agent could renice us then: only for `alone`.
    """
    actions = [(os.POSIX_SPAWN_DUP2, end, target) for end, target in ends]
    ignored = [_signal.SIGPIPE, _signal.SIGXFSZ]
    os.setresgid(uid, 0, 0)
    os.setresuid(uid, 0, 0)
    try:
        return os.posix_spawn(
            SHELL, WORDS, environment, file_actions=actions, resetids=True, setsid=True, setsigdef=ignored
        )
    except OSError:
        return 0
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)


def fork(uid: int, environment: dict[str, str], ends: Ends) -> int:
    """The same the slow way, beside processes of the agent that are kept."""
    pid = os.fork()
    if pid != 0:
        return pid
    try:
        os.setsid()
        for end, target in ends:
            os.dup2(end, target)
        drop(uid)
        os.execve(SHELL, WORDS, environment)
    finally:
        os._exit(127)


class Job:
    """A running step: its pipes, what it wrote, which processes were seen."""

    def __init__(
        self, wake: int, reap: Callable[[], dict[int, int]], nonce: bytes, shell: Shell, cap: int,
        spare: frozenset[int],
    ):
        self.wake, self.reap, self.nonce, self.cap, self.spare = wake, reap, nonce, cap, spare
        self.pid, self.out, self.state = shell.pid, shell.out, shell.state
        self.pending = b""  # output frames not sent yet
        self.flush_at = 0.0
        self.total = 0
        self.tail = bytearray()  # of more than the cap, the last half a cap
        self.seen: dict[int, bytes] = {}
        self.poller = select.poll()
        os.set_blocking(self.out, False)
        self.poller.register(self.out, select.POLLIN)
        self.poller.register(wake, select.POLLIN)
        self.poller.register(0, 0)  # POLLHUP alone: the host is gone

    def watch(self, deadline: float) -> tuple[bytes, int | None]:
        """Until the shell ends, the deadline or the cap: (status, exit code or None)."""
        pause = 0.004
        next_look = time.monotonic() + pause
        while True:
            now = time.monotonic()
            if now >= deadline:
                return b"timeout", None
            if now >= next_look:
                self.look()
                pause = min(pause * 2, 0.25)
                next_look = now + pause
            if self.pending and now >= self.flush_at:
                self.flush()
            code = self.wait(min(deadline, next_look, self.flush_at if self.pending else deadline) - now)
            if code is not None:
                return b"ok", code
            if self.total > self.cap:
                return b"output_limit", None

    def wait(self, seconds: float) -> int | None:
        """Handle what comes within `seconds`; the shell's exit code once it has ended."""
        code = None
        for end, event in self.poller.poll(seconds * 1000 + 0.5):
            if end == 0 and event & (select.POLLHUP | select.POLLERR):
                os._exit(0)
            if end == self.wake:
                status = self.reap().get(self.pid)
                code = None if status is None else exit_code(status)
            elif end == self.out and self.take() == b"":
                self.poller.unregister(end)
        return code

    def take(self) -> bytes | None:
        """Read output once: b"" at its end, None when there is none now."""
        data = read_some(self.out)
        if data:
            self.add(data)
        return data

    def add(self, data: bytes) -> None:
        """Pass output on up to the cap; of more, keep the end."""
        room = max(0, self.cap - self.total)
        self.total += len(data)
        if room:
            self.flush_at = self.flush_at if self.pending else time.monotonic() + FLUSH_S
            self.pending += frame(self.nonce, b"o", data[:room])
            if len(self.pending) > CHUNK:
                self.flush()
        half = self.cap // 2
        self.tail = (self.tail + data)[-half:] if half else self.tail

    def flush(self) -> None:
        write_all(1, self.pending)
        self.pending = b""

    def drain(self, limit: int) -> None:
        """What is still in the pipe; no more than `limit` in all where writers may be alive."""
        while self.total <= limit and self.take():
            pass

    def reported(self) -> bytes:
        """What the shell said on STATE, the end of it where that is long."""
        size = os.fstat(self.state).st_size
        return os.pread(self.state, 2 * CHUNK, max(0, size - 2 * CHUNK))

    def look(self) -> None:
        """Remember command lines of new processes, for the safety events."""
        for pid in processes():
            if pid not in self.seen and pid not in self.spare and pid != self.pid and len(self.seen) < 64:
                self.seen[pid] = command_line(pid)

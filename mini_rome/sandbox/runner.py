"""PID 1 of a docker box: runs steps and file operations for the host, over frames on stdin and stdout.

Its source and that of runner_files.py are the first frame, run by `python3 -I -S`: C modules and `os` only.
It is uid 0 with the capabilities SETUID, SETGID and KILL: enough to start the agent's processes as another user and
to kill them, nothing else. All file work happens in forked children as the agent, so PID 1 opens nothing that the
agent named. The agent can read this code; it cannot signal, trace or write to the process. Not in the paper.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the module `signal` imports enum: 10 ms a box
import os
import select
import time
from collections.abc import Callable

from mini_rome.sandbox.runner_files import (
    CHUNK,
    Refused,
    command_line,
    counters,
    exit_code,
    frame,
    kill,
    leftovers,
    pack,
    processes,
    read_exactly,
    read_file,
    read_some,
    rebuild,
    self_check,
    strays,
    unpack,
    walk,
    widen,
    write_all,
    write_file,
)

Work = Callable[[Callable[[bytes], None]], None]  # a file operation; it is given a function that sends bytes out
STATE, SCRIPT, START = 198, 199, 200  # descriptors of a step's shell
FLUSH_S = 0.02  # output waits this long for more of it, or for the step's end: one message for a short command
SHELL = "/bin/bash"
# Waits for START, reads cwd, command and variables as data from SCRIPT, reports cwd and exports on STATE at its end.
# All on one line: bash counts lines from there, so that messages say `line 1` for the command's first.
PRELUDE = " ".join(
    line.strip()
    for line in """\
builtin read -r -u 200 __mr_cwd; builtin exec 200<&-;
IFS= builtin read -r -d '' -u 199 __mr_cwd;
IFS= builtin read -r -d '' -u 199 __mr_command;
while IFS= builtin read -r -d '' -u 199 __mr_pair; do builtin export -- "$__mr_pair"; done;
builtin exec 199<&-;
builtin cd -- "$__mr_cwd" 2>/dev/null || { builtin printf L >&198; builtin cd /app || builtin cd /; } 2>/dev/null;
builtin unset OLDPWD __mr_cwd __mr_pair;
builtin trap '{ builtin pwd; builtin printf "\\0"; builtin export -p; builtin printf "\\0E"; } >&198' EXIT;
builtin eval "$__mr_command"
""".splitlines()
)


class Shell:
    """A shell of the agent's that was started ahead and waits for its command: half of a step's time saved."""

    def __init__(self, runner: Runner):
        self.script, self.source = os.memfd_create("script", 0), os.memfd_create("stdin", 0)
        self.out, self.out_end = os.pipe()
        self.state, self.state_end = os.pipe()
        start, self.start = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self.become(runner, start)
        for end in (self.out_end, self.state_end, start):
            os.close(end)

    def become(self, runner: Runner, start: int) -> None:
        """In the child: the shell, with a clean environment and nothing of ours but its own descriptors."""
        os.setsid()
        ends = ((self.state_end, STATE), (self.script, SCRIPT), (start, START), (self.source, 0), (self.out_end, 1))
        for end, target in ends:
            os.dup2(end, target)
        os.dup2(1, 2)
        os.closerange(3, STATE)
        os.closerange(START + 1, 1024)
        runner.drop()
        try:
            os.chdir("/app")
        except OSError:
            pass  # the agent may have locked itself out; the shell falls back and says so
        os.execve(SHELL, ["bash", "-c", PRELUDE, "bash"], runner.environment)

    def begin(self, script: bytes, stdin: bytes) -> bool:
        """Hand over what to run; False when the waiting shell is dead."""
        for end, data in ((self.script, script), (self.source, stdin)):
            write_all(end, data)
            os.lseek(end, 0, os.SEEK_SET)
            os.close(end)
        try:
            write_all(self.start, b"\n")
        except BrokenPipeError:
            os.close(self.out)
            os.close(self.state)
            return False
        finally:
            os.close(self.start)
        return True

    def abandon(self) -> None:
        """Kill one that never began."""
        kill(self.pid)
        for end in (self.script, self.source, self.out, self.state, self.start):
            os.close(end)


class Runner:
    """The loop of PID 1. `uid` is the agent's."""

    def __init__(self, ttl: float, uid: int, environment: dict[str, str]):
        self.uid = uid
        self.environment = environment
        self.kept: list[int] = []  # read ends of outputs that kept background processes still hold
        self.wake, wake_end = os.pipe()
        for end in (self.wake, wake_end):
            os.set_blocking(end, False)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        _signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        for number in (_signal.SIGALRM, _signal.SIGTERM):
            _signal.signal(number, lambda *_: os._exit(3))
        _signal.setitimer(_signal.ITIMER_REAL, ttl)  # the second line against leaks: works while blocked, too
        widen(0)
        widen(1)
        self.last = counters()
        self.waiting: Shell | None = None  # the shell of the next step

    def serve(self) -> None:
        """Answer requests until stdin ends."""
        handlers: dict[bytes, Callable[..., None]] = {
            b"X": self.step, b"K": self.on_sweep, b"W": self.on_write, b"R": self.on_read, b"S": self.on_snapshot,
            b"T": self.on_restore, b"C": self.on_check, b"P": self.on_ping,
        }
        while True:
            if self.waiting is None:
                self.waiting = Shell(self)
            self.idle()
            header = read_exactly(0, 13)
            nonce, payload = header[4:12], read_exactly(0, int.from_bytes(header[:4], "big"))
            try:
                handlers[header[12:]](nonce, *unpack(payload))
            except Refused as error:
                self.send(nonce, b"x", str(error).encode("utf-8", "surrogateescape"))

    def idle(self) -> None:
        """Wait for a request; meanwhile reap, and drop what kept background processes print."""
        poller = select.poll()
        for end in (0, self.wake, *self.kept):
            poller.register(end, select.POLLIN)
        while True:
            ready = [end for end, _ in poller.poll()]
            if self.wake in ready:
                self.reap()
            for end in [end for end in self.kept if end in ready]:
                if read_some(end) == b"":
                    poller.unregister(end)
                    self.kept.remove(end)
                    os.close(end)
            if 0 in ready:
                return

    def send(self, nonce: bytes, kind: bytes, payload: bytes = b"") -> None:
        write_all(1, frame(nonce, kind, payload))

    # -- processes -------------------------------------------------------------------------------------------------

    def reap(self) -> dict[int, int]:
        """{pid: wait status} of the children that ended, orphans of the agent included."""
        while read_some(self.wake, 4096):
            pass
        ended: dict[int, int] = {}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            ended[pid] = status

    def sweep(self, spare: frozenset[int] = frozenset()) -> int:
        """Kill all but PID 1, `spare` and its children, and reap; how many there were. No fork: clears fork bombs."""
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            waiting.abandon()
        left = strays(spare)
        killed = len(left) - (waiting is not None and waiting.pid in left)
        if not left:
            return 0
        deadline = time.monotonic() + 5.0
        while left and time.monotonic() < deadline:
            for pid in sorted(left) if spare else [-1]:
                kill(pid)
            self.reap()
            left = strays(spare)
            if left:
                time.sleep(0.0005)
        self.reap()
        return killed

    def drop(self) -> None:
        """In a child: become the agent, for good; first in line when memory runs out."""
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        os.setgroups([])
        os.setresgid(self.uid, self.uid, self.uid)
        os.setresuid(self.uid, self.uid, self.uid)
        for number in (_signal.SIGPIPE, _signal.SIGXFSZ, _signal.SIGCHLD, _signal.SIGALRM, _signal.SIGTERM):
            _signal.signal(number, _signal.SIG_DFL)

    # -- a step ----------------------------------------------------------------------------------------------------

    def step(
        self, nonce: bytes, command: bytes, cwd: bytes, stdin: bytes, seconds: bytes, cap: bytes, background: bytes,
        *variables: bytes,
    ) -> None:
        """Run one command; output goes out as it comes (`o`), then the end (`e`) with what became of it."""
        keep = background == b"keep"
        script = b"".join(part + b"\0" for part in (cwd, command, *variables))
        shell, self.waiting = self.waiting or Shell(self), None
        spare = frozenset(processes()) - {shell.pid} if keep else frozenset()
        if not shell.begin(script, stdin):  # a kept background process killed it
            shell = Shell(self)
            shell.begin(script, stdin)
        job = Job(self, nonce, shell, int(cap), spare)
        status, code = job.watch(time.monotonic() + float(seconds))
        left = [command_line(pid) for pid in strays(spare) - {shell.pid}]
        killed = 0
        if keep and status == b"ok":
            job.drain(limit=job.cap)
        if job.total > job.cap and status == b"ok":
            status = b"output_limit"
        if not keep or status != b"ok":
            killed = self.sweep(spare)
            job.drain(limit=1 << 62)
        if job.total > job.cap and status == b"ok":
            status = b"output_limit"
        if keep and status == b"ok" and left:
            self.kept.append(job.out)
        else:
            os.close(job.out)
        os.close(job.state)
        self.finish(job, status, 137 if code is None else code, killed, left)

    def finish(self, job: Job, status: bytes, code: int, killed: int, left: list[bytes]) -> None:
        """Tell a step's end: kernel counters decide whether a limit was behind it."""
        before, after = self.last, counters()
        self.last = after
        if after["oom"] > before["oom"]:
            status = b"oom"
        elif after["pids"] > before["pids"] and status in (b"ok", b"timeout"):
            status = b"pids_limit"
        deltas = [after[name] - before[name] for name in ("no_route", "cpu_ns")]
        numbers = (code, job.total, killed, *deltas)
        fields = (status, *(b"%d" % number for number in numbers), job.reported, bytes(job.tail))
        end = frame(job.nonce, b"e", pack(*fields, pack(*job.seen.values()), pack(*left)))
        write_all(1, job.pending + end)

    # -- files, in children as the agent ---------------------------------------------------------------------------

    def child(self, work: Work, seconds: float, relay: Callable[[bytes], object]) -> None:
        """Run `work(write)` as the agent; what it writes goes to `relay`. Raises Refused with its error."""
        data, data_end = os.pipe()
        widen(data)
        fault, fault_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            self.child_main(work, data_end, fault_end)
        os.close(data_end)
        os.close(fault_end)
        poller = select.poll()
        poller.register(data, select.POLLIN)
        deadline = time.monotonic() + seconds
        try:
            while (left := deadline - time.monotonic()) > 0:
                if poller.poll(left * 1000):
                    chunk = os.read(data, CHUNK)
                    if not chunk:
                        break
                    relay(chunk)
            else:
                raise Refused(f"no answer within {seconds:g} s")
            error = os.read(fault, 65536)
            if error != b"done":
                raise Refused(error.decode("utf-8", "surrogateescape") or "the operation was killed")
        finally:
            kill(pid)
            os.waitpid(pid, 0)
            os.close(data)
            os.close(fault)

    def child_main(self, work: Work, data_end: int, fault_end: int) -> None:
        """In the child: never returns."""
        message = b"done"
        try:
            self.drop()
            work(lambda data: write_all(data_end, data))
        except Refused as error:
            message = str(error).encode("utf-8", "surrogateescape")
        except OSError as error:
            message = (error.strerror or str(error)).encode()
        except MemoryError:
            message = b"out of memory"
        os.close(data_end)
        os.write(fault_end, message[:4000])
        os._exit(0)

    def answer(self, nonce: bytes, work: Work, seconds: float) -> None:
        """A file operation whose output goes out as it comes."""
        self.child(work, seconds, lambda chunk: self.send(nonce, b"o", chunk))
        self.send(nonce, b"e")

    def on_ping(self, nonce: bytes) -> None:
        self.send(nonce, b"e")

    def on_sweep(self, nonce: bytes) -> None:
        self.send(nonce, b"e", b"%d" % self.sweep())

    def on_check(self, nonce: bytes) -> None:
        """What the agent's processes are confined by, as one of them sees it."""
        self.answer(nonce, lambda write: write(self_check()), 5.0)

    def on_read(self, nonce: bytes, path: bytes, limit: bytes) -> None:
        self.answer(nonce, lambda write: read_file(path, int(limit), write), 1.5 + int(limit) / 2e7)

    def on_write(self, nonce: bytes, path: bytes, mode: bytes, roots: bytes, data: bytes) -> None:
        self.answer(nonce, lambda write: write_file(path, int(mode), roots.split(b":"), data), 20.0)

    def on_snapshot(self, nonce: bytes, max_bytes: bytes, max_files: bytes) -> None:
        """Records as `o`, then the command lines of processes that no snapshot can hold."""
        waiting = {self.waiting.pid} if self.waiting else set()
        alive = [command_line(pid) for pid in processes() if pid not in waiting]
        self.child(
            lambda write: walk(b"/app", int(max_bytes), int(max_files), write), 20.0,
            lambda chunk: self.send(nonce, b"o", chunk),
        )
        self.send(nonce, b"e", pack(*alive))

    def on_restore(self, nonce: bytes, *entries: bytes) -> None:
        """Sweep, empty all the agent can write to, then lay out the entries; none at all is a reset."""
        killed = self.sweep()
        for end in self.kept:
            os.close(end)
        self.kept = []
        self.child(lambda write: rebuild(entries), 30.0, lambda chunk: None)
        if leftovers():
            raise Refused("System V IPC objects of earlier processes remain: the box is not clean")
        self.last = counters()
        self.send(nonce, b"e", b"%d" % killed)


class Job:
    """A running step: its pipes, what it wrote, which processes were seen."""

    def __init__(self, runner: Runner, nonce: bytes, shell: Shell, cap: int, spare: frozenset[int]):
        self.runner, self.nonce, self.cap, self.spare = runner, nonce, cap, spare
        self.pid, self.out, self.state = shell.pid, shell.out, shell.state
        self.pending = b""  # output frames not sent yet
        self.flush_at = 0.0
        self.total = 0
        self.tail = bytearray()  # of more than the cap, the last half a cap
        self.reported = b""  # what the shell said on STATE
        self.seen: dict[int, bytes] = {}
        self.poller = select.poll()
        for end in (self.out, self.state, runner.wake):
            os.set_blocking(end, False)
            self.poller.register(end, select.POLLIN)
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
            if end == self.runner.wake:
                status = self.runner.reap().get(self.pid)
                code = None if status is None else exit_code(status)
            elif end != 0 and self.take(end) == b"":
                self.poller.unregister(end)
        return code

    def take(self, end: int) -> bytes | None:
        """Read once from a pipe: b"" at its end, None when it holds nothing now."""
        data = read_some(end)
        if data and end == self.out:
            self.add(data)
        elif data:
            self.reported = (self.reported + data)[-2 * CHUNK :]
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
        """What is still in the pipes; no more than `limit` in all where writers may be alive."""
        for end in (self.state, self.out):
            while self.total <= limit and self.take(end):
                pass

    def look(self) -> None:
        """Remember command lines of new processes, for the safety events."""
        for pid in processes():
            if pid not in self.seen and pid not in self.spare and pid != self.pid and len(self.seen) < 64:
                self.seen[pid] = command_line(pid)

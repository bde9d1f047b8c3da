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
    memory_file,
    pack,
    processes,
    read_exactly,
    read_file,
    read_some,
    rebuild,
    self_check,
    unpack,
    walk,
    write_all,
    write_file,
)

Work = Callable[[Callable[[bytes], None]], None]  # a file operation; it is given a function that sends bytes out
STATE, SCRIPT = 198, 199  # descriptors of a step's shell
SHELL = "/bin/bash"
# Reads cwd, command and variables as data from SCRIPT; reports cwd and exports on STATE when the shell ends.
# All on one line: bash counts lines from there, so that messages say `line 1` for the command's first.
PRELUDE = " ".join(
    line.strip()
    for line in """\
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
        self.last = counters()

    def serve(self) -> None:
        """Answer requests until stdin ends."""
        handlers: dict[bytes, Callable[..., None]] = {
            b"X": self.step, b"K": self.on_sweep, b"W": self.on_write, b"R": self.on_read, b"S": self.on_snapshot,
            b"T": self.on_restore, b"C": self.on_check, b"P": self.on_ping,
        }
        while True:
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
        """Kill every process but PID 1 and `spare`, and reap; how many there were. No fork: clears fork bombs."""
        left = set(processes()) - spare
        killed = len(left)
        deadline = time.monotonic() + 5.0
        while left and time.monotonic() < deadline:
            for pid in sorted(left) if spare else [-1]:
                kill(pid)
            self.reap()
            left = set(processes()) - spare
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
        spare = frozenset(processes()) if keep else frozenset()
        out, out_end = os.pipe()
        state, state_end = os.pipe()
        script = memory_file(b"".join(part + b"\0" for part in (cwd, command, *variables)))
        source = memory_file(stdin) if stdin else os.open("/dev/null", os.O_RDONLY)
        pid = os.fork()
        if pid == 0:
            self.shell(source, out_end, state_end, script)
        for end in (out_end, state_end, script, source):
            os.close(end)
        job = Job(self, nonce, pid, out, state, int(cap), spare)
        status, code = job.watch(time.monotonic() + float(seconds))
        left = [text for text in map(command_line, set(processes()) - spare) if text]
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
            self.kept.append(out)
        else:
            os.close(out)
        os.close(state)
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
        self.send(job.nonce, b"e", pack(*fields, pack(*job.seen.values()), pack(*left)))

    def shell(self, source: int, out_end: int, state_end: int, script: int) -> None:
        """In the child: the agent's shell, with a clean environment and nothing of ours but STATE and SCRIPT."""
        os.setsid()
        for end, target in ((state_end, STATE), (script, SCRIPT), (source, 0), (out_end, 1), (out_end, 2)):
            os.dup2(end, target)
        os.closerange(3, STATE)
        os.closerange(SCRIPT + 1, 1024)
        self.drop()
        try:
            os.chdir("/app")
        except OSError:
            pass  # the agent may have locked itself out; the shell falls back and says so
        os.execve(SHELL, ["bash", "-c", PRELUDE, "bash"], self.environment)

    # -- files, in children as the agent ---------------------------------------------------------------------------

    def child(self, work: Work, seconds: float, relay: Callable[[bytes], object]) -> None:
        """Run `work(write)` as the agent; what it writes goes to `relay`. Raises Refused with its error."""
        data, data_end = os.pipe()
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
        alive = [text for text in map(command_line, processes()) if text]
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

    def __init__(self, runner: Runner, nonce: bytes, pid: int, out: int, state: int, cap: int, spare: frozenset[int]):
        self.runner, self.nonce, self.pid, self.out, self.state = runner, nonce, pid, out, state
        self.cap, self.spare = cap, spare
        self.total = 0
        self.tail = bytearray()  # of more than the cap, the last half a cap
        self.reported = b""  # what the shell said on STATE
        self.seen: dict[int, bytes] = {}
        self.poller = select.poll()
        for end in (out, state, runner.wake):
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
            code = self.wait(min(deadline, next_look) - now)
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
            self.runner.send(self.nonce, b"o", data[:room])
        half = self.cap // 2
        self.tail = (self.tail + data)[-half:] if half else self.tail

    def drain(self, limit: int) -> None:
        """What is still in the pipes; no more than `limit` in all where writers may be alive."""
        for end in (self.state, self.out):
            while self.total <= limit and self.take(end):
                pass

    def look(self) -> None:
        """Remember command lines of new processes, for the safety events."""
        for pid in processes():
            if pid not in self.seen and pid not in self.spare and len(self.seen) < 64:
                text = command_line(pid)
                if text:
                    self.seen[pid] = text

"""PID 1 of a docker box: runs steps and file operations for the host, over frames on stdin and stdout.

Its source and that of the three modules beside it (runner_base, runner_files, runner_shell) are the first frame, run
by `python3 -I -S`: C modules and `os` only. It is uid 0 with the capabilities SETUID, SETGID and KILL: enough to
start the agent's processes as another user and to kill them, nothing else. All file work happens in forked children
as the agent, so PID 1 opens nothing that the agent named. The agent can read this code; it cannot signal, trace or
write to the process. Not in the paper.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os
import select
import time
from collections.abc import Callable

from mini_rome.sandbox.runner_base import (
    CHUNK,
    Counters,
    Refused,
    alone,
    command_line,
    drop,
    frame,
    kill,
    leftovers,
    pack,
    processes,
    read_exactly,
    read_some,
    strays,
    unpack,
    widen,
    write_all,
)
from mini_rome.sandbox.runner_files import read_file, rebuild, self_check, walk, write_file
from mini_rome.sandbox.runner_shell import Job, Shell

Work = Callable[[Callable[[bytes], None]], None]  # a file operation; it is given a function that sends bytes out


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
        self.counters = Counters()
        self.waiting: Shell | None = None  # the shell of the next step
        os.setgroups([])

    def serve(self) -> None:
        """Answer requests until stdin ends."""
        handlers: dict[bytes, Callable[..., None]] = {
            b"X": self.step, b"K": self.on_sweep, b"W": self.on_write, b"R": self.on_read, b"S": self.on_snapshot,
            b"T": self.on_restore, b"C": self.on_check, b"P": self.on_ping,
        }
        while True:
            if self.waiting is None:
                self.waiting = self.fresh()
            self.idle()
            header = bytes(read_exactly(0, 13))
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

    def fresh(self) -> Shell | None:
        """A waiting shell; None where kept background processes leave no room for one."""
        self.reap()
        try:
            return Shell(self.uid, self.environment)
        except OSError:
            return None

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
        elif alone():
            return 0
        left = strays(spare)
        killed = len(left) - (waiting is not None and waiting.pid in left)
        deadline = time.monotonic() + 5.0
        while (left if spare else not alone()) and time.monotonic() < deadline:
            for pid in sorted(left) if spare else [-1]:
                kill(pid)
            self.reap()
            left = strays(spare)
            if left:
                time.sleep(0.0005)
        self.reap()
        return killed

    # -- a step ----------------------------------------------------------------------------------------------------

    def step(
        self, nonce: bytes, command: bytes, cwd: bytes, stdin: bytes, seconds: bytes, cap: bytes, background: bytes,
        *variables: bytes,
    ) -> None:
        """Run one command; output goes out as it comes (`o`), then the end (`e`) with what became of it."""
        keep = background == b"keep"
        script = b"".join(part + b"\0" for part in (cwd, command, *variables))
        shell, self.waiting = self.waiting, None
        spare = frozenset(processes()) - {shell.pid if shell else 0} if keep else frozenset()
        if shell is None or not shell.begin(script, stdin):  # kept background processes left no room, or killed it
            shell = self.fresh()
            if shell is None:
                spare = frozenset()
                self.sweep()
                shell = Shell(self.uid, self.environment)
            shell.begin(script, stdin)
        job = Job(self.wake, self.reap, nonce, shell, int(cap), spare)
        status, code = job.watch(time.monotonic() + float(seconds))
        left = [] if alone() else [command_line(pid) for pid in strays(spare) - {shell.pid}]
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
        self.finish(job, status, 137 if code is None else code, killed, left)
        os.close(job.state)

    def finish(self, job: Job, status: bytes, code: int, killed: int, left: list[bytes]) -> None:
        """Tell a step's end: kernel counters decide whether a limit was behind it."""
        grown = self.counters.since()
        if grown["oom"]:
            status = b"oom"
        elif grown["pids"] and status in (b"ok", b"timeout"):
            status = b"pids_limit"
        numbers = (code, job.total, killed, grown["no_route"], grown["cpu_ns"])
        fields = (status, *(b"%d" % number for number in numbers), job.reported(), bytes(job.tail))
        end = frame(job.nonce, b"e", pack(*fields, pack(*job.seen.values()), pack(*left)))
        write_all(1, job.pending + end)

    # -- files, in children as the agent ---------------------------------------------------------------------------

    def child(self, work: Work, seconds: float, relay: Callable[[bytes], object]) -> None:
        """Run `work(write)` as the agent; what it writes goes to `relay`. Raises Refused with its error."""
        data, data_end = os.pipe()
        widen(data)
        fault, fault_end = os.pipe()
        try:
            pid = os.fork()
        except OSError as failure:  # kept background processes use up the limit
            for end in (data, fault, data_end, fault_end):
                os.close(end)
            raise Refused(f"no process can be made: {failure.strerror}") from None
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
            drop(self.uid)
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
        self.counters.since()
        self.send(nonce, b"e", b"%d" % killed)

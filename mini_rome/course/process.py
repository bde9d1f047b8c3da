"""A subprocess that is surely over when the call returns: deadline, output cap, and its whole tree killed.

For programs of one's own on one's own machine, such as a student's `check`: there is no isolation here. What a model
writes runs in `mini_rome.sandbox`, never here. Not in the paper.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

TAG = "MINI_ROME_PROCESS"  # in the environment of a run's processes: a daemon leaves its session, not that
READ = 1 << 16


class Ended(NamedTuple):
    """output: at most the cap, stdout and stderr in order. status: ok, timeout or output_limit.

    exit_code: as bash gives it, 124 after a timeout, 137 after too much output. killed: children alive at the end.
    """

    output: bytes
    status: str
    exit_code: int
    killed: int = 0


def run_capped(command: str | Sequence[str], seconds: float, cap: int, stdin: bytes = b"") -> Ended:
    """Run a program, or a line of bash, until it ends, `seconds` pass or it writes more than `cap` bytes.

    What it started is killed with it, in whatever session, and is not waited for.

    >>> run_capped("echo a; echo b >&2; exit 3", 5, 100)
    Ended(output=b'a\\nb\\n', status='ok', exit_code=3, killed=0)
    """
    words = ["bash", "-c", command] if isinstance(command, str) else list(command)
    tag = secrets.token_hex(8)
    with tempfile.TemporaryFile() as source:
        source.write(stdin)
        source.seek(0)
        process = subprocess.Popen(
            words, stdin=source, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, TAG: tag},
        )
    try:
        output, status = _watch(process, time.monotonic() + seconds, cap)
        leader_alive = process.poll() is None
        killed = kill_tree(tag, process.pid) - leader_alive
        code = process.wait()
        if status == "ok":
            output = _drain(process, output, cap)
            status = "output_limit" if len(output) > cap else "ok"
    finally:
        kill_tree(tag, process.pid)
        process.stdout.close()  # type: ignore[union-attr]
        process.wait()
    exit_code = {"timeout": 124, "output_limit": 137}.get(status, 128 - code if code < 0 else code)
    return Ended(output[:cap], status, exit_code, max(0, killed))


def _watch(process: subprocess.Popen[bytes], deadline: float, cap: int) -> tuple[bytes, str]:
    """Read until the program itself has ended: one that it left behind may hold the pipe for ever."""
    output = bytearray()
    end = process.stdout.fileno()  # type: ignore[union-attr]
    os.set_blocking(end, False)
    is_open = True
    while process.poll() is None:
        left = deadline - time.monotonic()
        if left <= 0:
            return bytes(output), "timeout"
        if not is_open:
            time.sleep(min(left, 0.005))
        elif select.select([end], [], [], min(left, 0.02))[0]:
            data = os.read(end, READ)
            is_open = bool(data)
            output += data
        if len(output) > cap:
            return bytes(output), "output_limit"
    return bytes(output), "ok"


def _drain(process: subprocess.Popen[bytes], output: bytes, cap: int) -> bytes:
    """What is still in the pipe, now that nobody writes to it any more."""
    while len(output) <= cap:
        try:
            data = os.read(process.stdout.fileno(), READ)  # type: ignore[union-attr]
        except BlockingIOError:
            break
        if not data:
            break
        output += data
    return output


def kill_tree(tag: str, leader: int) -> int:
    """Kill the processes that carry the tag, again until none is left (one may fork meanwhile); how many there were.

    Where there is no /proc only the leader's group can be found.
    """
    if not Path("/proc/self/environ").exists():
        try:
            os.killpg(leader, signal.SIGKILL)
        except ProcessLookupError:
            return 0
        return 1
    killed: set[int] = set()
    deadline = time.monotonic() + 5.0
    while (found := tagged(tag)) and time.monotonic() < deadline:
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        killed |= found
        time.sleep(0.002)
    return len(killed)


def tagged(tag: str) -> set[int]:
    """Ids of the living processes whose environment has the tag; a zombie has none."""
    wanted = f"{TAG}={tag}".encode()
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                environment = Path("/proc", entry, "environ").read_bytes()
            except OSError:  # it ended meanwhile, or is another user's
                continue
            if wanted in environment.split(b"\0"):
                found.add(int(entry))
    return found

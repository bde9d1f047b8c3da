"""The wire to a box: frames inside Docker's attach stream, on a socket that never blocks past a deadline."""

from __future__ import annotations

import errno
import functools
import marshal
import select
import socket
import time
from dataclasses import dataclass
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from typing import Any

from mini_rome.sandbox import runner, runner_base, runner_files, runner_shell
from mini_rome.sandbox.runner_base import frame

_HEADER = 13  # length, nonce, kind
_RECEIVE = 1 << 16


class ConnectionLost(Exception):
    """The stream ended or broke: the box died, or the connection to the engine was cut."""


class Silent(Exception):
    """The deadline passed without an answer."""


@dataclass(frozen=True)
class Frame:
    """One reply: `o` output, `e` end, `x` refusal."""

    nonce: bytes
    kind: bytes
    payload: bytes


def boot_code(ttl_s: float, uid: int, environment: dict[str, str]) -> bytes:
    """The first message to a box: a length, Python text to run, then the modules that become its PID 1."""
    modules = _modules()
    text = (
        "import marshal, sys\n"
        "from _frozen_importlib_external import MAGIC_NUMBER\n"
        f"for name, source, code in marshal.loads(take({len(modules)})):\n"
        "    module = type(sys)(name)\n"
        "    sys.modules[name] = module\n"
        f"    same = MAGIC_NUMBER == {MAGIC_NUMBER!r}\n"
        "    exec(marshal.loads(code) if same else compile(source, name, 'exec'), module.__dict__)\n"
        f"module.Runner({ttl_s!r}, {uid!r}, {environment!r}).serve()\n"
    ).encode()
    return len(text).to_bytes(4, "big") + text + modules


@functools.cache
def _modules() -> bytes:
    """The runner, marshalled: (name, source, compiled) each. Compiling it inside would take 15 ms of every start."""
    found = []
    for module in (runner_base, runner_files, runner_shell, runner):
        source = Path(str(module.__file__)).read_text()
        found.append((module.__name__, source, marshal.dumps(compile(source, module.__name__, "exec"))))
    return marshal.dumps(found, 2)


class Wire:
    """An attached stream. One thread talks at a time; `shut` may come from any thread and ends a wait."""

    def __init__(self, attached: Any):
        self._attached = attached  # keeps the HTTP response, and with it the socket, alive
        self._socket: socket.socket = getattr(attached, "_sock", attached)
        self._socket.setblocking(False)
        self._buffer = bytearray(_RECEIVE)
        self._docker = bytearray()  # bytes of Docker's framing not yet taken apart
        self._stream = bytearray()  # bytes of the runner's stdout not yet a whole frame
        self.complaints = b""  # what PID 1 wrote to stderr: the traceback of a runner that failed

    def send_raw(self, data: bytes, deadline: float) -> None:
        """All of `data`. Raises Silent at the deadline, ConnectionLost."""
        view = memoryview(data)
        while view:
            try:
                view = view[self._socket.send(view[:_RECEIVE]) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)
            except OSError as error:
                raise ConnectionLost(errno.errorcode.get(error.errno or 0, str(error))) from error

    def send(self, nonce: bytes, kind: bytes, payload: bytes, deadline: float) -> None:
        self.send_raw(frame(nonce, kind, payload), deadline)

    def receive(self, deadline: float) -> Frame:
        """The next frame. Raises Silent at the deadline, ConnectionLost."""
        while True:
            if len(self._stream) >= _HEADER:
                size = _HEADER + int.from_bytes(self._stream[:4], "big")
                if len(self._stream) >= size:
                    with memoryview(self._stream) as view:
                        found = Frame(bytes(view[4:12]), bytes(view[12:13]), bytes(view[_HEADER:size]))
                    del self._stream[:size]
                    return found
            self._receive_some(deadline)

    def _receive_some(self, deadline: float) -> None:
        try:
            size = self._socket.recv_into(self._buffer)
        except BlockingIOError:
            self._wait(select.POLLIN, deadline)
            return
        except OSError as error:
            raise ConnectionLost(errno.errorcode.get(error.errno or 0, str(error))) from error
        if not size:
            raise ConnectionLost("end of stream")
        self._docker += memoryview(self._buffer)[:size]
        at = 0
        while len(self._docker) - at >= 8:
            end = at + 8 + int.from_bytes(self._docker[at + 4 : at + 8], "big")
            if len(self._docker) < end:
                break
            if self._docker[at] == 1:
                self._stream += self._docker[at + 8 : end]
            else:
                self.complaints = (self.complaints + self._docker[at + 8 : end])[-4096:]
            at = end
        del self._docker[:at]

    def _wait(self, event: int, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise Silent
        poller = select.poll()
        poller.register(self._socket, event)
        poller.poll(left * 1000 + 0.5)

    def shut(self) -> None:
        """End the stream, waking a thread that waits on it. The box's stdin ends, and so does the box."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            if error.errno not in (errno.ENOTCONN, errno.EBADF):
                raise

    def close(self) -> None:
        """Give the descriptor back."""
        self._attached.close()
        self._socket.close()

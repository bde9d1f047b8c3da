"""A unix-socket proxy between the Docker SDK and the engine, to inject faults without touching the engine.

with DockerProxy() as proxy:
    client = docker.DockerClient(base_url=proxy.url)
    proxy.stall()    # bytes stop in both directions, connections stay open
    proxy.refuse()   # new connections are refused, old ones go on
    proxy.cut()      # old connections are closed and new ones refused: the engine was killed
    proxy.fail("/start")  # requests whose line holds this text are answered with status 500
    proxy.back()     # all is well again; what was stalled is delivered
"""

from __future__ import annotations

import os
import select
import socket
import tempfile
import threading
from typing import Self

ENGINE = "/var/run/docker.sock"
_ERROR = b'{"message":"injected by the proxy"}\n'
_REPLY = (
    b"HTTP/1.1 500 Internal Server Error\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_ERROR), _ERROR)
)


def engine_socket() -> str:
    """Path of the engine's own socket."""
    host = os.environ.get("DOCKER_HOST", "")
    return host.removeprefix("unix://") if host.startswith("unix://") else ENGINE


class DockerProxy:
    """One proxy: an accepting thread, and one thread per connection; all have ended after the `with` block."""

    def __init__(self, engine: str | None = None) -> None:
        self.engine = engine or engine_socket()
        self._folder = tempfile.TemporaryDirectory(prefix="mini-rome-proxy-")
        self.path = f"{self._folder.name}/docker.sock"
        self.url = f"unix://{self.path}"
        self.requests: list[str] = []  # request lines seen, in order
        self._flowing = threading.Event()
        self._flowing.set()
        self._pattern = ""
        self._fails = 0
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None

    def __enter__(self) -> Self:
        self._listen()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.cut()
        self._flowing.set()
        for thread in self._threads:
            thread.join(timeout=5)
        self._folder.cleanup()

    @property
    def connections(self) -> int:
        """Connections open now."""
        with self._lock:
            return len(self._pairs)

    # -- faults ----------------------------------------------------------------------------------------------------

    def stall(self) -> None:
        """Hold all bytes back."""
        self._flowing.clear()

    def refuse(self) -> None:
        """ECONNREFUSED for new connections."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
            listener.close()

    def cut(self) -> None:
        """Close every connection and refuse new ones."""
        self.refuse()
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            for end in pair:
                _shut(end)

    def fail(self, pattern: str, times: int = 1) -> None:
        """Answer the next `times` requests whose line holds `pattern` with status 500, without asking the engine."""
        self._pattern, self._fails = pattern, times

    def back(self) -> None:
        """End every fault."""
        self._pattern, self._fails = "", 0
        self._flowing.set()
        if self._listener is None:
            self._listen()

    # -- plumbing --------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        if os.path.exists(self.path):
            os.unlink(self.path)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(128)
        self._spawn(self._accept, self._listener)

    def _spawn(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True, name="docker-proxy")  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            try:
                far.connect(self.engine)
            except OSError:
                near.close()
                continue
            with self._lock:
                self._pairs.add((near, far))
            self._spawn(self._carry, near, far)

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        """Move bytes until both directions have ended; a half-close is passed on, as attach needs it."""
        open_ends = {near: far, far: near}
        try:
            while open_ends and not self._ended.is_set():
                readable, _, _ = select.select(list(open_ends), [], [], 0.5)
                for end in readable:
                    data = end.recv(1 << 16)
                    self._flowing.wait()
                    if end is near and self._injected(data, near):
                        return
                    other = open_ends[end]
                    if data:
                        other.sendall(data)
                    else:
                        del open_ends[end]
                        other.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # one of the two ends went away, by a fault or by itself
        finally:
            with self._lock:
                self._pairs.discard((near, far))
            near.close()
            far.close()

    def _injected(self, data: bytes, near: socket.socket) -> bool:
        line = data.split(b"\r\n", 1)[0].decode("latin-1")
        if not line.endswith(("HTTP/1.1", "HTTP/1.0")):
            return False
        self.requests.append(line)
        if not self._fails or self._pattern not in line:
            return False
        self._fails -= 1
        near.sendall(_REPLY)
        return True


def _shut(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # already closed by its own side

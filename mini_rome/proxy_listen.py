"""Where the model proxy listens, and what a connection may cost before it has shown a token. Not in the paper.

Whoever can connect (any local process, or a hostile command in a box) holds a descriptor and some memory of this
process: heads are bounded in size and time, bodies in time, connections in number, and refusals in rate.
"""

from __future__ import annotations

import asyncio
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.http.h11_impl import H11Protocol

from mini_rome.errors import ConfigError

HEAD_BYTES, HEAD_S = 64 << 10, 30.0  # of a request's line and headers
BURST, PER_SECOND = 50, 50.0  # refusals at once, and from then on


@dataclass
class Pace:
    """How long a refusal waits: a burst at once, then PER_SECOND. One for each token, one for all strangers."""

    _next: float = 0.0

    def wait(self, now: float) -> float:
        """Seconds until this refusal is due.

        >>> pace = Pace()
        >>> [pace.wait(100.0) for _ in range(BURST + 2)][-3:]
        [0.0, 0.02, 0.04]
        >>> pace.wait(200.0)
        0.0
        """
        self._next = max(self._next, now - (BURST - 1) / PER_SECOND)
        wait, self._next = self._next - now, self._next + 1 / PER_SECOND
        return round(max(0.0, wait), 6)


def guarded(most: int, pure_python: bool = False) -> type[asyncio.Protocol]:
    """The server's HTTP protocol; connections beyond `most`, and heads too long or too slow, are cut.

    pure_python: read by h11, which bounds heads itself, for clients that may be hostile; else by httptools, faster.
    """
    base = H11Protocol if pure_python else AutoHTTPProtocol

    class Guarded(base):  # type: ignore[valid-type, misc]
        _head = 0  # bytes of a head that is on its way

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._timer = self.loop.call_later(HEAD_S, self._look, None)
            if len(self.connections) > most:
                transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            self._timer.cancel()
            super().connection_lost(exc)

        def _look(self, before: object) -> None:
            """Cut a connection that in all this time completed no head, though it began one or never had any."""
            if self.cycle is before and (self.cycle is None or self._head):
                self.transport.abort()
            else:
                self._timer = self.loop.call_later(HEAD_S, self._look, self.cycle)

        def data_received(self, data: bytes) -> None:
            cycle = self.cycle
            between = cycle is None or not cycle.more_body
            super().data_received(data)
            self._head = self._head + len(data) if between and self.cycle is cycle else 0
            if self._head > HEAD_BYTES:
                self.transport.abort()

    return Guarded


def listen(port: int) -> socket.socket:
    """A socket on 127.0.0.1. Raises ConfigError where the port is no port or taken."""
    if not 0 <= port < 65536:
        raise ConfigError(f"--port {port}: must be 0 (any free port) to 65535")
    listener = socket.socket(socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"--port {port}: cannot listen on 127.0.0.1 ({error}); 0 takes a free port") from None
    listener.listen(512)
    return listener


def listen_unix(path: Path) -> socket.socket:
    """A socket file that the folder keeps from others. Raises ConfigError where it would not, or cannot be made."""
    if not path.parent.is_dir():
        raise ConfigError(f"--socket {path}: the folder does not exist")
    if path.parent.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"--socket {path}: others can write to the folder; take one of your own (mkdir -m 700)")
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigError(f"--socket {path}: cannot listen there ({error}); name a new file") from None
    path.chmod(0o600)
    listener.listen(512)
    return listener

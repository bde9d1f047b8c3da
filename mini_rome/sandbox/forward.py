"""Runs inside a native box, as the agent: connections to 127.0.0.1:PORT go to the socket of the model proxy.

Started by `python3 -I -S forward.py PORT SOCKET PROGRAM ARGUMENT...`; becomes the program once the port listens, so
that an agent which knows only a base URL finds it there. It has no right that the agent has not.
"""

from __future__ import annotations

import os
import socket
import sys
import threading


def pump(source: socket.socket, sink: socket.socket) -> None:
    """Bytes of one direction until its end, then that end."""
    try:
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:  # either side hung up: the other one is told by the same
        for end in (source, sink):
            end.close()


def serve(listener: socket.socket, path: str) -> None:
    """Accept until killed; a connection that the proxy does not take is closed."""
    while True:
        near, _ = listener.accept()
        far = socket.socket(socket.AF_UNIX)
        try:
            far.connect(path)
        except OSError:
            near.close()
            continue
        for ends in ((near, far), (far, near)):
            threading.Thread(target=pump, args=ends, daemon=True).start()


def main(port: str, path: str, *program: str) -> None:
    listener = socket.create_server(("127.0.0.1", int(port)))
    if os.fork() == 0:
        null = os.open(os.devnull, os.O_RDWR)
        for end in (0, 1, 2):  # the program's output ends with the program
            os.dup2(null, end)
        serve(listener, path)
    listener.close()
    os.execvp(program[0], program)


if __name__ == "__main__":
    main(*sys.argv[1:])

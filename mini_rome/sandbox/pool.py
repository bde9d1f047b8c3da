"""Many boxes of one kind, kept warm between episodes.

A box given back is swept, wiped and put to the default environment; one that is dead, closed or not surely clean is
closed and replaced. `take` blocks while all boxes are out: that is the back-pressure. Not in the paper.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from mini_rome.errors import ConfigError, SandboxClosed, SandboxError, SandboxUnavailable
from mini_rome.sandbox.base import Limits, Sandbox
from mini_rome.sandbox.safety import EventLog, Recorder

if TYPE_CHECKING:
    from collections.abc import Iterator


class Pool:
    """At most `size` boxes, made when first needed. Thread-safe; also a context manager.

    `make_box` replaces the maker in tests; by default `mini_rome.sandbox.make` with the other arguments. `event_log`
    gets the safety events of every step, under the number of the `take` as the episode.
    """

    def __init__(
        self,
        backend: str = "auto",
        image: str | None = None,
        limits: Limits | None = None,
        size: int = 16,
        make_box: Callable[[], Sandbox] | None = None,
        event_log: EventLog | None = None,
    ):
        from mini_rome import sandbox

        if size < 1:
            raise ConfigError(f"size={size}: a pool needs at least one box")
        self.backend = sandbox.resolve(backend, image)[0]
        self.size = size
        self._make = make_box or (lambda: sandbox.make(self.backend, image, limits))
        self._idle: deque[Sandbox] = deque()
        self._out: set[Sandbox] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._making = 0
        self.event_log = event_log
        self.taken = 0
        self.made = 0
        self.replaced = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def take(self, timeout: float | None = None) -> Sandbox:
        """A clean box; waits while `size` are out. Raises SandboxClosed, or SandboxUnavailable after `timeout` s."""
        box = self._take(timeout)
        self.enlist(box)
        return box

    def enlist(self, box: Sandbox) -> None:
        """Count a box as the next episode's and log its events as such: also one that is not the pool's own."""
        with self._changed:
            self.taken += 1
            if self.event_log is not None:
                box.observer = Recorder(self.event_log, self.taken)

    def _take(self, timeout: float | None) -> Sandbox:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._idle and len(self._out) + self._making >= self.size and not self._closed:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise SandboxUnavailable(f"all {self.size} boxes of the pool were out for {timeout:g} s")
                self._changed.wait(left)
            if self._closed:
                raise SandboxClosed("the pool is closed")
            while self._idle:
                box = self._idle.popleft()
                if box.alive:
                    self._out.add(box)
                    return box
                self.replaced += 1
            self._making += 1
        return self._make_one()

    def _make_one(self) -> Sandbox:
        box: Sandbox | None = None
        try:
            box = self._make()
            return box
        finally:
            with self._changed:
                self._making -= 1
                if box is not None and not self._closed:
                    self._out.add(box)
                    self.made += 1
                self._changed.notify_all()
            if box is not None and self._closed:
                box.close()

    def give(self, box: Sandbox) -> None:
        """Take a box back: reset, or close it when it is dead, unsure or the pool is closed."""
        clean = False
        try:
            if box.alive and not self._closed:
                box.reset()
                clean = True
        except SandboxError:
            self.replaced += 1
        finally:
            with self._changed:
                self._out.discard(box)
                keep = clean and box.alive and not self._closed
                if keep:
                    self._idle.append(box)
                self._changed.notify()
            if not keep:
                box.close()

    @contextmanager
    def box(self) -> Iterator[Sandbox]:
        """`take` and `give` around a block."""
        taken = self.take()
        try:
            yield taken
        finally:
            self.give(taken)

    def close(self) -> None:
        """Close every box, those that are out included. Idempotent."""
        with self._changed:
            self._closed = True
            boxes = [*self._idle, *self._out]
            self._idle.clear()
            self._out.clear()
            self._changed.notify_all()
        for box in boxes:
            box.close()

"""Train-rollout multiplexing on one device: sampler and optimiser take turns (the idea of the paper's figure 3).

The paper divides GPUs between rollouts and training over time and not into two groups for good. On one device that
is a turn: the trainer has it from when the inputs of a micro-batch are ready until its backward pass is done, the
sampler for one call on whatever episodes are ready. With `async_ratio` the rollouts of the next step go on meanwhile:
the trainer computes while sandboxes run commands, the sampler draws tokens in between. Who asked first is next.

Where two groups of devices would each hold the model once, the one device holds it twice, or the sampler's copy is
put away while the trainer computes: `Sampler.sleep`. Nothing here changes what is drawn.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from mini_rome.sampler.base import Sampler
from mini_rome.timeline import note


class Device:
    """Says who computes. Without a sampler nobody waits for anybody, and only times are noted."""

    def __init__(self, sampler: Sampler | None = None) -> None:
        self._sampler = sampler
        self._waiting: deque[object] = deque()  # who has it, then who asked for it, in turn
        self._changed = threading.Condition()
        self._begun: float | None = None  # when the trainer got it

    def take(self) -> None:
        """The trainer's, as soon as the sampler is done with the call under way; it sleeps from then on."""
        if self._sampler is not None:
            self._await_turn()
            self._sampler.sleep()
        self._begun = time.monotonic()

    def give(self) -> None:
        """The trainer is done; nothing happens where it never took the device."""
        if self._begun is None:
            return
        note("train", self._begun)
        self._begun = None
        if self._sampler is not None:
            self._end_turn()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """The sampler's during the body, awake."""
        if self._sampler is None:
            yield
            return
        self._await_turn()
        try:
            self._sampler.wake()
            yield
        finally:
            self._end_turn()

    def _await_turn(self) -> None:
        me = object()
        with self._changed:
            self._waiting.append(me)
            self._changed.wait_for(lambda: self._waiting[0] is me)

    def _end_turn(self) -> None:
        with self._changed:
            self._waiting.popleft()
            self._changed.notify_all()

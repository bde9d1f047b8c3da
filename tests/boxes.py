"""Helpers of the sandbox tests: pools that live as long as the test run, and what every case asks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mini_rome.sandbox import Limits, Pool, Sandbox

_pools: dict[tuple[str, str | None], Pool] = {}


def pool(backend: str, image: str | None = None) -> Pool:
    """The test run's pool of this kind."""
    key = (backend, image)
    if key not in _pools:
        _pools[key] = Pool(backend, image, Limits(), size=4)
    return _pools[key]


def close_pools() -> None:
    """At the end of the test run."""
    for found in _pools.values():
        found.close()
    _pools.clear()


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """The block takes at most this long, in proportion longer on a machine with more to run than cores."""
    start = time.monotonic()
    yield
    took = time.monotonic() - start
    assert took <= seconds * crowding(), f"took {took:.2f} s, allowed {seconds * crowding():.2f} s"


def crowding() -> float:
    """How many processes want each core, 1 on a quiet machine."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def usable(box: Sandbox) -> bool:
    """The next step is a normal one."""
    result = box.exec("echo usable", timeout=10)
    return (result.output, result.exit_code, result.status) == ("usable\n", 0, "ok")


def running(box: Sandbox) -> str:
    """Processes of the agent besides the step that asks, one command line a line."""
    return box.exec(
        "for p in /proc/[0-9]*; do [ ${p#/proc/} != 1 ] && [ ${p#/proc/} != $$ ] && tr '\\0' ' ' < $p/cmdline; done"
    ).output

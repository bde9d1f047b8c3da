"""Where the time of a step goes: spans by the monotonic clock, recorded where a run asks for it, else nothing.

Phases: generate (the sampler draws tokens), environment (a sandbox is reset or runs calls), reward (a verifier
looks), sync (weights go to the sampler), train (forward, backward, pi_old, the optimiser). A step's window is marked
as `step`. The device is idle while nothing is generated, synchronised or trained. Rollouts of an external agent draw
their tokens inside the model proxy, where nothing is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from mini_rome.runs import write_csv, write_json

PHASES = ("generate", "environment", "reward", "sync", "train")
DEVICE = ("generate", "sync", "train")  # phases that compute with the model
STEP = "step"
COLUMNS = ("way", "phase", "begin", "end")
TIMELINE_CSV, TIMELINE_JSON = "timeline.csv", "timeline.json"


class Span(NamedTuple):
    """A stretch of one phase, in seconds of one clock."""

    phase: str
    begin: float
    end: float


_spans: list[Span] | None = None  # of the recording under way; appending is safe from any thread


def note(phase: str, begin: float) -> None:
    """A span from `begin` (time.monotonic) until now."""
    if _spans is not None:
        _spans.append(Span(phase, begin, time.monotonic()))


def span(phase: str) -> AbstractContextManager[None]:
    """The body's time as a span; nothing where nothing is recorded."""
    return nullcontext() if _spans is None else _timed(phase)


@contextmanager
def _timed(phase: str) -> Iterator[None]:
    begin = time.monotonic()
    try:
        yield
    finally:
        note(phase, begin)


@contextmanager
def recording() -> Iterator[list[Span]]:
    """All spans that end in the body, from every thread."""
    global _spans
    found: list[Span] = []
    _spans = found
    try:
        yield found
    finally:
        _spans = None


@contextmanager
def recorded(folder: Path | None, way: str, facts: Mapping[str, Any]) -> Iterator[None]:
    """Write what is recorded in the body into timeline.csv and timeline.json of a folder; None: record nothing."""
    if folder is None:
        yield
        return
    with recording() as spans:
        yield
    write(folder / TIMELINE_CSV, {way: spans}, facts)


def write(path: Path, ways: Mapping[str, Sequence[Span]], facts: Mapping[str, Any]) -> None:
    """Spans of each way, in seconds from its first step, and their shares as JSON beside them."""
    rows, shares = [], {}
    for way, spans in ways.items():
        zero = min((s.begin for s in spans if s.phase == STEP), default=0.0)
        moved = [Span(s.phase, s.begin - zero, s.end - zero) for s in sorted(spans, key=lambda s: s.begin)]
        values = [(way, s.phase, f"{s.begin:.4f}", f"{s.end:.4f}") for s in moved]
        rows += [dict(zip(COLUMNS, value, strict=True)) for value in values]
        shares[way] = {name: round(value, 4) for name, value in phase_shares(moved).items()}
    write_csv(path, rows, COLUMNS)
    write_json(path.with_suffix(".json"), {"figure": "timeline", **facts, "ways": shares})


def way_of(async_ratio: int, multiplex: bool) -> str:
    """The name of a way to divide the time: sync, ahead or multiplexed."""
    return "multiplexed" if multiplex else "ahead" if async_ratio else "sync"


def phase_shares(spans: Sequence[Span]) -> dict[str, float]:
    """Of the steps' time: the share in which each phase goes on, and in which the device is idle or does both.

    Phases overlap, so shares may add up to more than 1. `seconds`: mean length of a step.

    >>> spans = [Span("step", 0, 10), Span("generate", 0, 4), Span("environment", 3, 6), Span("train", 5, 8)]
    >>> {name: round(value, 2) for name, value in phase_shares(spans).items() if value}
    {'seconds': 10.0, 'generate': 0.4, 'environment': 0.3, 'train': 0.3, 'idle': 0.3}
    """
    windows = union(s for s in spans if s.phase == STEP)
    steps = sum(s.phase == STEP for s in spans)
    whole = length(windows)
    if not whole:
        return {}
    during = {phase: common(union(s for s in spans if s.phase == phase), windows) for phase in PHASES}
    busy = common(union(s for s in spans if s.phase in DEVICE), windows)
    parts = {phase: length(stretches) / whole for phase, stretches in during.items()}
    both = length(common(during["generate"], during["train"])) / whole
    return {"seconds": whole / steps, **parts, "idle": 1 - length(busy) / whole, "generate and train": both}


Stretches = list[tuple[float, float]]  # in order, without overlap


def union(spans: Iterator[Span]) -> Stretches:
    """What these cover together.

    >>> union(iter([Span("a", 0, 2), Span("a", 1, 3), Span("a", 5, 6)]))
    [(0, 3), (5, 6)]
    """
    found: Stretches = []
    for _, begin, end in sorted(spans, key=lambda s: s.begin):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def common(one: Stretches, other: Stretches) -> Stretches:
    """What both cover.

    >>> common([(0, 3), (5, 6)], [(2, 5.5)])
    [(2, 3), (5, 5.5)]
    """
    pairs = ((max(a, c), min(b, d)) for a, b in one for c, d in other)
    return sorted((begin, end) for begin, end in pairs if begin < end)


def length(stretches: Stretches) -> float:
    return sum(end - begin for begin, end in stretches)

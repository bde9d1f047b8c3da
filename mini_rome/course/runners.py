"""Where a submission runs: a box of profile `grader`, or, said to be unsafe, a process of this machine.

Both give it a folder with its exercises.py and the allowed modules, fresh for every run, and return what it wrote.
"""

from __future__ import annotations

import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from mini_rome.course import wire
from mini_rome.course.image import GRADER_IMAGE
from mini_rome.course.process import Ended, run_capped
from mini_rome.errors import SandboxDead, SandboxError

SUBMISSION = "work/exercises.py"
OUTPUT = 4 << 20  # bytes that one run may write
# Python's own finders only: that of an editable install would find the modules that the box does not have.
START = (
    "import sys; sys.path.insert(0, {root!r} + '/lib'); "
    "sys.meta_path[:] = [f for f in sys.meta_path if f.__module__.startswith('_frozen_importlib')]; "
    "from mini_rome.course.harness import main; main()"
)
UNSAFE = (
    "--unsafe-local: submissions run as programs of this machine with your rights, files and network, under a limit "
    "of time and memory only; use it for files that you have read."
)


class Runner(ABC):
    """One submission at a time; a context manager."""

    trusting = False  # whether what one run tells a submission may help it in another job of that run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Give back what the runner holds."""

    @abstractmethod
    def run(self, files: Mapping[str, bytes], request: dict[str, Any], seconds: float) -> Ended:
        """Serve a request of harness.py in a fresh copy of `files`. SandboxError: the box failed, not the code."""


class Boxed(Runner):
    """A Docker box without network, kept for many runs and made equal to `files` before each."""

    def __init__(self) -> None:
        from mini_rome.sandbox.docker import DockerSandbox
        from mini_rome.sandbox.hardening import GRADER, GRADER_LIMITS

        self._start = lambda: DockerSandbox.start(GRADER_IMAGE, GRADER_LIMITS, "course", GRADER)
        self._box = self._start()

    def run(self, files: Mapping[str, bytes], request: dict[str, Any], seconds: float) -> Ended:
        for attempt in (1, 2):
            try:
                return self._run(files, request, seconds)
            except SandboxError:
                self._box.close()
                self._box = self._start()
                if attempt == 2:
                    raise
        raise AssertionError("unreachable")

    def _run(self, files: Mapping[str, bytes], request: dict[str, Any], seconds: float) -> Ended:
        from mini_rome.sandbox import initial_snapshot

        box = self._box
        box.observer = None  # a step of ours, not of an agent
        box.restore(initial_snapshot(files))
        payload = wire.dumps({**request, "path": f"/app/{SUBMISSION}"}).encode()
        command = f'OMP_NUM_THREADS=1 exec python3 -I -B -c "{START.format(root="/app")}"'
        result = box.exec(command, timeout=seconds, stdin=payload)
        if result.infra:
            raise SandboxDead(result.output or result.status)
        return Ended(result.raw, result.status, result.exit_code or 0, result.killed)

    def close(self) -> None:
        self._box.close()


class Local(Runner):
    """A process of this machine: no isolation. For one's own code (`check`), or where Docker is not to be had."""

    def __init__(self, trusting: bool = False) -> None:
        """trusting: see `Runner`."""
        self.trusting = trusting

    def run(self, files: Mapping[str, bytes], request: dict[str, Any], seconds: float) -> Ended:
        with tempfile.TemporaryDirectory(prefix="mini-rome-course-") as root:
            for name, data in files.items():
                path = Path(root, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            payload = wire.dumps({**request, "path": f"{root}/{SUBMISSION}"}).encode()
            words = [sys.executable, "-I", "-B", "-c", START.format(root=root)]
            return run_capped(words, seconds, OUTPUT, payload)

    def close(self) -> None:
        """Nothing is kept between runs."""

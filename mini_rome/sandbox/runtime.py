"""Folders of the host that native boxes may see: made for one episode each, gone with it, and with a run that dies.

    TMPDIR/mini-rome-run-<run>/            mode 0700: no other user of the host gets any further
        owner.json                         the run's labels, by which `gc` knows a dead owner's folder
        <box>/model.sock                   what one box sees, read-only: the folder of its socket

The reaper removes the run's folder when its owner is gone. Not in the paper.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mini_rome.errors import ConfigError

PREFIX, OWNER = "mini-rome-run-", "owner.json"
MAX_PATH = 80  # bytes of a folder's name: a socket's whole path may take 107

_lock = threading.Lock()


def run_folder(run: str) -> Path:
    """Where this run's folders are; the same in the run's reaper."""
    return Path(tempfile.gettempdir()) / f"{PREFIX}{run}"


@contextmanager
def box_folder(run: str, labels: Mapping[str, str]) -> Iterator[Path]:
    """An empty folder for one box. Raises ConfigError where TMPDIR is too long for sockets or the place is taken."""
    top = run_folder(run)
    if len(os.fsencode(top)) > MAX_PATH:
        raise ConfigError(f"TMPDIR={top.parent}: too long for the path of a socket; set TMPDIR=/tmp")
    with _lock:
        _make_top(top, labels)
        folder = top / secrets.token_hex(4)
        folder.mkdir()
    folder.chmod(0o755)  # whatever the umask: the box's agent is another user
    try:
        yield folder
    finally:
        with _lock:
            shutil.rmtree(folder, ignore_errors=True)  # the reaper may be at it
            if {path.name for path in _entries(top)} <= {OWNER}:
                remove(top)


def _make_top(top: Path, labels: Mapping[str, str]) -> None:
    try:
        top.mkdir(mode=0o700)
    except FileExistsError:
        if not _ours(top):
            raise ConfigError(f"{top} belongs to somebody else; remove it, or set TMPDIR") from None
    if not (top / OWNER).exists():
        (top / OWNER).write_text(json.dumps(dict(labels)))


def _entries(top: Path) -> list[Path]:
    try:
        return list(top.iterdir())
    except FileNotFoundError:
        return []


def _ours(top: Path) -> bool:
    """A real folder that is ours and closed to others."""
    try:
        info = os.lstat(top)
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077


def remove(top: Path) -> bool:
    """Remove a run's folder; False where there is none of ours."""
    if not _ours(top):
        return False
    shutil.rmtree(top, ignore_errors=True)  # two removers may meet
    return True


def owners() -> Iterator[tuple[Path, dict[str, str]]]:
    """(folder, labels) of every run of this user that left one here."""
    for top in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            found = json.loads((top / OWNER).read_text()) if _ours(top) else None
        except (OSError, ValueError):  # just made, or just removed
            continue
        if isinstance(found, dict):
            yield top, {str(key): str(value) for key, value in found.items()}


def check(folder: str | Path, run: str) -> None:
    """Raises ConfigError unless this is a folder of `box_folder` for this run that holds nothing but sockets."""
    path = Path(folder)
    good = path.parent == run_folder(run) and _ours(path.parent) and stat.S_ISDIR(os.lstat(path).st_mode)
    if not good or not all(stat.S_ISSOCK(os.lstat(entry).st_mode) for entry in path.iterdir()):
        raise ConfigError(f"a box may be given its own folder of a socket alone, not {folder}")

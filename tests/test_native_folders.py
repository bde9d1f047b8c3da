"""Folders of native boxes: what a killed run or a dead owner left goes, what others own stays."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile

import pytest
from test_reaper import ROOT, dead_pid, left, owner_labels, until

from mini_rome.errors import ConfigError
from mini_rome.sandbox import reaper, run_id, runtime
from mini_rome.sandbox.engine import engine

OWNER = """
import socket, sys, time
sys.path.insert(0, {root!r})
from mini_rome.sandbox import reaper, run_id, runtime
from mini_rome.sandbox.docker import DockerSandbox
from mini_rome.sandbox.hardening import native
reaper.ensure_reaper(run_id())
with runtime.box_folder(run_id(), reaper.labels(run_id(), "t", 60)) as folder:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "model.sock"))
    box = DockerSandbox.start(profile=native(folder))
    print(run_id(), flush=True)
    time.sleep(600)
"""


@pytest.mark.docker
def test_a_killed_trainer_leaves_no_container_no_folder_and_no_socket() -> None:
    code = OWNER.format(root=str(ROOT))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    run = process.stdout.readline().strip()
    top, client = runtime.run_folder(run), engine().client
    assert left(client, run) == 1 and list(top.glob("*/model.sock"))
    process.kill()
    process.wait()
    assert until(lambda: left(client, run) == 0 and not top.exists(), 10)


@pytest.mark.docker
def test_gc_removes_the_folders_of_dead_owners_and_no_others() -> None:
    dead, alive = (runtime.run_folder(f"gc{number}-{run_id()}") for number in (0, 1))
    for top, labels in ((dead, owner_labels("gc", dead_pid())), (alive, reaper.labels("gc", "t", 60))):
        top.mkdir(0o700)
        (top / "owner.json").write_text(json.dumps(labels))
    try:
        assert f"folder {dead}" in reaper.gc(dry_run=True) and dead.exists()
        assert f"folder {dead}" in reaper.gc()
        assert alive.exists() and not dead.exists()
    finally:
        assert runtime.remove(alive)


def test_a_folder_of_others_is_neither_used_nor_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # a socket's path has room for no more
        _neither_used_nor_removed(short, monkeypatch)


def _neither_used_nor_removed(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", folder)
    top = runtime.run_folder("r")
    top.mkdir(0o755)  # open to others: not one that we made
    with pytest.raises(ConfigError, match="belongs to somebody else"), runtime.box_folder("r", {}):
        pass
    assert not runtime.remove(top) and top.exists()
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "x" * 90)
    with pytest.raises(ConfigError, match="TMPDIR"), runtime.box_folder("r", {}):
        pass

"""Nothing of a run outlives it: a watching child, and `gc` for runs whose owner is gone.

The child sits in a session of its own and holds the read end of a pipe. End of file means that the parent is gone,
however it went (return, Ctrl-C, kill -9): it then removes what carries the run's label until two passes find nothing.
It also watches its parent's pid, so that a forked worker that keeps the pipe open does not keep the boxes. Covered:
containers, images, volumes and networks with our labels, the run's folder of sockets. Not covered: the death of this
child too (boxes then end by their TTL, or by `gc`). Not in the paper.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mini_rome.sandbox import runtime

if TYPE_CHECKING:
    import docker

RUN, PID, HOST, CREATED, TTL, TASK = (f"mini-rome.{key}" for key in ("run", "pid", "host", "created", "ttl", "task"))
PASS_GAP_S = 1.0  # between passes: a create that was under way when the parent died shows up in the second one
GIVE_UP_S = 600.0  # how long an engine that does not answer is asked again
POLL_S = 0.5  # how often the parent's pid is looked at
CLOCK_SLACK_S = 2.0

_children: dict[tuple[int, str], subprocess.Popen[bytes]] = {}  # (our pid, run) -> its reaper
_lock = threading.Lock()


def host_id() -> str:
    """This host and pid namespace: a pid means something only together with both.

    >>> host_id() == host_id() != ""
    True
    """
    return f"{os.uname().nodename}/{os.stat('/proc/self/ns/pid').st_ino}"


def labels(run: str, task: str, ttl_s: float) -> dict[str, str]:
    """The labels of everything that this process makes on an engine."""
    now, pid = f"{time.time():.3f}", str(os.getpid())
    return {RUN: run, PID: pid, HOST: host_id(), CREATED: now, TTL: f"{ttl_s:g}", TASK: task}


def ensure_reaper(run_id: str, docker_host: str | None = None) -> int:
    """Start this run's reaper unless it runs; its pid. `docker_host` is the engine's URL, None for the environment's.

    A forked child that makes boxes gets a reaper of its own.
    """
    with _lock:
        key = (os.getpid(), run_id)
        child = _children.get(key)
        if child is None or child.poll() is not None:
            child = _children[key] = _start(run_id, docker_host)
        return child.pid


def _start(run_id: str, docker_host: str | None) -> subprocess.Popen[bytes]:
    package = str(Path(__file__).resolve().parents[2])
    code = f"import sys; sys.path.insert(0, {package!r}); from mini_rome.sandbox.reaper import watch; watch()"
    return subprocess.Popen(
        [sys.executable, "-I", "-c", code, run_id, str(os.getpid()), docker_host or ""],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )


def _after_fork_in_child() -> None:
    """A forked child lets go of the pipes: end of file must mean that the parent itself is gone."""
    global _lock
    _lock = threading.Lock()
    for (pid, _), child in list(_children.items()):
        if pid != os.getpid() and child.stdin is not None:
            child.stdin.close()
            child.returncode = 0  # it is the parent's child: never waited for here
    _children.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def watch() -> None:
    """Body of the child: argv is run id, parent's pid, engine URL."""
    run, parent, host = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    for name in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    client = connect(host or None)
    if client is not None:
        gc(client=client)  # stale runs of this host, removed while the new one starts
    while os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], POLL_S)
        if readable and not os.read(0, 4096):
            break
    runtime.remove(runtime.run_folder(run))
    remove_run(run, lambda: connect(host or None))


def connect(docker_host: str | None = None) -> docker.DockerClient | None:
    """A client of the engine; None when it does not answer within 10 s."""
    import docker

    try:
        if docker_host:
            client = docker.DockerClient(base_url=docker_host, version="auto", timeout=10)
        else:
            client = docker.from_env(version="auto", timeout=10)
    except docker.errors.DockerException:
        return None
    return client


def remove_run(run: str, connection: Callable[[], docker.DockerClient | None], give_up_s: float = GIVE_UP_S) -> int:
    """Remove all that carries the run's label until two passes in a row find nothing; the number removed."""
    import docker
    import requests

    deadline, empty, removed = time.monotonic() + give_up_s, 0, 0
    client = connection()
    while empty < 2 and time.monotonic() < deadline:
        try:
            found = list(_labelled(client, f"{RUN}={run}")) if client is not None else None
            for _, item in found or ():
                removed += _remove(item)
            empty = empty + 1 if found == [] else 0
        except (docker.errors.DockerException, requests.exceptions.RequestException):
            client, empty = None, 0
        if empty < 2:
            time.sleep(PASS_GAP_S)
        client = client or connection()
    return removed


def _labelled(client: docker.DockerClient, label: str) -> Iterator[tuple[str, Any]]:
    """(kind and name, object) of all that carries `label`; containers first, since they hold the rest in use."""
    filters = {"label": label}
    for container in client.containers.list(all=True, filters=filters, sparse=True):
        yield f"container {container.attrs['Names'][0].lstrip('/')}", container
    for image in client.images.list(all=True, filters=filters):
        yield f"image {image.short_id}", image
    for volume in client.volumes.list(filters=filters):
        yield f"volume {volume.name}", volume
    for network in client.networks.list(filters=filters):
        yield f"network {network.name}", network


def _remove(item: Any) -> bool:
    """Remove one object by id; False when it was gone already or another remover has it in hand."""
    import docker

    kind = type(item).__name__
    try:
        if kind == "Network":
            item.remove()
        else:
            item.remove(force=True, **({"v": True} if kind == "Container" else {}))
    except docker.errors.NotFound:
        return False
    except docker.errors.APIError as error:
        if error.response is not None and error.response.status_code == 409:  # "removal is already in progress"
            return False
        raise
    return True


def gc(dry_run: bool = False, client: docker.DockerClient | None = None) -> list[str]:
    """Remove what runs of this host left whose owner is dead; the names. Labels decide, never names.

    Raises SandboxUnavailable when no engine answers.
    """
    from mini_rome.errors import SandboxUnavailable

    client = client or connect()
    if client is None:
        raise SandboxUnavailable("gc: no Docker engine answers; start Docker, or set DOCKER_HOST")
    stale = [(name, item) for name, item in _labelled(client, RUN) if is_stale(_labels_of(item))]
    folders = [folder for folder, owner in runtime.owners() if is_stale(owner)]
    if not dry_run:
        for _, item in stale:
            _remove(item)
        for folder in folders:
            runtime.remove(folder)
    return [*(name for name, _ in stale), *(f"folder {folder}" for folder in folders)]


def _labels_of(item: Any) -> dict[str, str]:
    attributes = item.attrs
    return attributes.get("Labels") or (attributes.get("Config") or {}).get("Labels") or {}


def is_stale(found: dict[str, str]) -> bool:
    """True when the labels name an owner on this host that is no more: no such pid, or a younger process has it."""
    if found.get(HOST) != host_id() or not found.get(PID, "").isdigit():
        return False
    started = started_at(int(found[PID]))
    try:
        created = float(found.get(CREATED, "inf"))
    except ValueError:
        return False
    return started is None or started > created + CLOCK_SLACK_S


def started_at(pid: int) -> float | None:
    """Unix time at which the process began, to 0.01 s; None when there is none, or only a zombie of it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[0] in "ZX":
        return None
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + int(fields[19]) / os.sysconf("SC_CLK_TCK")

"""The Docker engine: one shared client per process, and what to say when none answers."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass

import docker
import requests
from docker.errors import APIError, DockerException, NotFound

from mini_rome.errors import SandboxUnavailable
from mini_rome.sandbox import images

CONNECT_S = 3.0  # to answer at all
CALL_S = 30.0  # for one call of the API
PROBE_S = 0.7  # to say whether a box still runs, within a step's grace
GONE_S = 5.0  # for a removed container to be gone
POOL = 128  # HTTP connections: every box holds one
NETWORK_ERRORS = (requests.exceptions.RequestException, DockerException, OSError)

_engines: dict[tuple[int, str], Engine] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class State:
    """What the engine says of a container: running | paused | exited | gone | unknown (the engine did not answer)."""

    word: str
    exit_code: int | None = None


class Engine:
    """The clients of one engine: `client` for all calls, a second one with a short timeout for liveness."""

    def __init__(self, host: str):
        self.host = host
        self.client = _connect(host, CONNECT_S)
        self.client.api.timeout = CALL_S
        version = self.client.api._version
        self._probe = docker.APIClient(base_url=host, version=version, timeout=PROBE_S, tls=_tls(host))
        info = self.client.info()
        self.version = str(info.get("ServerVersion", "?"))
        self.runtime = "runsc" if "runsc" in info.get("Runtimes", {}) else None
        self._own_hosts: dict[str, bool] = {}
        self.quota_said = False  # whether the user was told that there is none
        self.quota = info.get("Driver") in ("btrfs", "zfs", "windowsfilter") or _has_project_quota(info)

    @property
    def line(self) -> str:
        """Engine and kernel boundary in a few words."""
        kernel = "kernel of its own (runsc)" if self.runtime else "kernel shared with the host (runc)"
        return f"engine {self.version} at {self.host}, {kernel}"

    def ensure(self, image: str) -> str:
        """The image's id. Raises ImageMissing naming the build command, SandboxUnavailable; never pulls."""
        try:
            return images.ensure(self.client, image)
        except (requests.exceptions.RequestException, DockerException) as error:
            raise unavailable(self.host, error) from None

    def own_hosts(self, image: str) -> bool:
        """Whether the image brings its own /etc/hosts, as its label says; asked once. Raises ImageNotFound."""
        if image not in self._own_hosts:
            found = self.client.api.inspect_image(image)["Config"]["Labels"] or {}
            self._own_hosts[image] = found.get(images.OWN_HOSTS) == "own"
        return self._own_hosts[image]

    def state(self, container: str) -> State:
        """What became of a container, within PROBE_S or so."""
        try:
            found = self._probe.inspect_container(container)["State"]
        except NotFound:
            return State("gone")
        except NETWORK_ERRORS:
            return State("unknown")
        if found.get("Paused"):
            return State("paused")
        return State("running") if found.get("Running") else State("exited", found.get("ExitCode"))

    def remove(self, container: str) -> None:
        """Kill and remove, paused or not, and wait until it is gone. Raises on an engine that does not answer."""
        deadline = time.monotonic() + GONE_S
        while time.monotonic() < deadline:
            try:
                self.client.api.remove_container(container, force=True, v=True)
            except NotFound:
                return
            except APIError as error:
                if error.status_code != 409:  # 409: its own auto-removal is under way
                    raise
            time.sleep(0.01)


def _has_project_quota(info: dict[str, object]) -> bool:
    status = dict(info.get("DriverStatus") or [])  # type: ignore[call-overload]
    return status.get("Backing Filesystem") == "xfs"


def engine_host() -> str:
    """URL of the engine: DOCKER_HOST, else the local socket."""
    return os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"


def _tls(host: str) -> object:
    return docker.utils.kwargs_from_env().get("tls", False) if host.startswith(("tcp", "https")) else False


def _connect(host: str, timeout: float) -> docker.DockerClient:
    try:
        client = docker.DockerClient(
            base_url=host, version="auto", timeout=timeout, max_pool_size=POOL, tls=_tls(host)
        )
        client.ping()
    except NETWORK_ERRORS as error:
        raise SandboxUnavailable(_advice(host, error)) from None
    return client


def _advice(host: str, error: Exception) -> str:
    """Tried what, failed why, three ways on."""
    return (
        f"no Docker engine at {host}: {_reason(error)}\n"
        "  1. start it: `sudo systemctl start docker`, or `dockerd &`  2. get access: `sudo usermod -aG docker $USER`"
        " and log in again, or set DOCKER_HOST\n"
        "  3. go on without: `--sandbox sim` (simulated: no isolation, no Python inside)"
    )


def _reason(error: Exception) -> str:
    """The cause at the bottom of the SDK's chain of exceptions, in plain words."""
    text = str(error)
    for sign, words in (
        ("FileNotFoundError", "no such socket: is Docker installed and running?"),
        ("PermissionError", "permission denied on the socket"),
        ("ConnectionRefusedError", "the socket is there but nothing listens"),
        ("Connection refused", "nothing listens there"),
        ("Name or service not known", "no such host"),
        ("Temporary failure in name resolution", "no such host"),
        ("Read timed out", f"no answer within {CONNECT_S:g} s"),
        ("ConnectTimeout", f"no answer within {CONNECT_S:g} s"),
    ):
        if sign in text:
            return words
    return text.splitlines()[0][:200] if text else type(error).__name__


def unavailable(host: str, error: Exception) -> SandboxUnavailable:
    """The error for an engine that answered before and does not now."""
    return SandboxUnavailable(_advice(host, error))


def engine() -> Engine:
    """The engine of this process, connected when first asked for; another one after a fork or for another host.

    Raises SandboxUnavailable within about 3 s when none answers.
    """
    key = (os.getpid(), engine_host())
    with _lock:
        if key not in _engines:
            _engines[key] = Engine(key[1])
        return _engines[key]


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)

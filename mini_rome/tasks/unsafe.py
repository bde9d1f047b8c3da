"""Settings of a task or compose file that would break the isolation: the one list, asked at load.

Covered: privilege, the host's namespaces, binds and devices, the engine's socket, memory that files could outgrow; at
any depth, under any spelling of a key. Not covered: what a Dockerfile does to its own image. Not in the paper.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from mini_rome.errors import ConfigError

HEADROOM_MB = 64  # memory that processes need beside what tmpfs files take
_FLAGS = ("privileged", "userns_host", "oom_kill_disable")
_HOST_MODES = frozenset(
    "network network_mode pid pid_mode ipc ipc_mode uts uts_mode userns userns_mode cgroupns cgroup".split()
)
_LISTS = frozenset(
    "cap_add binds bind volumes mounts devices device_requests device_cgroup_rules sysctls security_opt volumes_from "
    "cgroup_parent group_add".split()
)
_FREE_FORM = ("metadata", "task")  # nothing here reaches an engine


def unsafe_settings(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Settings that break the isolation, as `key = value`, at any depth of a task or compose file.

    >>> list(unsafe_settings({"environment": {"privileged": True, "network_mode": "host", "cpus": 2}}))
    ['environment.privileged = True', "environment.network_mode = 'host'"]
    """
    for key, value in table.items():
        name, word = f"{prefix}{key}", str(key).lower().replace("-", "_")
        if word == "env" or (word in _FREE_FORM if not prefix else word in ("environment", "labels")):
            continue
        if word in _FLAGS and value not in (False, "false", 0):
            yield f"{name} = {value!r}"
        elif word in _HOST_MODES and str(value).strip().lower().startswith(("host", "container:")):
            yield f"{name} = {value!r}"
        elif word in _LISTS and value not in ([], {}, "", None):
            yield f"{name} = {value!r}"
        elif isinstance(value, str):
            yield from _socket(name, value)
        elif isinstance(value, Mapping):
            yield from unsafe_settings(value, f"{name}.")
        elif isinstance(value, list):
            for item in value:
                yield from unsafe_settings(item, f"{name}.") if isinstance(item, Mapping) else _socket(name, item)


def _socket(name: str, item: object) -> Iterator[str]:
    if isinstance(item, str) and "docker.sock" in item:
        yield f"{name} = {item!r}"


def outgrown(tmpfs_mb: int, memory_mb: int) -> Iterator[str]:
    """A work dir in memory that could outgrow the memory limit turns a full disk into an out-of-memory kill."""
    if tmpfs_mb + HEADROOM_MB > memory_mb:
        yield f"environment.tmpfs_mb = {tmpfs_mb} + {HEADROOM_MB} headroom > memory_mb = {memory_mb}"


def compose_settings(environment: Path) -> Iterator[str]:
    """The unsafe settings of every compose file beside the Dockerfile."""
    for path in sorted([*environment.glob("*compose*.y*ml")]):
        try:
            table = yaml.safe_load(path.read_text("utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: {error}") from None
        if isinstance(table, Mapping):
            yield from (f"{path.name}: {setting}" for setting in unsafe_settings(table))

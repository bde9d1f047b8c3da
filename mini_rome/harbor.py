"""Task folders in the Harbor / Terminal-Bench-Pro format: `load` reads one and refuses what breaks the isolation.

    <task>/  task.toml  instruction.md  environment/Dockerfile  tests/test.sh  solution/solve.sh

Covered: both generations of task.toml, a docker-compose file beside the Dockerfile. Not covered: running it (verify),
building its image (images). Not in the paper, whose benchmark uses this format.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from mini_rome.errors import ConfigError, UnsafeTask

HEADROOM_MB = 64  # memory that processes need beside what tmpfs files take
_KNOWN = {
    "": {"schema_version", "version", "task", "metadata", "verifier", "agent", "environment", "solution"},
    "task": {"name", "description", "authors", "keywords"},
    "verifier": {"timeout_sec", "env"},
    "agent": {"timeout_sec"},
    "environment": {
        "build_timeout_sec",
        "docker_image",
        "cpus",
        "memory_mb",
        "storage_mb",
        "gpus",
        "allow_internet",
        "network_mode",
        "env",
        "tmpfs_mb",
        "memory",
        "storage",
        "background",
    },
    "solution": {"env"},
}
_UNITS = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}  # in MB


@dataclass(frozen=True)
class TaskFolder:
    """One task as its folder says. Seconds and MB as in the file; tests stay on the host until verification."""

    folder: Path
    name: str
    instruction: str
    docker_image: str | None = None  # else environment/Dockerfile is built
    cpus: float = 1.0
    memory_mb: int = 2048
    storage_mb: int = 10240
    tmpfs_mb: int = 64  # the work dir, in memory; the file's storage_mb is for a disk that our boxes do not have
    agent_timeout_s: float = 600.0
    verifier_timeout_s: float = 600.0
    verifier_env: Mapping[str, str] = field(default_factory=dict)
    environment_env: Mapping[str, str] = field(default_factory=dict)
    allow_internet: bool = False
    background: str = "kill"
    metadata: Mapping[str, Any] = field(default_factory=dict)
    unsafe: tuple[str, ...] = ()  # keys that only --allow-unsafe let through: every result of the run carries them
    notes: tuple[str, ...] = ()  # unknown keys, old names

    @property
    def tests(self) -> dict[str, bytes]:
        """{path under tests/: contents}, read when the agent is done."""
        root = self.folder / "tests"
        return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def load(folder: str | Path, allow_unsafe: bool = False) -> TaskFolder:
    """Read a task folder. Raises ConfigError (missing or malformed, with its file), UnsafeTask naming the keys."""
    root = Path(folder)
    path = root / "task.toml"
    try:
        table = tomllib.loads(path.read_text("utf-8"))
        instruction = (root / "instruction.md").read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    task = _build(root, table, instruction)
    unsafe = [*unsafe_settings(table), *_outgrown(task), *_compose_settings(root / "environment")]
    if unsafe and not allow_unsafe:
        raise UnsafeTask(f"{path}: {'; '.join(unsafe)}: it would break the isolation; to run it: --allow-unsafe")
    return replace(task, unsafe=tuple(unsafe))


def _build(root: Path, table: dict[str, Any], instruction: str) -> TaskFolder:
    path, environment = root / "task.toml", _table(table, "environment", root)
    verifier, agent = _table(table, "verifier", root), _table(table, "agent", root)
    numbers: dict[str, Any] = {
        "cpus": _number(path, environment, "cpus", 1.0),
        "memory_mb": _size(path, environment, "memory", 2048),
        "storage_mb": _size(path, environment, "storage", 10240),
        "tmpfs_mb": int(_number(path, environment, "tmpfs_mb", 64)),
        "agent_timeout_s": _number(path, agent, "timeout_sec", 600.0),
        "verifier_timeout_s": _number(path, verifier, "timeout_sec", 600.0),
    }
    image = environment.get("docker_image")
    if image is None and not (root / "environment" / "Dockerfile").is_file():
        raise ConfigError(f"{root}: neither environment.docker_image in task.toml nor environment/Dockerfile")
    return TaskFolder(
        folder=root,
        name=_table(table, "task", root).get("name") or root.resolve().name,
        instruction=instruction,
        docker_image=image,
        verifier_env=_strings(path, verifier),
        environment_env=_strings(path, environment),
        allow_internet=bool(environment.get("allow_internet", False)),
        background=environment.get("background", "kill"),
        metadata=_table(table, "metadata", root),
        notes=tuple(_notes(path, table)),
        **numbers,
    )


def _table(table: Mapping[str, Any], key: str, root: Path) -> dict[str, Any]:
    value = table.get(key, {})
    if not isinstance(value, dict):
        path = root / "task.toml"
        raise ConfigError(f"{path}:{line_of(path, key)}: {key} must be a table, not {value!r}")
    return value


def _number(path: Path, table: Mapping[str, Any], key: str, default: float) -> float:
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise ConfigError(f"{path}:{line_of(path, key)}: {key} = {value!r} must be a positive number")
    return value


def _size(path: Path, table: Mapping[str, Any], key: str, default: int) -> int:
    """MB from `memory_mb`, or from the older `memory = "2G"`."""
    old = table.get(key)
    if old is None:
        return int(_number(path, table, f"{key}_mb", default))
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])i?B?", str(old), re.IGNORECASE)
    if match is None:
        raise ConfigError(f'{path}:{line_of(path, key)}: {key} = {old!r} is no size such as "2G"')
    return max(1, round(float(match[1]) * _UNITS[match[2].upper()]))


def _strings(path: Path, table: Mapping[str, Any]) -> dict[str, str]:
    env = table.get("env", {})
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
        raise ConfigError(f"{path}:{line_of(path, 'env')}: env must be a table of strings")
    return env


def line_of(path: Path, key: str) -> int:
    """Line of the first `key =` or `[key]`; 1 when it is written otherwise."""
    pattern = re.compile(rf"\s*\[?\s*[\"']?(?:[\w-]+\.)*{re.escape(key)}[\"']?\s*[\]=]")
    lines = path.read_text("utf-8").splitlines()
    return next((number for number, line in enumerate(lines, 1) if pattern.match(line)), 1)


def _notes(path: Path, table: Mapping[str, Any]) -> Iterator[str]:
    for section, known in _KNOWN.items():
        for key in sorted(set(table if not section else table.get(section, {})) - known):
            yield f"{path}:{line_of(path, key)}: unknown key {f'{section}.{key}' if section else key}"
    for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
        if old in table.get("environment", {}):
            yield f"{path}:{line_of(path, old)}: environment.{old} is an old name of {new}"


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


def _outgrown(task: TaskFolder) -> Iterator[str]:
    """A work dir in memory that could outgrow the memory limit turns a full disk into an out-of-memory kill."""
    if task.tmpfs_mb + HEADROOM_MB > task.memory_mb:
        yield f"environment.tmpfs_mb = {task.tmpfs_mb} + {HEADROOM_MB} headroom > memory_mb = {task.memory_mb}"


def _compose_settings(environment: Path) -> Iterator[str]:
    for path in sorted([*environment.glob("*compose*.y*ml")]):
        try:
            table = yaml.safe_load(path.read_text("utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: {error}") from None
        if isinstance(table, Mapping):
            yield from (f"{path.name}: {setting}" for setting in unsafe_settings(table))

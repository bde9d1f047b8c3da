"""Task folders in the Harbor / Terminal-Bench-Pro format: `load` reads one and refuses what breaks the isolation.

    <task>/  task.toml  instruction.md  environment/Dockerfile  tests/test.sh  solution/solve.sh

Covered: both generations of task.toml, a docker-compose file beside the Dockerfile, trees of which some folders are
broken. Not covered: a task's image and box (folders), its verdict (verify_fresh). Not in the paper, whose benchmark
uses this format.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mini_rome.errors import ConfigError, UnsafeTask
from mini_rome.tasks.unsafe import compose_settings, outgrown, unsafe_settings

_KNOWN = {
    "": {"schema_version", "version", "task", "metadata", "verifier", "agent", "environment", "solution"},
    "task": {"name", "description", "authors", "keywords"},
    "verifier": {"timeout_sec", "env", "network_mode"},
    "agent": {"timeout_sec", "network_mode"},
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
_NETWORKS = {"none": False, "no-network": False, "public": True, "bridge": True, "allowlist": True}
# What fetches something from elsewhere in a script; a server on the box itself is no network.
_FETCHES = re.compile(r"\b(apt-get|apt|curl|wget|pip3?|uvx?|npm|git\s+clone|conda)\b")
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
    solution_env: Mapping[str, str] = field(default_factory=dict)
    build_timeout_s: float = 600.0
    agent_network: bool = False  # what the file asks for; our boxes have none
    verifier_network: bool = False  # likewise: only --verifier-network gives it
    background: str = "kill"
    metadata: Mapping[str, Any] = field(default_factory=dict)
    unsafe: tuple[str, ...] = ()  # keys that only --allow-unsafe let through: every result of the run carries them
    notes: tuple[str, ...] = ()  # unknown keys, old names

    @property
    def domain(self) -> str:
        return str(self.metadata.get("category", "unknown"))

    @property
    def difficulty(self) -> str:
        return str(self.metadata.get("difficulty", "unknown"))

    @property
    def inputs(self) -> tuple[str, ...] | None:
        """Paths under /app that a solution must leave as they are; None where the file does not say."""
        names = self.metadata.get("inputs")
        return None if names is None else tuple(str(name).removeprefix("/app/").rstrip("/") for name in names)

    @property
    def tests(self) -> dict[str, bytes]:
        """{path under tests/: contents}, read when the agent is done."""
        root = self.folder / "tests"
        return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def load(folder: str | Path, allow_unsafe: bool = False) -> TaskFolder:
    """Read a task folder. Raises ConfigError (missing or malformed, with its file), UnsafeTask naming the keys."""
    root = Path(folder)
    path = root / "task.toml"
    text, instruction = _text(path), _text(root / "instruction.md")
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        raise ConfigError(f"{path}:{line[1] if line else len(text.splitlines())}: {error}") from None
    if not instruction.strip():
        raise ConfigError(f"{root / 'instruction.md'}: is empty")
    if not (root / "tests" / "test.sh").is_file():
        raise ConfigError(f"{root / 'tests' / 'test.sh'}: missing, so that nothing could be judged")
    task = _build(root, table, instruction)
    unsafe = [
        *unsafe_settings(table),
        *outgrown(task.tmpfs_mb, task.memory_mb),
        *compose_settings(root / "environment"),
    ]
    if unsafe and not allow_unsafe:
        raise UnsafeTask(f"{path}: {'; '.join(unsafe)}: it would break the isolation; to run it: --allow-unsafe")
    return replace(task, unsafe=tuple(unsafe))


def _text(path: Path) -> str:
    """A UTF-8 file, byte order mark or not. Raises ConfigError with the line that is in another encoding."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{path}:{line}: not UTF-8 (byte 0x{error.object[error.start]:02x}): save the file as UTF-8"
        ) from None


@dataclass(frozen=True)
class Broken:
    """A folder that could not be loaded, and why."""

    folder: Path
    error: str


def load_tree(root: str | Path, allow_unsafe: bool = False) -> tuple[list[TaskFolder], list[Broken]]:
    """The tasks of one folder, or of a tree (at its root, or under tasks/), by name; and those that are broken.

    Raises ConfigError where there is no task at all, or two share a name.
    """
    tasks, broken = [], []
    for folder in task_folders(Path(root)):
        try:
            tasks.append(load(folder, allow_unsafe))
        except (ConfigError, UnsafeTask) as error:
            broken.append(Broken(folder, str(error)))
    names: dict[str, Path] = {}
    for task in tasks:
        if (other := names.setdefault(task.name, task.folder)) != task.folder:
            raise ConfigError(f"{task.folder} and {other} are both named {task.name!r}: rename one in its task.toml")
    return tasks, broken


def task_folders(root: Path) -> list[Path]:
    """Folders that are meant as tasks: with a task.toml, or with an instruction beside tests."""
    if not root.is_dir():
        raise ConfigError(f"{root}: no such folder of tasks")
    if _is_task(root):
        return [root]
    for place in (root, root / "tasks"):
        if place.is_dir() and (found := sorted(path for path in place.iterdir() if _is_task(path))):
            return found
    raise ConfigError(f"{root}: no task folder there or under {root / 'tasks'} (a task has a task.toml)")


def _is_task(path: Path) -> bool:
    if not path.is_dir() or path.name.startswith(("_", ".")):
        return False
    return (path / "task.toml").exists() or ((path / "instruction.md").exists() and (path / "tests").exists())


def fetches(task: TaskFolder) -> list[str]:
    """Lines of the test scripts that need the network, as `file:line: text`: a stock test.sh installs its tools.

    They fail in a verifier without network, and the verdict is then a verifier error.
    """
    found = []
    for path in sorted((task.folder / "tests").rglob("*.sh")):
        for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1):
            code = line.split("#")[0] if line.lstrip().startswith("#") else line
            if _FETCHES.search(code) and not re.search(r"localhost|127\.0\.0\.1", code):
                found.append(f"{path}:{number}: {code.strip()[:80]}")
    return found


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
        "build_timeout_s": _number(path, environment, "build_timeout_sec", 600.0),
    }
    everywhere = bool(environment.get("allow_internet", False)) or _network(path, environment, False)
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
        solution_env=_strings(path, _table(table, "solution", root)),
        agent_network=_network(path, agent, everywhere),
        verifier_network=_network(path, verifier, everywhere),
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


def _network(path: Path, table: Mapping[str, Any], default: bool) -> bool:
    """The policy of one phase; host and container modes are refused elsewhere, as unsafe."""
    mode = table.get("network_mode")
    if mode is None or str(mode).lower().startswith(("host", "container:")):
        return default
    if mode not in _NETWORKS:
        known = ", ".join(_NETWORKS)
        raise ConfigError(f"{path}:{line_of(path, 'network_mode')}: network_mode = {mode!r}: choose from {known}")
    return _NETWORKS[mode]


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
    if table.get("environment", {}).get("allow_internet"):
        yield f"{path}:{line_of(path, 'allow_internet')}: asks for the network, which the agent's box never has"

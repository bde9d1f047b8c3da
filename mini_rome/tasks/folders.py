"""Task folders at work: the image of one, the state its agent finds, and the environment of an episode.

The image is built without network, from bases that are on the engine, and tagged by the content of environment/ and
the ids of its bases: the same folder is built once. A box covers /app with its work dir, so what the image holds
there is read out and restored at the start. Not in the paper.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import tarfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from docker.errors import APIError, BuildError, ImageNotFound, NotFound
from requests.exceptions import RequestException

from mini_rome.env import Env, Info
from mini_rome.errors import ConfigError, SandboxError, SnapshotRefused
from mini_rome.sandbox import Pool, Sandbox, images, reaper, run_id
from mini_rome.sandbox.base import DEFAULT_ENV
from mini_rome.sandbox.docker import DockerSandbox
from mini_rome.sandbox.engine import engine
from mini_rome.sandbox.hardening import AGENT, ROOT_TASK
from mini_rome.sandbox.tree import Entry, entries_of, snapshot_of
from mini_rome.tasks.harbor import TaskFolder
from mini_rome.types import Snapshot, StepResult, Task, Verdict
from mini_rome.verify import FRESH
from mini_rome.verify_fresh import task_limits, verify_fresh, verify_in_place

if TYPE_CHECKING:
    import docker

MAX_TURNS = 50  # responses of one episode; the paper's tasks are open-ended
RUN_S = 300.0  # a solution, at most, and never more than the task's own limit
LOG_LINES = 20  # of a build that failed


def image_of(task: TaskFolder) -> str:
    """The id of the task's image, built if need be.

    Raises ImageMissing for an image or a base that is not on the engine, SandboxError with the log's end for a build
    that fails.
    """
    client = engine().client
    if task.docker_image is not None:
        return images.ensure(client, task.docker_image)
    context = task.folder / "environment"
    bases = [images.ensure(client, base) for base in base_images((context / "Dockerfile").read_text("utf-8"))]
    tag = image_tag(task.name, bases, context)
    try:
        return client.images.get(tag).id
    except ImageNotFound:
        return _build(client, task, context, tag)


def image_tag(name: str, bases: list[str], context: Path) -> str:
    """`mini-rome/task-NAME:HASH` of the ids of the bases and every path, mode and byte under environment/."""
    digest = hashlib.sha256("\0".join(bases).encode())
    for path in sorted(context.rglob("*")):
        kind = "x" if path.is_file() and path.stat().st_mode & 0o100 else "-"
        digest.update(f"\0{path.relative_to(context)}\0{kind}\0".encode())
        digest.update(path.read_bytes() if path.is_file() else b"")
    return f"mini-rome/task-{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}:{digest.hexdigest()[:12]}"


def base_images(dockerfile: str) -> list[str]:
    """What a Dockerfile builds on, arguments resolved to their defaults, its own stages left out.

    >>> base_images("ARG BASE=mini-rome/tools:latest\\nFROM ${BASE} AS a\\nFROM a\\nFROM scratch")
    ['mini-rome/tools:latest']
    """
    arguments: dict[str, str] = {}
    stages, found = {"scratch"}, []
    for line in dockerfile.splitlines():
        words = line.split()
        if len(words) > 1 and words[0].upper() == "ARG":
            name, _, value = words[1].partition("=")
            arguments[name] = value.strip("\"'")
        elif len(words) > 1 and words[0].upper() == "FROM":
            words = [word for word in words[1:] if not word.startswith("--")]
            image = re.sub(r"\$\{?(\w+)\}?", lambda match: arguments.get(match[1], match[0]), words[0])
            if image not in stages:
                found.append(image)
            if len(words) == 3:
                stages.add(words[2])
    return found


def _build(client: docker.DockerClient, task: TaskFolder, context: Path, tag: str) -> str:
    try:
        image, _ = client.images.build(
            path=str(context), tag=tag, rm=True, forcerm=True, network_mode="none", timeout=int(task.build_timeout_s)
        )
    except BuildError as error:
        log = "".join(str(part.get("stream") or part.get("error") or "") for part in error.build_log)
        said = "\n".join(f"  {line}" for line in log.strip().splitlines()[-LOG_LINES:])
        raise SandboxError(
            f"{context / 'Dockerfile'}: the build failed; its log ends:\n{said}\nIt ran without network. "
            f"Where a step needs one: docker build -t {tag} {context}"
        ) from None
    except (APIError, RequestException) as error:
        raise SandboxError(f"{context / 'Dockerfile'}: the build failed: {error}") from error
    return image.id


@cache
def _archive(image: str) -> tuple[bytes, tuple[tuple[str, str], ...]]:
    """(tar of the image's /app, its environment variables)."""
    client = engine().client
    labels = reaper.labels(run_id(), "", 600.0)
    try:
        container = client.containers.create(image, command=["true"], network_mode="none", labels=labels)
        try:
            variables = container.image.attrs["Config"].get("Env") or []
            raw = b"".join(container.get_archive("/app")[0])
        except NotFound:
            raw = b""
        finally:
            container.remove()
    except (APIError, RequestException) as error:
        raise SandboxError(f"{image}: its /app cannot be read: {error}") from error
    pairs = (variable.partition("=") for variable in variables)
    return raw, tuple((name, value) for name, _, value in pairs if name not in DEFAULT_ENV)


def initial_state(task: TaskFolder, image: str) -> Snapshot:
    """What the agent finds: the image's own /app, and the variables of the image and of the task.

    Raises ConfigError where /app holds what no box may: special files, too much.
    """
    raw, variables = _archive(image)
    try:
        entries = [_inside(entry) for entry in entries_of(raw)] if raw else [Entry(".", "d", 0o755)]
    except (SnapshotRefused, tarfile.TarError) as error:
        raise ConfigError(f"{task.folder}: the image's /app cannot be the work dir: {error}") from None
    return snapshot_of(entries, env={**dict(variables), **task.environment_env})


def _inside(entry: Entry) -> Entry:
    """An entry of an archive of /app, from /app."""
    path = entry.path.removeprefix("app").removeprefix("/") or "."
    return replace(entry, path=path, target=entry.target.removeprefix("app/") if entry.kind == "h" else entry.target)


def run_solution(task: TaskFolder, box: Sandbox, script: str = "solve.sh") -> StepResult:
    """Bring solution/ into /tmp of a box, run one script of it as the agent, and take it away again.

    Raises ConfigError where the task has no such script.
    """
    root = task.folder / "solution"
    if not (root / script).is_file():
        raise ConfigError(f"{root / script}: missing")
    for path in sorted(root.rglob("*")):
        if path.is_file():
            box.write(f"/tmp/solution/{path.relative_to(root)}", path.read_bytes(), 0o755)
    exports = "".join(f"export {name}={shlex.quote(value)}; " for name, value in task.solution_env.items())
    return box.exec(f"{exports}bash /tmp/solution/{script}; code=$?; rm -rf /tmp/solution; exit $code", RUN_S)


def as_task(folder: TaskFolder) -> Task:
    """What a trajectory needs to know of a folder; it has no expert and no check on the host."""
    return Task(
        name=folder.name, family="folder", domain=folder.domain, instruction=folder.instruction, files={}, expert=(),
        check=lambda files: Verdict(None, "a task folder is judged by its own tests"), split="test",
    )  # fmt: skip


class FolderEnv(Env):
    """One task folder in a box of its own image. Docker only."""

    def __init__(
        self, folder: TaskFolder, max_turns: int = MAX_TURNS, network: bool = False, in_place: bool = False
    ) -> None:
        """network: for the verifier's container alone. in_place: the agent is root and is judged in its own box, for
        stock tasks that change /etc, packages or services; the verdict is labelled and never trained on."""
        self.folder, self.network, self.in_place = folder, network, in_place
        self.image = image_of(folder)
        self.initial = initial_state(folder, self.image)
        super().__init__(as_task(folder), Pool("docker", self.image, size=1, make_box=self._start), max_turns)

    def _start(self) -> Sandbox:
        profile = ROOT_TASK if self.in_place else AGENT
        limits = task_limits(self.folder)
        return DockerSandbox.start(self.image, limits, self.folder.name, profile, self.folder.unsafe)

    def reset(self, seed: int | None = None, start: Snapshot | None = None, turns: int = 0) -> tuple[str, Info]:
        return super().reset(seed, start or self.initial, turns)

    def _verify(self) -> Verdict:
        box = self.box
        if self.in_place and isinstance(box, DockerSandbox):
            return verify_in_place(self.folder, box)
        try:
            box.sweep()
            snapshot = box.snapshot()
        except SnapshotRefused as error:
            return Verdict(0.0, f"the work dir cannot be judged: {error}", FRESH)
        except SandboxError as error:
            return Verdict(None, f"infra_error: {error}", FRESH)
        box.close()  # nothing of the agent is left while its work is judged
        return verify_fresh(self.folder, snapshot, self.image, network=self.network)

    def close(self) -> None:
        super().close()
        self._pool.close()

"""Which tasks: by name (`FAMILY-kK-SPLIT-SEED`, which every instance of a family carries), or many at once."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mini_rome.errors import ConfigError
from mini_rome.families import DRILLS, FAMILIES, get_family
from mini_rome.tasks.harbor import TaskFolder
from mini_rome.types import Split, Task

SPLITS: tuple[Split, ...] = ("train", "validation", "test")  # `private` has no public names
GROUPS = {"retail": "tool-use", "shop": "general"}  # the paper's three groups of benchmarks; all else is terminal
SHIPPED = Path(__file__).resolve().parents[2] / "sandboxes" / "tasks"  # of a checkout
MIN_SECRET = 16  # bytes: fewer could be guessed
_NAME = re.compile(rf"(?P<family>.+)-k(?P<chunks>\d+)-(?P<split>{'|'.join(SPLITS)})-(?P<seed>\d+)")


def find_task(name: str, folders: Sequence[str] = ()) -> Task:
    """The instance of this name; a bare family means its test instance 0 with K = 4.

    folders: names of task folders that the error lists, where the name is none.

    >>> find_task("notes-k3-train-5").name
    'notes-k3-train-5'
    >>> find_task("notes").name
    'notes-k4-test-0'
    """
    if name in {**FAMILIES, **DRILLS}:
        return get_family(name).make(seed=0, chunks=4, split="test")
    match = _NAME.fullmatch(name)
    if match is None:
        raise ConfigError(
            f"task {name!r} is unknown: name a family ({', '.join([*FAMILIES, *DRILLS])}) or an instance, "
            f"FAMILY-kK-SPLIT-SEED, for example {next(iter(FAMILIES))}-k8-test-0"
            + (f", or a task folder: {', '.join(folders)}." if folders else ".")
        )
    split = next(split for split in SPLITS if split == match["split"])
    return get_family(match["family"]).make(int(match["seed"]), int(match["chunks"]), split)


@dataclass(frozen=True)
class Item:
    """One task of an evaluation, of either kind, under the name that its rows carry."""

    name: str
    task: Task
    difficulty: str
    folder: TaskFolder | None = None

    @property
    def group(self) -> str:
        return GROUPS.get(self.task.family, "terminal")

    @property
    def language(self) -> str:
        return self.task.language


@dataclass
class TaskChoice:
    """Which instances of the families: `n` in all, taken in turn from every family and horizon.

    With a secret they come from the private split, which no public seed reaches, at seeds that are a keyed hash
    (HMAC-SHA256) of family, horizon and number: nobody without the secret can make, or train on, the same instances.
    """

    families: Sequence[str] = ("notes",)
    chunks: Sequence[int] = (4,)
    n: int = 200
    split: Split = "test"
    secret: bytes | None = None

    def __post_init__(self) -> None:
        if self.secret is not None and len(self.secret) < MIN_SECRET:
            raise ConfigError(f"--secret-seed: {len(self.secret)} bytes could be guessed; at least {MIN_SECRET}")

    @property
    def where(self) -> str:
        return self.split if self.secret is None else "private"

    @property
    def fingerprint(self) -> str | None:
        """Tells two secrets apart without giving either away."""
        return None if self.secret is None else hmac.digest(self.secret, b"fingerprint", "sha256").hex()[:16]

    def tasks(self) -> list[Task]:
        """The instances; the first ones of a longer list are the list of a shorter one."""
        if self.families and self.n < 1:
            raise ConfigError(f"--n {self.n}: at least one episode is needed")
        kinds = [(name, chunks) for chunks in self.chunks for name in self.families]
        picked = [(*kinds[index % len(kinds)], index // len(kinds)) for index in range(self.n if kinds else 0)]
        return [self._make(name, chunks, number) for name, chunks, number in picked]

    def _make(self, name: str, chunks: int, number: int) -> Task:
        family = get_family(name)
        if self.secret is None:
            return family.make(number, chunks, self.split)
        keyed = hmac.new(self.secret, f"{name}/{chunks}/{number}".encode(), hashlib.sha256).digest()
        task = family.make(int.from_bytes(keyed[:8], "big"), chunks, "private")
        return replace(task, name=f"{name}-k{chunks}-private-#{number}", seed=number)  # the real seed stays here

    def items(self) -> list[Item]:
        """The instances as an evaluation takes them, as hard as they are long."""
        return [Item(task.name, task, difficulty_of(task.chunks)) for task in self.tasks()]


def difficulty_of(chunks: int) -> str:
    """A horizon in the words of task folders."""
    return "easy" if chunks <= 4 else "medium" if chunks <= 8 else "hard"


def read_secret(path: str | Path) -> bytes:
    """The secret of the held-back split, from a file: an option's value would be in every record of the command."""
    try:
        return Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"--secret-seed {path}: {error.strerror}; name a file that holds the secret") from None

"""From the staff version to what students get: skeletons by ast, zips whose bytes depend on nothing but the files."""

from __future__ import annotations

import ast
import hashlib
import zipfile
from pathlib import Path

from mini_rome.course.paper import PUBLIC_SEED, make_paper, snapshot_text
from mini_rome.errors import ConfigError

BODY = "raise NotImplementedError"
SHIPPED = ("given.py", "handout.ipynb", "snapshots.json")
TEST_FILE = '''\
"""The public tests, in this process so that a debugger works: `pytest`. Points: `mini-rome course check .`"""

from pathlib import Path

import exercises
import pytest

from mini_rome.course.student import names, verify

FOLDER = Path(__file__).parent


@pytest.mark.parametrize("name", names(FOLDER))
def test_exercise(name: str) -> None:
    verify(FOLDER, exercises, name)
'''


def skeleton(source: str, allowed: tuple[str, ...]) -> str:
    """The student's version: signatures, docstrings, comments and layout kept, every body one line that raises.

    Imports of mini_rome go unless the assignment allows the module: they would name the solution.

    >>> print(skeleton('def f(x):\\n    "Twice x."\\n    return 2 * x\\n', ()), end="")
    def f(x):
        "Twice x."
        raise NotImplementedError
    """
    lines = source.splitlines(keepends=True)
    for node in reversed(ast.parse(source).body):  # from the end, so that line numbers before it stay right
        if isinstance(node, ast.FunctionDef):
            has_doc = ast.get_docstring(node) is not None
            first = node.body[1] if has_doc and len(node.body) > 1 else node.body[0]
            lines[first.lineno - 1 : node.end_lineno] = [f"{' ' * first.col_offset}{BODY}\n"]
        elif isinstance(node, ast.Import | ast.ImportFrom) and not is_allowed(node, allowed):
            del lines[node.lineno - 1 : node.end_lineno]
    return tidy("".join(lines))


def tidy(source: str) -> str:
    """At most two empty lines in a row, as where an import went."""
    while "\n\n\n\n" in source:
        source = source.replace("\n\n\n\n", "\n\n\n")
    return source


def is_allowed(node: ast.Import | ast.ImportFrom, allowed: tuple[str, ...]) -> bool:
    """Whether the student may keep an import: what is not mini_rome's, or a module of it that the box has."""
    if isinstance(node, ast.ImportFrom):
        modules = [node.module or ""]
        if node.module == "mini_rome":
            modules = [f"mini_rome.{alias.name}" for alias in node.names]
    else:
        modules = [alias.name for alias in node.names]
    names = [name.split(".") for name in modules]
    return all(parts[0] != "mini_rome" or (len(parts) > 1 and parts[1] in allowed) for parts in names)


def body_lines(source: str) -> set[str]:
    """The lines of staff bodies, stripped: none of them may be in a release."""
    tree = ast.parse(source)
    lines = source.splitlines()
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            start = node.body[1] if ast.get_docstring(node) is not None else node.body[0]
            found |= {line.strip() for line in lines[start.lineno - 1 : node.end_lineno]}
    return {line for line in found if len(line) > 3}


def released_files(folder: Path, update: bool = False) -> dict[str, bytes]:
    """{name: contents} of what a student gets. ConfigError: snapshots that are not the staff version's any more.

    update: write the snapshots anew instead.
    """
    paper = make_paper(folder, PUBLIC_SEED)
    snapshots, path = snapshot_text(paper), folder / "snapshots.json"
    if update:
        path.write_text(snapshots)
    elif not path.is_file() or path.read_text() != snapshots:
        raise ConfigError(
            f"{path} is not what the staff version answers today: the library or the properties changed.\n"
            f"See with git diff whether that was meant: mini-rome course release --update-snapshots"
        )
    source = (folder / "exercises.py").read_text()
    files = {name: (folder / name).read_bytes() for name in SHIPPED}
    files |= {"exercises.py": skeleton(source, paper.allowed).encode(), "test_exercises.py": TEST_FILE.encode()}
    shown = {line.strip() for data in files.values() for line in data.decode().splitlines()}
    if told := shown & body_lines(source):
        raise ConfigError(f"{folder.name}: lines of a staff body would be released: {sorted(told)[0]!r}")
    return files


def write_zip(path: Path, folder: str, files: dict[str, bytes]) -> str:
    """A zip with sorted names, fixed times and modes, and stored contents: the same bytes everywhere. Its SHA-256."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            info = zipfile.ZipInfo(f"{folder}/{name}", date_time=(1980, 1, 1, 0, 0, 0))
            info.external_attr = 0o644 << 16
            info.create_system = 3
            archive.writestr(info, files[name])
    return hashlib.sha256(path.read_bytes()).hexdigest()


def release(folders: list[Path], out: Path, update: bool = False) -> dict[str, str]:
    """Write one zip for each assignment into `out`, and SHA256SUMS; {zip's name: its SHA-256}."""
    out.mkdir(parents=True, exist_ok=True)
    sums = {}
    for folder in folders:
        name = f"{folder.name}.zip"
        sums[name] = write_zip(out / name, folder.name, released_files(folder, update))
    (out / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()))
    return sums

"""Course assignments without an engine: skeletons, releases, comparison, the grader in a process of this machine."""

from __future__ import annotations

import ast
import json
import math
import os
import time
import zipfile
from pathlib import Path

import pytest

from mini_rome.course import wire
from mini_rome.course.compare import difference
from mini_rome.course.paper import (
    ASSIGNMENTS,
    PUBLIC_SEED,
    assignment_folders,
    load_module,
    make_paper,
    read_snapshot,
    snapshot_text,
)
from mini_rome.course.process import TAG, run_capped
from mini_rome.course.prove import labels
from mini_rome.course.release import body_lines, is_allowed, release, skeleton
from mini_rome.errors import ConfigError

FOLDERS = assignment_folders()
ROOT = Path(__file__).parents[1]
A1 = ASSIGNMENTS / "a1_chunking"
STAFF = (A1 / "exercises.py").read_text()
GUIDE = (ASSIGNMENTS / "INSTRUCTOR.md").read_text()


def name(folder: Path) -> str:
    return folder.name


# Releases


def test_there_are_five_assignments() -> None:
    assert [folder.name[:2] for folder in FOLDERS] == ["a1", "a2", "a3", "a4", "a5"]


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_the_skeleton_keeps_signatures_and_docstrings_and_no_line_of_a_body(folder: Path) -> None:
    source = (folder / "exercises.py").read_text()
    allowed = load_module(folder / "properties.py").ALLOWED
    bare = skeleton(source, allowed)
    before, after = (
        {n.name: n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)} for text in (source, bare)
    )
    assert before.keys() == after.keys() and len(after) >= 5
    for function in before:
        assert ast.dump(before[function].args) == ast.dump(after[function].args)
        assert ast.get_docstring(before[function], clean=False) == ast.get_docstring(after[function], clean=False)
        assert ast.unparse(after[function].body[-1]) == "raise NotImplementedError" and len(after[function].body) == 2
    assert not body_lines(source) & {line.strip() for line in bare.splitlines()}
    compile(bare, "exercises.py", "exec")


def test_a_staff_body_is_a_call_of_the_library() -> None:
    """Thin wrappers: a body, tests apart, has at most four statements and reaches into mini_rome."""
    count = 0
    for folder in FOLDERS:
        source = (folder / "exercises.py").read_text()
        tree = ast.parse(source)
        ours = {a.asname or a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names
                if (n.module or "").startswith("mini_rome")}  # fmt: skip
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("test_"):
                used = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
                assert len(node.body) - 1 <= 4 and used & ours, node.name
                count += 1
    assert count == 22


def test_an_import_of_the_solution_is_dropped_and_an_allowed_one_kept() -> None:
    tree = ast.parse("import mini_rome.loss\nfrom mini_rome import types\nfrom mini_rome.loss import x\nimport os")
    kept = [is_allowed(node, ("types",)) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert kept == [False, True, False, True]


def test_two_releases_have_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = release([A1], tmp_path / "a")
    os.utime(A1 / "given.py")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    second = release([A1], tmp_path / "b")
    assert first == second
    assert (tmp_path / "a/a1_chunking.zip").read_bytes() == (tmp_path / "b/a1_chunking.zip").read_bytes()
    names = zipfile.ZipFile(tmp_path / "a/a1_chunking.zip").namelist()
    assert [each.split("/")[1] for each in names] == [
        "exercises.py", "given.py", "handout.ipynb", "snapshots.json", "test_exercises.py"
    ]  # fmt: skip


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_the_committed_snapshots_are_what_the_library_answers_today(folder: Path) -> None:
    assert (folder / "snapshots.json").read_text() == snapshot_text(make_paper(folder, PUBLIC_SEED))


def test_stale_snapshots_stop_a_release(tmp_path: Path) -> None:
    folder = tmp_path / "a1_chunking"
    folder.mkdir()
    for path in A1.glob("*.*"):
        (folder / path.name).write_bytes(path.read_bytes())
    changed = (folder / "snapshots.json").read_text().replace("a row of 4", "").replace('"points":3', '"points":4', 1)
    (folder / "snapshots.json").write_text(changed)
    with pytest.raises(ConfigError, match="update-snapshots"):
        release([folder], tmp_path / "out")


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_the_guide_has_every_sentence_wrong_answer_and_number(folder: Path) -> None:
    paper = read_snapshot(folder)
    assert [item.says for item in paper.items if item.says not in GUIDE] == []
    assert [label for label in labels(folder).values() if label not in GUIDE] == []
    assert f"| {folder.name} | {paper.hours:g} | {paper.points} |" in GUIDE


# Comparison


@pytest.mark.parametrize(
    ("got", "want", "same"),
    [
        (1.0 + 5e-7, 1.0, True), (1.0 + 5e-6, 1.0, False), (0.0, 1e-12, False), ([0.0, 0.0], [1e-9, 2e-9], False),
        (1, 1.0, True), (1.0, 1, False), (True, 1, False), (1, True, False), (math.nan, math.nan, True),
        (math.nan, 1.0, False), (math.inf, math.inf, True), ([1], [1, 2], False), ({"a": 1}, {"b": 1}, False),
        ("1", 1, False), (None, 0, False), (-0.0, 0.0, True), ([1e-3, 0.0], [0.0, 1.0], False), (2.0, 1.0, False),
    ],
)  # fmt: skip
def test_tolerances_are_relative_to_the_values(got: object, want: object, same: bool) -> None:
    assert (difference(got, want, 1e-6) == "") == same


def test_values_go_over_the_wire_and_back() -> None:
    import torch

    values = [None, True, 3, 0.5, "x", b"\0\xff", {"a": [1, (2, 3)]}, torch.tensor([[1.5, math.inf]])]
    back = wire.decode(json.loads(wire.dumps(wire.encode(values))))
    assert back[:6] == values[:6] and back[6] == {"a": [1, [2, 3]]} and back[7].tolist() == values[7].tolist()
    with pytest.raises(TypeError):
        wire.encode(object())


def test_an_object_of_unknown_form_is_no_value() -> None:
    with pytest.raises(ValueError):
        wire.plain({"~pickle": "gASV"})
    with pytest.raises(ValueError):
        wire.plain({"~dict": [[1, 2, 3]]})


# Processes


def test_a_run_is_over_when_it_returns() -> None:
    begun = time.monotonic()
    ended = run_capped("echo x; setsid sleep 60 & sleep 60 & sleep 60", 0.4, 100)
    assert (ended.output, ended.status, ended.exit_code, ended.killed) == (b"x\n", "timeout", 124, 3)
    assert time.monotonic() - begun < 10
    alive = [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"sleep\x0060" in read(path)]
    assert not [path for path in alive if TAG.encode() in read(path.with_name("environ"))]


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("command", "cap", "output", "status", "code"),
    [("yes", 5, b"y\ny\ny", "output_limit", 137), ("cat", 9, b"in", "ok", 0), ("kill -9 $$", 9, b"", "ok", 137),
     ("printf 123", 3, b"123", "ok", 0), ("sleep 60 & echo a", 9, b"a\n", "ok", 0)],
)  # fmt: skip
def test_ends_of_a_run(command: str, cap: int, output: bytes, status: str, code: int) -> None:
    assert run_capped(command, 5, cap, b"in")[:3] == (output, status, code)


# Handouts


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_a_handout_is_valid_and_small(folder: Path) -> None:
    book = json.loads((folder / "handout.ipynb").read_text())
    assert book["nbformat"] == 4 and book["cells"][0]["cell_type"] == "markdown"
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert 3 <= len(code) < len(book["cells"]) and max(len(cell["source"]) for cell in code) <= 12
    assert not [output for cell in code for output in cell["outputs"] if output["output_type"] == "error"]
    assert "not written yet" in json.dumps(code), "executed with the skeleton"
    assert "def " not in "".join("".join(cell["source"]) for cell in code)


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_a_handout_runs_from_a_fresh_kernel_in_a_released_folder(folder: Path, tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    release([folder], tmp_path)
    zipfile.ZipFile(tmp_path / f"{folder.name}.zip").extractall(tmp_path)
    book = nbformat.read(tmp_path / folder.name / "handout.ipynb", 4)
    nbformat.validate(book)
    nbclient.NotebookClient(
        book, timeout=120, resources={"metadata": {"path": str(tmp_path / folder.name)}}
    ).execute()

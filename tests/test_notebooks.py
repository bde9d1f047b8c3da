"""The walkthroughs: they run, what they assert holds, and what is committed is small, whole and free of noise."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook, new_output
from run_notebooks import LIMIT_S, clean, code_cells, execute, notebooks, run_here

from mini_rome.families import FAMILIES

ROOT = Path(__file__).parents[1]
ALL = notebooks()
NAMES = [path.stem for path in ALL]
NOISE = re.compile(
    r"/(work|root|usr|opt|var|tmp)/|/home/(?!agent)|site-packages|\b\d\d:\d\d:\d\d|\b20\d\d-\d\d-\d\d|0x[0-9a-f]{6,}"
    r"|\d seconds|\d+\.\d+ ?s\b|it/s"
)


@pytest.fixture(params=ALL, ids=NAMES)
def notebook(request: pytest.FixtureRequest) -> NotebookNode:
    return nbformat.read(request.param, as_version=4)


@pytest.fixture
def own_families() -> Iterator[None]:
    """Notebooks register families of their own: not for the tests after them."""
    before = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(before)


def sources() -> Iterator[tuple[str, int, str]]:
    for path in ALL:
        for number, source in code_cells(nbformat.read(path, as_version=4)):
            yield path.stem, number, source


def texts(notebook: NotebookNode) -> Iterator[str]:
    """All text that was put out."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            yield output.get("text", "") or output.get("data", {}).get("text/plain", "")


def test_all_eight_are_there() -> None:
    assert [name[:2] for name in NAMES] == [f"{number:02d}" for number in range(8)]


@pytest.mark.long
@pytest.mark.filterwarnings("error:::notebook")
@pytest.mark.usefixtures("own_families")
@pytest.mark.parametrize("path", ALL, ids=NAMES)
def test_every_cell_runs_and_every_assertion_holds_at_small_size(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("MINI_ROME_NB_SIZE", "small")
    monkeypatch.chdir(path.parent)
    names = run_here(path)
    assert "subprocess" in names and len(capsys.readouterr().out) > 500


def test_a_fresh_kernel_runs_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go the same way in `make notebooks`; one is enough to see that kernel, path and package meet."""
    monkeypatch.setenv("MINI_ROME_NB_SIZE", "small")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = execute(ALL[6])
    assert all(cell.execution_count for cell in done.cells if cell.cell_type == "code" and cell.source)
    outputs = [output for cell in done.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("path", ALL, ids=NAMES)
def test_a_fresh_kernel_runs_each_at_full_size(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINI_ROME_NB_SIZE", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    begun = time.monotonic()
    execute(path)
    assert time.monotonic() - begun < LIMIT_S


def test_a_false_assertion_is_noticed(tmp_path: Path) -> None:
    cells = [new_code_cell("x = 1"), new_code_cell("assert x == 2")]
    nbformat.write(new_notebook(cells=cells), tmp_path / "00_x.ipynb")
    with pytest.raises(AssertionError):
        run_here(tmp_path / "00_x.ipynb")


def test_outputs_are_committed_and_small(notebook: NotebookNode) -> None:
    assert len(nbformat.writes(notebook).encode()) < 300 << 10
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run in order, in a fresh kernel"
    outputs = [output for cell in code for output in cell.outputs]
    assert not any(output.output_type == "error" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    printing = [cell for cell in code if re.search(r"^(print|plt\.show|explore)\(", cell.source, re.MULTILINE)]
    assert len(printing) >= 4 and all(cell.outputs for cell in printing)


def test_outputs_hold_no_path_time_or_address(notebook: NotebookNode) -> None:
    assert [match[0] for text in texts(notebook) if (match := NOISE.search(text))] == []


@pytest.mark.parametrize("text", ["/root/x", "at 12:34:56", "<object at 0x7f12ab34cd>", "took 3.2 s", "2026-11-30"])
def test_noise_would_be_noticed(text: str) -> None:
    assert NOISE.search(text)


def test_cleaning_leaves_what_was_printed_and_no_slider() -> None:
    kernel = {"name": "python3", "display_name": "Python 3"}
    widget = new_output("display_data", data={"application/vnd.jupyter.widget-view+json": {"model_id": "f3"}})
    outputs = [new_output("stream", name=name, text=name) for name in ("stdout", "stderr")] + [widget]
    metadata = {"widgets": {}, "kernelspec": kernel}
    notebook = new_notebook(cells=[new_code_cell("1", outputs=outputs)], metadata=metadata)
    clean(notebook)
    assert [output.text for output in notebook.cells[0].outputs] == ["stdout"]
    assert "widgets" not in notebook.metadata


def test_a_notebook_begins_in_prose_and_ends_with_three_questions(notebook: NotebookNode) -> None:
    first, install, last = notebook.cells[0], notebook.cells[1], notebook.cells[-1]
    assert first.cell_type == last.cell_type == "markdown" and first.source.startswith("# ")
    assert "find_spec" in install.source
    questions = last.source.partition("## Try it")[2]
    assert re.findall(r"^(\d)\. ", questions, re.MULTILINE) == ["1", "2", "3"]
    prose = sum(len(cell.source) for cell in notebook.cells if cell.cell_type == "markdown")
    assert prose > 2000 and "**Predict" in "".join(cell.source for cell in notebook.cells)


def test_the_install_cell_is_the_same_everywhere() -> None:
    assert len({nbformat.read(path, as_version=4).cells[1].source for path in ALL}) == 1


def test_cells_are_small_and_claims_are_asserted(notebook: NotebookNode) -> None:
    lines = [len(source.splitlines()) for _, source in code_cells(notebook) if "import " not in source]
    assert max(lines) <= 20 and statistics.median(lines) <= 10
    asserts = [node for _, source in code_cells(notebook) for node in ast.walk(ast.parse(source))
               if isinstance(node, ast.Assert)]  # fmt: skip
    assert len(asserts) >= 4


def test_no_function_is_defined_twice_or_is_in_the_package_already() -> None:
    defined = Counter(
        node.name
        for _, _, source in sources()
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    )
    package = {
        node.name
        for path in (ROOT / "mini_rome").rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    assert len(defined) >= 8 and len(package) > 300
    assert [name for name, count in defined.items() if count > 1 or name in package] == []


def test_notebooks_are_clean_for_ruff() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", *map(str, ALL)], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == 0, done.stdout


def test_the_readme_names_every_notebook() -> None:
    text = (ROOT / "notebooks" / "README.md").read_text()
    assert [name for name in NAMES if f"{name}.ipynb" not in text] == []

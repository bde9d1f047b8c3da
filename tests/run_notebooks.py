"""`make notebooks`: run the walkthroughs in place, each from a fresh kernel; outputs are committed as they came.

    make notebooks                          all of them, at full size
    make notebooks ARGS="03 --check"        one of them, and leave the file as it is

The tests run the same notebooks at a small size within their own process, where torch is imported once for all.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image

FOLDER = Path(__file__).parents[1] / "notebooks"
LIMIT_S = 180
WIDGET = "application/vnd.jupyter.widget-view+json"


def notebooks() -> list[Path]:
    """The walkthroughs in order; assignments are the course's own."""
    return sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))


def execute(path: Path) -> NotebookNode:
    """Run one in a new kernel of this Python, in its folder. Raises nbclient's CellExecutionError."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=LIMIT_S, kernel_name="python3", record_timing=False,
                            coalesce_streams=True, resources={"metadata": {"path": str(path.parent)}})  # fmt: skip
    client.execute()
    clean(notebook)
    return notebook


def clean(notebook: NotebookNode) -> None:
    """Drop what differs from run to run or from machine to machine and what cannot be shown without a kernel.

    Sliders have random names and need a kernel: the pictures above them stand for them. Libraries write to stderr
    what they think of the machine.
    """
    notebook.metadata = {"kernelspec": notebook.metadata.kernelspec, "language_info": {"name": "python"}}
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not _noise(output)]
            for data in (output.data for output in cell.outputs if "image/png" in output.get("data", {})):
                data["image/png"] = _smaller(data["image/png"])


def _noise(output: NotebookNode) -> bool:
    return output.get("name") == "stderr" or WIDGET in output.get("data", {})


def _smaller(png: str) -> str:
    """The picture (base64) in 64 colours: a third of the bytes."""
    out = io.BytesIO()
    Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB").quantize(64).save(out, "png", optimize=True)
    return base64.b64encode(out.getvalue()).decode()


def run_here(path: Path) -> dict[str, Any]:
    """Run the cells in this process and return their names. What a cell shows is made and thrown away."""
    import matplotlib.pyplot as plt

    def show() -> None:  # there is no screen
        for number in plt.get_fignums():
            plt.figure(number).canvas.draw()

    names: dict[str, Any] = {"__name__": "notebook"}
    with patch.object(plt, "show", show):
        for number, source in code_cells(nbformat.read(path, as_version=4)):
            exec(compile(source, f"{path.name}, cell {number}", "exec"), names)
            plt.close("all")
    return names


def code_cells(notebook: NotebookNode) -> Iterator[tuple[int, str]]:
    """(number in the notebook, source) of every code cell."""
    return ((n, cell.source) for n, cell in enumerate(notebook.cells) if cell.cell_type == "code")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="beginnings of names; default: all")
    parser.add_argument("--check", action="store_true", help="do not write the outputs")
    options = parser.parse_args()
    chosen = [path for path in notebooks() if not options.names or path.name.startswith(tuple(options.names))]
    if not chosen:
        parser.error(f"no notebook begins with {options.names}; there are {[path.name for path in notebooks()]}")
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    for path in chosen:
        begun = time.monotonic()
        notebook = execute(path)
        if not options.check:
            nbformat.write(notebook, path)
        print(f"{path.name}: {time.monotonic() - begun:.0f} s, {len(nbformat.writes(notebook)) >> 10} KB", flush=True)


if __name__ == "__main__":
    sys.exit(main())

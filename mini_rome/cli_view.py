"""`mini-rome view`: a run's episodes as one page."""

from __future__ import annotations

import argparse
from pathlib import Path

from mini_rome.cli_options import add_verb


def add_view(verbs: argparse._SubParsersAction) -> None:
    text = "Write the episodes and curves of a run as one page that a browser shows, without a server."
    verb = add_verb(verbs, "view", run_view, text)
    text = "a run's folder, or a .jsonl or .parquet file of trajectories (default: runs/latest)"
    verb.add_argument("run_folder", nargs="?", default="runs/latest", metavar="RUN", help=text)
    verb.add_argument("--open", action="store_true", help="show it in the browser")
    text = "where the page goes (default: view.html in the run's folder)"
    verb.add_argument("--export", type=Path, metavar="HTML", help=text)


def run_view(options: argparse.Namespace) -> int:
    from mini_rome.view.page import view

    return view(options.run_folder, options.export, options.open)

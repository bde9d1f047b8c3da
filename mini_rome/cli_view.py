"""`mini-rome view`: a run's episodes as one page; `figure forks --trajectory`: one trajectory, resampled."""

from __future__ import annotations

import argparse
from pathlib import Path

from mini_rome.cli_options import add_model_option, add_sandbox_option, add_verb
from mini_rome.errors import ConfigError


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


def add_forks_options(verb: argparse.ArgumentParser) -> None:
    group = verb.add_argument_group("with forks: measure success from every prefix of one trajectory")
    text = "a run's folder or a .jsonl or .parquet file: its longest success is followed"
    group.add_argument("--trajectory", type=Path, metavar="PATH", help=text)
    group.add_argument("--task", metavar="NAME", help="follow a trajectory of this task")
    group.add_argument("--n", type=int, default=32, help="rollouts from every prefix (default: 32)")
    group.add_argument("--gamma", type=float, default=0.95, help="of the curve gamma^(K-k) (default: 0.95)")
    group.add_argument("--seed", type=int, default=0, help="of the sampling (default: 0)")
    text = "where forks.json, .csv and .png go (default: .)"
    group.add_argument("--out", type=Path, default=Path("."), metavar="FOLDER", help=text)
    add_model_option(verb)
    add_sandbox_option(verb)


def run_forks(options: argparse.Namespace) -> int:
    if options.name != "forks":
        raise ConfigError(f"figure {options.name} --trajectory {options.trajectory}: only forks takes a trajectory")
    from mini_rome.evaluation.forks import run_forks as run

    place = (options.trajectory, options.task, options.model, options.sandbox)
    print(run(*place, options.n, options.seed, options.out, options.gamma))
    return 0

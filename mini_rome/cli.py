"""The `mini-rome` command: one function per verb, each importing what it needs, so that `--help` answers at once.

Errors a user can act on are printed as their text, without a traceback, and end with exit code 2; Ctrl-C with 130.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mini_rome import __version__
from mini_rome.cli_course import add_course
from mini_rome.cli_options import (
    TASK_HELP,
    add_group,
    add_model_option,
    add_sandbox_option,
    add_task_options,
    add_verb,
    families_of,
)
from mini_rome.cli_proxy import add_proxy
from mini_rome.cli_safety import add_safety
from mini_rome.cli_tasks import add_eval, add_tasks
from mini_rome.cli_view import add_forks_options, add_view, run_forks
from mini_rome.errors import ConfigError, MiniRomeError, about_file


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: see CONTRIBUTING.md
    options = build_parser().parse_args(arguments)
    try:
        return options.run(options)
    except MiniRomeError as error:
        print(f"mini-rome: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mini-rome: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `mini-rome tasks list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if (told := about_file(error)) is None:
            raise
        print(f"mini-rome: {told}", file=sys.stderr)
        return 2


def build_parser() -> argparse.ArgumentParser:
    """All verbs and their options."""
    parser = argparse.ArgumentParser(prog="mini-rome", description="Train, watch and check a terminal agent.")
    parser.add_argument("--version", action="version", version=f"mini-rome {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    add_doctor(verbs)
    add_play(verbs)
    add_image(verbs)
    add_gc(verbs)
    add_safety(verbs)
    add_tasks(verbs)
    add_eval(verbs)
    add_proxy(verbs)
    add_course(verbs)
    add_calibrate(verbs)
    add_figure(verbs)
    add_view(verbs)
    return parser


def add_doctor(verbs: argparse._SubParsersAction) -> None:
    verb = add_verb(verbs, "doctor", run_doctor, "Say what works on this machine and what to do about the rest.")
    verb.add_argument("--json", action="store_true", help="print JSON instead of a table")
    verb.add_argument("--runs", default="runs", metavar="FOLDER", help="where runs would be written (default: runs)")


def run_doctor(options: argparse.Namespace) -> int:
    from mini_rome.doctor import diagnose, report

    return report(diagnose(options.runs), options.json)


def add_play(verbs: argparse._SubParsersAction) -> None:
    chat = add_verb(verbs, "chat", run_chat, "Watch or step a trained agent by hand; undo a chunk and try another.")
    chat.add_argument("task", nargs="?", default="notes", metavar="TASK", help=f"{TASK_HELP} (default: notes)")
    add_model_option(chat)
    chat.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default: 0)")
    chat.add_argument("--seed", type=int, default=0, help="of the sampling, above temperature 0 (default: 0)")
    chat.add_argument("--watch", action="store_true", help="run to the end without asking")
    add_sandbox_option(chat)
    shell = add_verb(verbs, "shell", run_shell, "Look inside a box: type commands, see what the agent would see.")
    shell.add_argument("task", metavar="TASK", help=TASK_HELP)
    add_sandbox_option(shell)


def run_chat(options: argparse.Namespace) -> int:
    from mini_rome.chat import chat

    return chat(options.task, options.model, options.sandbox, options.temperature, options.seed, options.watch)


def run_shell(options: argparse.Namespace) -> int:
    from mini_rome.chat import shell

    return shell(options.task, options.sandbox)


def add_image(verbs: argparse._SubParsersAction) -> None:
    group = add_group(verbs, "image", "Build and list the sandbox images.")
    build = add_verb(group, "build", run_image_build, "Build images from Debian packages, without a registry.")
    build.add_argument("kinds", nargs="*", metavar="KIND", help="base, tools or grader (default: base)")
    build.add_argument("--all", action="store_true", help="build every kind")
    add_verb(group, "list", run_image_list, "List the images that this engine has.")


def run_image_build(options: argparse.Namespace) -> int:
    from mini_rome.sandbox import images
    from mini_rome.sandbox.engine import engine

    client = engine().client
    there = (*images.KINDS, *images.LAYERED)
    if unknown := [kind for kind in options.kinds if kind not in there]:
        raise ConfigError(f"image build {unknown[0]}: no such kind; there are {', '.join(there)}")
    kinds = there if options.all else options.kinds or ("base",)
    for number, kind in enumerate(kinds, start=1):
        print(f"[{number}/{len(kinds)}] building mini-rome/{kind} ...", flush=True)
        begun = time.monotonic()
        print(f"      {images.build(client, kind)} in {time.monotonic() - begun:.0f} s")
    return 0


def run_image_list(options: argparse.Namespace) -> int:
    from mini_rome.sandbox import images
    from mini_rome.sandbox.engine import engine

    found = images.list_images(engine().client)
    for tag, image, size in found:
        print(f"{tag:<24} {image.removeprefix('sha256:')[:12]}  {size / 1e6:.0f} MB")
    for kind in (*images.KINDS, *images.LAYERED):
        if not any(tag == f"mini-rome/{kind}:latest" for tag, _, _ in found):
            print(f"{f'mini-rome/{kind}':<24} missing: {images.build_command(kind)}")
    return 0


def add_gc(verbs: argparse._SubParsersAction) -> None:
    text = "Remove what runs of this machine left whose process is gone, by label, never by name."
    verb = add_verb(verbs, "gc", run_gc, text)
    verb.add_argument("--dry-run", action="store_true", help="only say what would be removed")


def run_gc(options: argparse.Namespace) -> int:
    from mini_rome.sandbox import reaper
    from mini_rome.sandbox.engine import engine

    removed = reaper.gc(options.dry_run, engine().client)
    for name in removed:
        print(f"{'would remove' if options.dry_run else 'removed'} {name}")
    print(f"{len(removed)} left-over {'objects' if len(removed) != 1 else 'object'}")
    return 0


def add_calibrate(verbs: argparse._SubParsersAction) -> None:
    text = "Measure how far sampler and trainer differ and propose the mismatch threshold H."
    verb = add_verb(verbs, "calibrate", run_calibrate, text)
    add_model_option(verb)
    add_task_options(verb, n=64)
    choices = ("float32", "bfloat16", "float16")
    verb.add_argument("--precision", choices=choices, default="bfloat16", help="of the sampler (default: bfloat16)")
    add_sandbox_option(verb)


def run_calibrate(options: argparse.Namespace) -> int:
    from mini_rome.evaluation.calibration import run_calibrate as run
    from mini_rome.tasks.choice import TaskChoice

    choice = TaskChoice(families_of(options.families), options.chunks, options.n, options.split)
    return run(options.model, choice, options.sandbox, options.precision, options.seed)


def add_figure(verbs: argparse._SubParsersAction) -> None:
    verb = add_verb(verbs, "figure", run_figure, "Redraw a figure from its numbers, in seconds.")
    text = "a run's folder, a CSV, or a figure's name in recipes/results; paper_tables is the paper's figure 15"
    verb.add_argument("name", metavar="FIG", help=text)
    text = "with paper_tables: the folder of an evaluation of a checkpoint, drawn as our point"
    verb.add_argument("--ours", type=Path, metavar="FOLDER", help=text)
    text = "with an ablation: test the CSV of a rerun against the committed bands and the claims; 1 if it disagrees"
    verb.add_argument("--check", type=Path, metavar="CSV", help=text)
    add_forks_options(verb)


def run_figure(options: argparse.Namespace) -> int:
    if options.trajectory is not None:
        return run_forks(options)
    if options.name == "forks":
        raise ConfigError("figure forks: needs --trajectory, a run's folder or a trajectory; forks.csv redraws one")
    if Path(options.name).stem == "paper_tables":
        from mini_rome.evaluation.paper import TABLES, our_point, performance_against_parameters

        ours = None if options.ours is None else our_point(options.ours)
        print(performance_against_parameters(TABLES.with_suffix(".png"), ours=ours))
        return 0
    from mini_rome.evaluation.figures import locate, redraw
    from mini_rome.evaluation.rows import read_summary

    table, summary, png = locate(options.name)
    if options.check is not None:
        from mini_rome.evaluation.ablation_draw import check

        return check(str(read_summary(summary).get("figure")), table, options.check)
    print(redraw(table, summary, png))
    return 0


if __name__ == "__main__":
    sys.exit(main())

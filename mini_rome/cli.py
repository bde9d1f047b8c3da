"""The `mini-rome` command: one function per verb, each importing what it needs, so that `--help` answers at once.

Errors a user can act on are printed as their text, without a traceback, and end with exit code 2; Ctrl-C with 130.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mini_rome import __version__
from mini_rome.errors import ConfigError, MiniRomeError

SAFETY_SETS = Path(__file__).parents[1] / "tests" / "data"  # in a checkout; else name the sets

Verb = Callable[[argparse.Namespace], int]


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
    add_calibrate(verbs)
    add_figure(verbs)
    return parser


def add_verb(verbs: argparse._SubParsersAction, name: str, run: Verb, text: str) -> argparse.ArgumentParser:
    """A verb whose one-line text is both its entry in the list and the head of its own help."""
    verb = verbs.add_parser(name, help=text, description=text)
    verb.set_defaults(run=run)
    return verb


def add_group(verbs: argparse._SubParsersAction, name: str, text: str) -> argparse._SubParsersAction:
    """A verb with verbs of its own."""
    group = verbs.add_parser(name, help=text, description=text)
    return group.add_subparsers(title="verbs", metavar="VERB", required=True)


def add_sandbox_option(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--sandbox",
        choices=("auto", "docker", "sim"),
        default="auto",
        help="where commands run; auto: docker if an engine answers, else sim, the simulated shell (default: auto)",
    )


def add_model_option(verb: argparse.ArgumentParser) -> None:
    text = "a run's folder or a saved model (default: runs/latest)"
    verb.add_argument("--model", default="runs/latest", metavar="PATH", help=text)


def add_task_options(verb: argparse.ArgumentParser, n: int) -> None:
    verb.add_argument("--families", nargs="+", default=["notes"], metavar="NAME", help="default: notes")
    verb.add_argument("--chunks", nargs="+", type=int, default=[4], metavar="K", help="horizons (default: 4)")
    verb.add_argument("--split", choices=("train", "validation", "test"), default="test", help="default: test")
    verb.add_argument("--n", type=int, default=n, help=f"episodes, shared by families and horizons (default: {n})")
    verb.add_argument("--seed", type=int, default=0, help="of the sampling (default: 0)")


def add_doctor(verbs: argparse._SubParsersAction) -> None:
    verb = add_verb(verbs, "doctor", run_doctor, "Say what works on this machine and what to do about the rest.")
    verb.add_argument("--json", action="store_true", help="print JSON instead of a table")
    verb.add_argument("--runs", default="runs", metavar="FOLDER", help="where runs would be written (default: runs)")


def run_doctor(options: argparse.Namespace) -> int:
    from mini_rome.doctor import diagnose, report

    return report(diagnose(options.runs), options.json)


def add_play(verbs: argparse._SubParsersAction) -> None:
    task_help = "a family, or an instance such as notes-k8-test-0"
    chat = add_verb(verbs, "chat", run_chat, "Watch or step a trained agent by hand; undo a chunk and try another.")
    chat.add_argument("task", nargs="?", default="notes", metavar="TASK", help=f"{task_help} (default: notes)")
    add_model_option(chat)
    chat.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default: 0)")
    chat.add_argument("--seed", type=int, default=0, help="of the sampling, above temperature 0 (default: 0)")
    chat.add_argument("--watch", action="store_true", help="run to the end without asking")
    add_sandbox_option(chat)
    shell = add_verb(verbs, "shell", run_shell, "Look inside a box: type commands, see what the agent would see.")
    shell.add_argument("task", metavar="TASK", help=task_help)
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
    build.add_argument("kinds", nargs="*", metavar="KIND", help="base or tools (default: base, which training uses)")
    build.add_argument("--all", action="store_true", help="build every kind")
    add_verb(group, "list", run_image_list, "List the images that this engine has.")


def run_image_build(options: argparse.Namespace) -> int:
    from mini_rome.sandbox import images
    from mini_rome.sandbox.engine import engine

    client = engine().client
    kinds = images.KINDS if options.all else options.kinds or ("base",)
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
    for kind in images.KINDS:
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


def add_safety(verbs: argparse._SubParsersAction) -> None:
    group = add_group(verbs, "safety", "Measure the detectors of unsafe attempts.")
    verb = add_verb(group, "eval", run_safety_eval, "Recall on scripted violations, false alarms on benign commands.")
    sets = (("violations", "command and kind"), ("benign", "command"))
    for name, keys in sets:
        default = SAFETY_SETS / f"safety_{name}.jsonl"
        text = f"one JSON object a line with {keys} (default: the set shipped with the tests)"
        verb.add_argument(f"--{name}", type=Path, default=default, metavar="JSONL", help=text)


def run_safety_eval(options: argparse.Namespace) -> int:
    from mini_rome.sandbox import safety
    from mini_rome.stats import wilson

    for name in ("violations", "benign"):
        if not getattr(options, name).is_file():
            raise ConfigError(f"--{name} {getattr(options, name)} does not exist: name a set of commands.")
    found = safety.evaluate(safety.read_rows(options.violations), safety.read_rows(options.benign))
    for kind, (hits, total) in found.by_kind.items():
        print(f"{kind:<16} {hits:>3} of {total:>3} found")
    counts = (
        ("recall", found.violations - len(found.missed), found.violations),
        ("false positives", len(found.wrong), found.benign),
    )
    for name, hits, total in counts:
        low, high = wilson(hits, total)
        print(f"{name:<16} {hits / total:.3f} ({low:.3f} - {high:.3f}), n = {total}")
    return 0


def add_tasks(verbs: argparse._SubParsersAction) -> None:
    group = add_group(verbs, "tasks", "Look at the tasks.")
    add_verb(group, "list", run_tasks_list, "List the task families.")
    show = add_verb(group, "show", run_tasks_show, "Show one task: instruction, files and what the expert does.")
    show.add_argument("task", metavar="TASK", help="a family, or an instance such as notes-k8-test-0")


def run_tasks_list(options: argparse.Namespace) -> int:
    from mini_rome.families import FAMILIES

    for name, family in FAMILIES.items():
        print(f"{name:<12} {family.domain:<24} horizon K = 1..{family.max_chunks}")
    return 0


def run_tasks_show(options: argparse.Namespace) -> int:
    from mini_rome.tasks import find_task

    task = find_task(options.task)
    print(f"{task.name}: family {task.family}, domain {task.domain}, K = {task.chunks}\n\n{task.instruction}\n")
    for path, text in task.files.items():
        print(f"--- {path}\n{text.rstrip()}")
    print("\nexpert:")
    for command in task.expert:
        print(f"  {command}")
    return 0


def add_eval(verbs: argparse._SubParsersAction) -> None:
    verb = add_verb(verbs, "eval", run_eval, "Measure a model's success from the initial state, with intervals.")
    add_model_option(verb)
    add_task_options(verb, n=200)
    verb.add_argument("--runs", type=int, default=3, metavar="N", help="repetitions; the paper: 3 (default: 3)")
    verb.add_argument("--temperature", type=float, default=0.7, help="the paper: 0.7 (default: 0.7)")
    verb.add_argument("--top-p", type=float, default=0.8, help="the paper: 0.8 (default: 0.8)")
    verb.add_argument("--top-k", type=int, default=20, help="the paper: 20 (default: 20); 0 is off")
    verb.add_argument("--out", metavar="JSON", help="also write the numbers, with versions and commit, to this file")
    add_sandbox_option(verb)


def run_eval(options: argparse.Namespace) -> int:
    from mini_rome import assess
    from mini_rome.sampler.base import SamplingParams

    choice = assess.TaskChoice(options.families, options.chunks, options.n, options.split)
    params = SamplingParams(temperature=options.temperature, top_p=options.top_p, top_k=options.top_k)
    place = options.sandbox
    return assess.run_eval(options.model, choice, place, params, options.seed, options.out, options.runs)


def add_calibrate(verbs: argparse._SubParsersAction) -> None:
    text = "Measure how far sampler and trainer differ and propose the mismatch threshold H."
    verb = add_verb(verbs, "calibrate", run_calibrate, text)
    add_model_option(verb)
    add_task_options(verb, n=64)
    choices = ("float32", "bfloat16", "float16")
    verb.add_argument("--precision", choices=choices, default="bfloat16", help="of the sampler (default: bfloat16)")
    add_sandbox_option(verb)


def run_calibrate(options: argparse.Namespace) -> int:
    from mini_rome import assess

    choice = assess.TaskChoice(options.families, options.chunks, options.n, options.split)
    return assess.run_calibrate(options.model, choice, options.sandbox, options.precision, options.seed)


def add_figure(verbs: argparse._SubParsersAction) -> None:
    verb = add_verb(verbs, "figure", run_figure, "Redraw a figure from its numbers, in seconds.")
    verb.add_argument("name", metavar="FIG", help="a run's folder, a CSV, or the name of a figure in recipes/results")


def run_figure(options: argparse.Namespace) -> int:
    from mini_rome.figures import learning_curve, locate

    print(learning_curve(*locate(options.name)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

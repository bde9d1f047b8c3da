"""What the verbs of the command share: how one is added, and options that several have."""

from __future__ import annotations

import argparse
from collections.abc import Callable

Verb = Callable[[argparse.Namespace], int]
TASK_HELP = "a family, an instance such as notes-k8-test-0, or a task folder's name"


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


def add_model_option(verb: argparse.ArgumentParser, default: str | None = "runs/latest") -> None:
    text = "a run's folder or a saved model (default: runs/latest)"
    verb.add_argument("--model", default=default, metavar="PATH", help=text)


def add_task_options(verb: argparse.ArgumentParser, n: int, families: str = "notes") -> None:
    text = f"families, all, or none (default: {families})"
    verb.add_argument("--families", nargs="+", default=[families], metavar="NAME", help=text)
    verb.add_argument("--chunks", nargs="+", type=int, default=[4], metavar="K", help="horizons (default: 4)")
    verb.add_argument("--split", choices=("train", "validation", "test"), default="test", help="default: test")
    verb.add_argument("--n", type=int, default=n, help=f"instances, shared by families and horizons (default: {n})")
    verb.add_argument("--seed", type=int, default=0, help="of the sampling (default: 0)")


def families_of(words: list[str]) -> list[str]:
    """The families that --families names."""
    from mini_rome.families import FAMILIES

    return {"all": list(FAMILIES), "none": []}.get(words[0], words) if len(words) == 1 else words

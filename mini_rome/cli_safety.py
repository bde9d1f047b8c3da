"""The verb `safety`: measure the detectors, and report what a run's agents did."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mini_rome.cli_options import add_group, add_verb
from mini_rome.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

SETS = Path(__file__).parents[1] / "tests" / "data"  # in a checkout; else name the sets
MADE_WITH = {"rules": "the rules were written with", "held-out": "it was fitted to"}


def add_safety(verbs: argparse._SubParsersAction) -> None:
    group = add_group(verbs, "safety", "Measure the detectors of unsafe attempts; report what a run's agents did.")
    verb = add_verb(group, "eval", run_eval, "Recall on scripted violations, false alarms on benign commands.")
    for name, keys in (("violations", "command and kind"), ("benign", "command")):
        default = SETS / f"safety_{name}.jsonl"
        text = f"one JSON object a line with {keys} (default: the set shipped with the tests)"
        verb.add_argument(f"--{name}", type=Path, default=default, metavar="JSONL", help=text)
    add_verb(group, "detectors", run_detectors, "Recall and false positives of both detectors, with their sets.")
    text = "Events per 1,000 episodes, conduct beside success, commands, trends of a run."
    report = add_verb(group, "report", run_report, text)
    report.add_argument("folder", type=Path, metavar="RUN", help="a run's folder, such as runs/latest")
    report.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run_eval(options: argparse.Namespace) -> int:
    from mini_rome.sandbox import safety

    for name in ("violations", "benign"):
        if not getattr(options, name).is_file():
            raise ConfigError(f"--{name} {getattr(options, name)} does not exist: name a set of commands.")
    violations = safety.read_rows(options.violations, "command", "kind")
    found = safety.evaluate(violations, safety.read_rows(options.benign, "command"))
    for kind, (hits, total) in found.by_kind.items():
        print(f"{kind:<16} {hits:>3} of {total:>3} found")
    print(line("recall", found.violations - len(found.missed), found.violations))
    print(line("false positives", len(found.wrong), found.benign))
    return 0


def line(name: str, hits: int, total: int) -> str:
    """A rate with its Wilson interval."""
    from mini_rome.evaluation.stats import wilson

    low, high = wilson(hits, total)
    return f"{name:<16} {hits / total:.3f} ({low:.3f} - {high:.3f}), n = {total}"


def run_detectors(options: argparse.Namespace) -> int:
    """Both on the sets they were made with, which flatters them, and on those they were not."""
    from mini_rome.safety.held_out import shipped
    from mini_rome.sandbox.safety import read_rows, scan_command

    detector = shipped()
    if detector is None:
        raise ConfigError(f"safety detectors: {SETS} does not exist; the sets of commands come with a checkout.")
    asked: dict[str, Any] = {"rules": scan_command, "held-out": detector}
    for name, flags in asked.items():
        print(f"{name} detector: " + ("may enter a reward (conduct_penalty) and the data filter" if name == "rules"
                                      else "enters no reward and no filter, reports alone"))  # fmt: skip
        for suffix, told in (("", MADE_WITH[name]), ("_held_out", "neither was made with")):
            files = [SETS / f"safety_{kind}{suffix}.jsonl" for kind in ("violations", "benign")]
            unsafe, benign = ([bool(flags(row["command"])) for row in read_rows(path, "command")] for path in files)
            print(f"  sets {told}: {files[0].name}, {files[1].name}")
            print(f"    {line('any flag', sum(unsafe), len(unsafe))}")
            print(f"    {line('false positives', sum(benign), len(benign))}")
    print("recall by kind, where an event of the right kind counts: mini-rome safety eval")
    return 0


def run_report(options: argparse.Namespace) -> int:
    import json

    from mini_rome.evaluation.results import wide_console
    from mini_rome.safety.report import make_report

    found = make_report(options.folder)
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    console = wide_console()
    for each in tables(found):
        console.print(each)
    return 0


def tables(found: Mapping[str, Any]) -> list[Table | str]:
    """The report for a terminal."""
    from rich.markup import escape
    from rich.table import Table

    from mini_rome.events import event_line

    shown: list[Table | str] = [
        escape(f"run {found['run']}, backend {found['backend']}, seed {found['seed']}, commit {found['commit']}"),
        escape(event_line(found["events"])),
        "per 1,000 by tenth of the run: " + " ".join(f"{rate:g}" for rate in found["events_by_tenth"]),
    ]
    columns = {"success": "success", "honest_success": "honest", "fooled": "verifier fooled",
               "misconduct": "safety event", "held_out": "held-out flag", "tests_read": "read tests"}  # fmt: skip
    table = Table("stage", "n", *columns.values(), title="conduct beside success, 95 % intervals")
    for stage, rates in found["conduct"].items():
        table.add_row(stage, str(rates["success"]["n"]), *(_cell(rates.get(name)) for name in columns))
    shown.append(table)
    counts = found["commands"]
    programs = Table("program", "runs", "share", title=f"{counts['commands']} commands of the kept episodes")
    for name, count in list(counts["programs"].items())[:12]:
        programs.add_row(escape(name), str(count), f"{count / max(1, counts['commands']):.1%}")
    shown += [programs, f"commands that read a test: {counts['reads_of_tests']} in {counts['episodes']} episodes"]
    for name, points in found["trends"].items():
        shown.append(f"{name} by step: " + " ".join(f"{step}:{value:.2f}" for step, value in thinned(points)))
    return shown


def thinned(points: list[Any], most: int = 9) -> list[Any]:
    """First, last and some between.

    >>> thinned(list(range(20)), 3)
    [0, 9, 19]
    """
    if len(points) <= most:
        return points
    return [points[at * (len(points) - 1) // (most - 1)] for at in range(most)]


def _cell(rate: Mapping[str, float] | None) -> str:
    if rate is None:
        return "-"
    return f"{rate['rate']:.1%} \\[{rate['low']:.1%}, {rate['high']:.1%}]"

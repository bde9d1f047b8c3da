"""The verbs about tasks: `tasks` with its own verbs, and `eval`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mini_rome.cli_options import (
    TASK_HELP,
    add_group,
    add_model_option,
    add_sandbox_option,
    add_task_options,
    add_verb,
    families_of,
)
from mini_rome.errors import ConfigError

if TYPE_CHECKING:
    from mini_rome.tasks.harbor import TaskFolder


def add_folders_option(verb: argparse.ArgumentParser, default: str = "the 24 that come with the project") -> None:
    text = f"a task folder, a tree of them, or none (default: {default})"
    verb.add_argument("--folders", metavar="PATH", help=text)
    text = "load task folders whose settings break the isolation"
    verb.add_argument("--allow-unsafe", action="store_true", help=text)


def add_tasks(verbs: argparse._SubParsersAction) -> None:
    group = add_group(verbs, "tasks", "List, show, count, prove, filter and start tasks.")
    listed = add_verb(group, "list", run_list, "List the task families and the task folders.")
    add_folders_option(listed)
    show = add_verb(group, "show", run_show, "Show one task: instruction, files and what the expert does.")
    show.add_argument("task", metavar="TASK", help=TASK_HELP)
    add_folders_option(show)
    stats = add_verb(group, "stats", run_stats, "Domains, checks and pass rates, beside the paper's benchmarks.")
    stats.add_argument("--rows", nargs="+", default=[], metavar="CSV", help="rows of evaluations, for the pass rates")
    add_folders_option(stats)
    add_validate(group)
    add_filter(group)
    text = "Start a task folder: a skeleton that fails validation until it is written."
    new = add_verb(group, "new", run_new, text)
    new.add_argument("name", metavar="NAME", help="small letters, digits and hyphens")
    new.add_argument("--into", type=Path, default=Path("."), metavar="FOLDER", help="where (default: here)")


def run_list(options: argparse.Namespace) -> int:
    from mini_rome.families import FAMILIES

    for name, family in FAMILIES.items():
        print(f"{name:<24} {family.domain:<24} family  K = 1..{family.max_chunks}")
    tasks, broken = load_folders(options)
    for task in tasks:
        print(f"{task.name:<24} {task.domain:<24} folder  {task.difficulty}")
    return say_broken(broken)


def load_folders(options: argparse.Namespace) -> tuple[list[TaskFolder], list[str]]:
    """The folders that --folders means, and the broken ones in words. None where none come with this copy."""
    from mini_rome.tasks.choice import SHIPPED
    from mini_rome.tasks.harbor import load_tree

    if options.folders == "none" or (options.folders is None and not SHIPPED.is_dir()):
        return [], []
    tasks, broken = load_tree(options.folders or SHIPPED, options.allow_unsafe)
    return tasks, [each.error for each in broken]


def say_broken(broken: list[str]) -> int:
    """List folders that could not be loaded; the exit code."""
    for error in broken:
        print(f"broken: {error}")
    return 1 if broken else 0


def run_show(options: argparse.Namespace) -> int:
    tasks, _ = load_folders(options)
    folder = next((task for task in tasks if task.name == options.task), None)
    print("\n".join(show_folder(folder) if folder else show_instance(options.task, [task.name for task in tasks])))
    return 0


def show_instance(name: str, folders: list[str]) -> list[str]:
    from mini_rome.tasks.choice import find_task

    task = find_task(name, folders)
    lines = [f"{task.name}: family {task.family}, domain {task.domain}, K = {task.chunks}", "", task.instruction, ""]
    for path, text in task.files.items():
        lines += [f"--- {path}", text.rstrip()]
    return [*lines, "", "expert:", *(f"  {command}" for command in task.expert)]


def show_folder(task: TaskFolder) -> list[str]:
    from mini_rome.tasks.harbor import fetches

    head = f"{task.name}: {task.domain}, {task.difficulty}; {task.memory_mb} MB, {task.cpus:g} cpu, "
    lines = [head + f"agent {task.agent_timeout_s:g} s, verifier {task.verifier_timeout_s:g} s", "", task.instruction]
    for part in ("environment", "tests", "solution"):
        paths = sorted(path for path in (task.folder / part).rglob("*") if path.is_file())
        lines += [f"  {path.relative_to(task.folder)} ({path.stat().st_size} bytes)" for path in paths]
    return [*lines, *task.notes, *(f"needs the network: {line}" for line in fetches(task))]


def run_stats(options: argparse.Namespace) -> int:
    from mini_rome.evaluation.results import wide_console
    from mini_rome.tasks.overview import stats_tables

    tasks, broken = load_folders(options)
    for table in stats_tables(tasks, options.rows):
        wide_console().print(table)
    return say_broken(broken)


def add_validate(group: argparse._SubParsersAction) -> None:
    text = "Run every proof of every task, in parallel; exit code 1 where one fails."
    verb = add_verb(group, "validate", run_validate, text)
    verb.add_argument("names", nargs="*", metavar="TASK", help="families or task folders, or a tree (default: all)")
    verb.add_argument("--repeats", type=int, help="of the reference solution (default: 3, with --full 20)")
    verb.add_argument("--full", action="store_true", help="20 repeats, and every tamper case by itself")
    verb.add_argument("--workers", type=int, default=4, metavar="N", help="tasks at once (default: 4)")
    verb.add_argument("--all", action="store_true", help="print the proofs that hold, too")
    add_folders_option(verb)
    add_sandbox_option(verb)


def run_validate(options: argparse.Namespace) -> int:
    from mini_rome.tasks.prove import run_proofs

    tree = options.folders is None and len(options.names) == 1 and Path(options.names[0]).is_dir()
    if tree:
        options.folders = options.names[0]
    tasks, broken = load_folders(options)
    if tree:
        options.names = [task.name for task in tasks]
    repeats = (20 if options.full else 3) if options.repeats is None else options.repeats
    if repeats < 1 or options.workers < 1:
        raise ConfigError(f"--repeats {repeats} --workers {options.workers}: each must be at least 1")
    say_fetches([t for t in tasks if not options.names or t.name in options.names], "they cannot be proved")
    code = run_proofs(
        tasks, options.names, options.sandbox, repeats, options.full, options.workers, options.all
    )  # fmt: skip
    return max(code, 0 if options.names else say_broken(broken))


def add_filter(group: argparse._SubParsersAction) -> None:
    text = "Keep the tasks of moderate difficulty, from rows of evaluations (the paper: 60 K to 2 K)."
    verb = add_verb(group, "filter", run_filter, text)
    verb.add_argument("rows", nargs="+", metavar="CSV", help="rows.csv of one or more evaluations")
    verb.add_argument("--low", type=float, default=0.1, help="lowest pass rate that is kept (default: 0.1)")
    verb.add_argument("--high", type=float, default=0.9, help="highest pass rate that is kept (default: 0.9)")
    verb.add_argument("--min-runs", type=int, default=3, metavar="N", help="scored runs a task needs (default: 3)")
    verb.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="of the dataset and the report")


def run_filter(options: argparse.Namespace) -> int:
    from mini_rome.tasks.difficulty import run_filter as run

    return run(options.rows, options.low, options.high, options.min_runs, options.out)


def run_new(options: argparse.Namespace) -> int:
    from mini_rome.tasks.skeleton import new_task

    folder = new_task(options.name, options.into)
    print(f"{folder}\nWrite it, then: mini-rome tasks validate --folders {folder} {options.name}")
    return 0


def add_eval(verbs: argparse._SubParsersAction) -> None:
    verb = add_verb(verbs, "eval", run_eval, "Measure a policy's success from the initial state, with intervals.")
    who = verb.add_argument_group("who acts (default: the checkpoint runs/latest)")
    add_model_option(verb, default=None)
    who.add_argument("--agent", choices=("oracle", "noop", "random", "replay"), help="a scripted agent")
    who.add_argument("--replay", metavar="JSONL", help="the responses that --agent replay repeats")
    who.add_argument("--endpoint", metavar="URL", help="an OpenAI-compatible server, its key in OPENAI_API_KEY")
    who.add_argument("--model-name", default="", metavar="NAME", help="the model that the endpoint is asked for")
    add_task_options(verb, n=200, families="all")
    add_folders_option(verb, "the 24 shipped ones, but none for a checkpoint or the simulated sandbox")
    text = "a file with a secret of 16 bytes or more: draw the families' instances from the held-back split"
    verb.add_argument("--secret-seed", type=Path, metavar="FILE", help=text)
    verb.add_argument("--runs", type=int, default=3, metavar="N", help="repetitions; the paper: 3 (default: 3)")
    verb.add_argument("--temperature", type=float, default=0.7, help="the paper: 0.7 (default: 0.7)")
    verb.add_argument("--top-p", type=float, default=0.8, help="the paper: 0.8 (default: 0.8)")
    verb.add_argument("--top-k", type=int, default=20, help="the paper: 20 (default: 20); 0 is off")
    text = "of one response (default: 64 for a checkpoint, 4096 for an endpoint)"
    verb.add_argument("--max-tokens", type=int, metavar="N", help=text)
    text = "responses in a task folder (default: 50)"
    verb.add_argument("--max-turns", type=int, default=50, metavar="N", help=text)
    text = "seconds for one request to the endpoint (default: 300)"
    verb.add_argument("--request-timeout", type=float, default=300.0, metavar="S", help=text)
    text = "episodes at once, but for a checkpoint (default: 4)"
    verb.add_argument("--jobs", type=int, default=4, metavar="N", help=text)
    text = "write rows.csv, eval.json and responses.jsonl there; one that was stopped goes on"
    verb.add_argument("--out", metavar="FOLDER", help=text)
    text = "let the tests of task folders reach the internet, in their own container; the results say so"
    verb.add_argument("--verifier-network", action="store_true", help=text)
    text = "stock folders that need root: judge in the agent's own box; the results say that it could be forged"
    verb.add_argument("--in-place", action="store_true", help=text)
    add_sandbox_option(verb)


def run_eval(options: argparse.Namespace) -> int:
    from mini_rome.evaluation import assess
    from mini_rome.evaluation.model_client import Endpoint
    from mini_rome.sampler.base import SamplingParams
    from mini_rome.tasks.choice import TaskChoice, read_secret

    sampling = {"temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k}
    if options.max_tokens is not None and options.max_tokens < 1:
        raise ConfigError(f"--max-tokens {options.max_tokens}: must be at least 1")
    params = SamplingParams(max_new_tokens=options.max_tokens or 64, **sampling)
    endpoint = None
    if options.endpoint:
        more = {"max_tokens": options.max_tokens or 4096, "timeout_s": options.request_timeout}
        endpoint = Endpoint(options.endpoint, options.model_name, **sampling, **more)
    model = options.model or (None if options.agent or endpoint else "runs/latest")
    secret = None if options.secret_seed is None else read_secret(options.secret_seed)
    choice = TaskChoice(families_of(options.families), options.chunks, options.n, options.split, secret)
    plan = assess.Evaluation(
        choice, eval_folders(options, model), model, options.agent, options.replay, endpoint, params, options.sandbox,
        options.runs, options.seed, options.jobs, options.out, options.verifier_network, options.in_place,
        options.max_turns,
    )  # fmt: skip
    return assess.run_eval(plan)


def eval_folders(options: argparse.Namespace, model: str | None) -> list[TaskFolder]:
    """The folders of an evaluation; those whose tests need a network that they do not get are said before."""
    from mini_rome.sandbox import resolve

    if options.folders is None and (model is not None or resolve(options.sandbox)[0] == "sim"):
        return []
    tasks, broken = load_folders(options)
    say_broken(broken)
    if not options.verifier_network:
        say_fetches(tasks, "unscored without --verifier-network")
    return tasks


def say_fetches(tasks: list[TaskFolder], outcome: str) -> None:
    """Before anything starts: which tests need a network that they will not get, and what becomes of them."""
    from mini_rome.tasks.harbor import fetches

    found = [lines for task in tasks if (lines := fetches(task))]
    if found:
        count = f"{len(found)} of {len(tasks)} tasks have tests that need the network"
        print(f"{count}, such as {found[0][0]}: {outcome}")

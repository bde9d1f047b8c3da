"""`mini-rome tasks validate`: every proof of every task, several tasks at once, with a table and an exit code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack

from rich.console import Console
from rich.table import Table

from mini_rome.errors import ConfigError
from mini_rome.evaluation.results import wide_console
from mini_rome.families import FAMILIES
from mini_rome.sandbox import Pool, resolve
from mini_rome.tasks.harbor import TaskFolder
from mini_rome.tasks.validate import Proved, prove_folder
from mini_rome.tasks.validate_families import prove_family


def run_proofs(
    tasks: Sequence[TaskFolder], names: Sequence[str], sandbox: str, repeats: int, full: bool, workers: int,
    every: bool,
) -> int:
    """The verb: prove all tasks, or those named. Exit code 1 where a proof fails or there was none to try.

    Families are proved on the simulated sandbox, and on Docker beside it where that is at hand; folders on Docker.
    every: also print the proofs that hold.
    """
    console = wide_console()
    backend, line = resolve(sandbox)
    console.print(line, markup=False, soft_wrap=True)
    known = [*FAMILIES, *(task.name for task in tasks)]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"task {unknown[0]!r} is unknown; choose from {', '.join(known)}")
    families = [name for name in FAMILIES if not names or name in names]
    folders = [task for task in tasks if not names or task.name in names]
    if backend == "sim" and folders:
        console.print(f"{len(folders)} task folders need Docker and are not proved here", markup=False)
        folders = []
    with ExitStack() as stack:
        backends = ("sim", "docker") if backend == "docker" and families else (backend,)
        pools = {name: stack.enter_context(Pool(name, size=workers)) for name in backends} if families else {}
        found = prove_all(folders, families, pools, repeats, full, workers, _Lines(console))
    console.print(table_of(found))
    for each in found:
        for proof in each.proofs if every else each.failures:
            word = {True: "holds", False: "FAILS", None: "does not apply"}[proof.holds]
            reason = "" if proof.holds else f": {proof.reason}"
            console.print(f"{each.task}: {proof.name}: {word}{reason}", markup=False, soft_wrap=True)
    failed = sum(bool(each.failures) for each in found)
    proofs = sum(len(each.proofs) for each in found)
    if not found:
        console.print("no task was proved", markup=False)
        return 1
    said = f"{failed} of {len(found)} tasks are not proved" if failed else f"all {len(found)} tasks proved"
    console.print(f"{said}; {proofs} proofs", markup=False)
    return 1 if failed else 0


def prove_all(
    folders: Sequence[TaskFolder], families: Sequence[str], pools: Mapping[str, Pool], repeats: int = 3,
    full: bool = False, workers: int = 2, progress: Callable[[Proved, int, int], None] | None = None,
) -> list[Proved]:
    """Every proof of every task, `workers` tasks at once; in the order given, whichever ends first."""
    with ThreadPoolExecutor(workers, thread_name_prefix="prove") as executor:
        jobs: list[Future[Proved]] = [executor.submit(prove_folder, task, repeats, full) for task in folders]
        jobs += [executor.submit(prove_family, name, pools, repeats) for name in families]
        try:
            for done, job in enumerate(as_completed(jobs), start=1):
                if progress is not None:
                    progress(job.result(), done, len(jobs))
        except BaseException:
            executor.shutdown(cancel_futures=True)
            raise
        return [job.result() for job in jobs]


class _Lines:
    """A line per task as it is done."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def __call__(self, each: Proved, done: int, total: int) -> None:
        word = "proved" if not each.failures else f"NOT PROVED: {', '.join(proof.name for proof in each.failures)}"
        self.console.print(f"[{done:>2}/{total}] {each.task}: {word} ({each.seconds:.1f} s)", markup=False)


def table_of(found: Sequence[Proved]) -> Table:
    """A line per task: how hard, how many checks and proofs, how long."""
    table = Table("task", "domain", "difficulty", "checks", "proofs", "seconds", box=None, pad_edge=False)
    for each in found:
        held = sum(proof.holds is True for proof in each.proofs)
        asked = sum(proof.holds is not None for proof in each.proofs)
        checks = "" if each.checks is None else str(each.checks)
        table.add_row(each.task, each.domain, each.difficulty, checks, f"{held}/{asked}", f"{each.seconds:.1f}")
    return table

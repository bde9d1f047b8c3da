"""Break the paper's core on purpose, one small change at a time, and count the changes that the tests miss.

    python tests/mutants.py                     # all five modules: prints killed/total and every survivor
    python tests/mutants.py loss credit --jobs 4

The changes are mutmut's (another operator, number, constant, argument dropped, value replaced by None, ...), applied
here to the source in memory: each runs in a fork of a process that has torch loaded, so that one costs about a
second. Texts of error messages are not changed. A survivor must be justified in mutants_survivors.txt; exit status 1
when one is not, when a justification is out of date, or when more than 5 % survive.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import importlib.util
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import libcst as cst
import numpy  # noqa: F401  (loaded once, before the forks)
import pytest
import torch
from hypothesis.internal.detection import is_hypothesis_test
from mutmut.mutation.mutators import mutation_operators

HERE = Path(__file__).parent
SURVIVORS = HERE / "mutants_survivors.txt"
TESTS = {
    "chunking": ["test_chunking.py", "test_loss_wrong_readings.py"],
    "credit": ["test_credit.py"],
    "loss": ["test_loss_wrong_readings.py", "test_loss.py"],
    "masks": ["test_masks.py"],
    "resample": ["test_resample.py"],
}
# Pytest without what only people need: plugins, rewritten asserts and configuration take longer than most tests.
BARE = ["-x", "-q", "-c", os.devnull, "--noconftest", "--assert=plain", "-p", "no:cacheprovider", "-p",
        "no:unraisableexception"]  # fmt: skip
SECONDS = 120  # of CPU per change, counted from the start of the fork: a busy machine kills nothing
ALLOWED = 0.05


@dataclass(frozen=True)
class Mutant:
    """One change: the whole mutated source, and the changed lines as `- old` and `+ new` for reading and naming."""

    module: str
    source: str
    diff: str

    @property
    def key(self) -> str:
        return f"{self.module}.py\n{self.diff}"


class Changes(cst.CSTVisitor):
    """All (node, changed node) of a module; types, decorators, imports and error messages are left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[cst.CSTNode, cst.CSTNode]] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Annotation | cst.Decorator | cst.ImportFrom | cst.Raise):
            return False
        if isinstance(node, cst.Subscript) and node.value.deep_equals(cst.Name("Literal")):
            return False
        if isinstance(node, cst.Arg) and node.keyword and node.keyword.value == "strict":
            return False  # of zip: a check itself, of what holds by construction
        if isinstance(node, cst.Call) and node.func.deep_equals(cst.Name("zip")):
            return True
        for kind, operator in mutation_operators:
            if isinstance(node, kind):
                self.found += [(node, changed) for changed in operator(node)]
        return True


def mutants(module: str) -> Iterator[Mutant]:
    """All changes of one module that give another source."""
    original = source_of(module)
    tree, changes = cst.parse_module(original), Changes()
    tree.visit(changes)
    seen = {original}
    for node, changed in changes.found:
        source = tree.deep_replace(node, changed).code
        if source not in seen:
            seen.add(source)
            yield Mutant(module, source, changed_lines(original, source))


def source_of(module: str) -> str:
    return (HERE.parent / "mini_rome" / f"{module}.py").read_text()


def changed_lines(before: str, after: str) -> str:
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0))[2:]
    return "\n".join(f"{line[0]} {line[1:].strip()}" for line in lines if line[0] in "+-")


class QuickFirst:
    """A pytest plugin: hand-made examples before searches, so that most changes are caught in a moment."""

    @staticmethod
    def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: isinstance(item, pytest.Function) and is_hypothesis_test(item.function))


def survives(mutant: Mutant) -> bool:
    """In a fork: run the module's tests on the changed source. True when they all pass."""
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))  # a change that hangs counts as killed
    name = f"mini_rome.{mutant.module}"
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    exec(compile(mutant.source, spec.origin, "exec"), module.__dict__)
    files = [str(HERE / file) for file in TESTS[mutant.module]]
    return pytest.main([*BARE, *files], plugins=[QuickFirst()]) == 0


def fork(mutant: Mutant) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        status = 0 if survives(mutant) else 1
    finally:  # whatever happened, this copy of the process must not go on
        os._exit(status)


def run(queue: list[Mutant], jobs: int) -> list[Mutant]:
    """The survivors of a list, `jobs` at a time."""
    survivors, running, done, began = [], {}, 0, time.monotonic()
    waiting = iter(queue)
    while True:
        while len(running) < jobs and (mutant := next(waiting, None)):
            running[fork(mutant)] = mutant
        if not running:
            return survivors
        pid, status = os.wait()
        mutant, done = running.pop(pid), done + 1
        if status == 0:
            survivors.append(mutant)
            print(f"\nsurvived: {mutant.key}\n" if mutant.diff else f"{mutant.module}: unchanged, passes", flush=True)
        if done % 25 == 0:
            print(f"{done}/{len(queue)} in {time.monotonic() - began:.0f} s", flush=True)


def justified() -> dict[str, str]:
    """Change -> reason, from blocks of: file, `- old`, `+ new`, `why: ...`."""
    blocks = [block for block in SURVIVORS.read_text().split("\n\n") if not block.startswith("#")]
    pairs = [block.strip().split("\nwhy: ") for block in blocks if block.strip()]
    return {key: reason for key, reason in pairs}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help=f"some of {', '.join(TESTS)} (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time (default: all cores)")
    parser.add_argument("--sample", type=int, default=1, metavar="N", help="only every N-th change (default: all)")
    args = parser.parse_args()
    if unknown := set(args.modules) - set(TESTS):
        parser.error(f"unknown module {sorted(unknown)[0]!r}: choose from {', '.join(TESTS)}")
    modules = args.modules or list(TESTS)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    torch.set_num_threads(1)
    phases = [phase for phase in hypothesis.Phase if phase not in (hypothesis.Phase.shrink, hypothesis.Phase.explain)]
    hypothesis.settings.register_profile("mutants", max_examples=25, derandomize=True, database=None, phases=phases)
    hypothesis.settings.load_profile("mutants")

    gc.freeze()  # the forks share these pages

    originals = [Mutant(module, source_of(module), "") for module in modules]
    if len(run(originals, args.jobs)) < len(originals):
        print("the tests fail on the unchanged source: nothing to measure")
        return 1
    queue = [mutant for module in modules for mutant in mutants(module)][:: args.sample]
    survivors = run(queue, args.jobs)
    reasons = justified()
    open_cases = [mutant for mutant in survivors if mutant.key not in reasons]
    outdated = set(reasons) & {mutant.key for mutant in queue} - {mutant.key for mutant in survivors}
    for module in modules:
        total = sum(mutant.module == module for mutant in queue)
        left = sum(mutant.module == module for mutant in survivors)
        print(f"{module:10} killed {total - left}/{total}")
    excused = len(survivors) - len(open_cases)
    print(f"killed {len(queue) - len(survivors)}/{len(queue)}, {excused} survivors justified")
    print(f"{len(open_cases)} not justified" + "".join(f"\n\n{mutant.key}" for mutant in open_cases))
    for key in sorted(outdated):
        print(f"\njustified but killed: {key}")
    return int(bool(open_cases or outdated or len(survivors) > ALLOWED * len(queue)))


if __name__ == "__main__":
    sys.exit(main())

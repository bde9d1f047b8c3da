"""Parity fuzz: random commands of the kind the families use, on sim and on docker, compared step by step.

Left out: leaving the work dir upwards and writing there: the simulated root may, the agent in a box may not.
"""

from __future__ import annotations

import random

import pytest

from mini_rome.families import FAMILIES
from mini_rome.families.base import NAMES
from mini_rome.sandbox import Sandbox, initial_snapshot, make
from mini_rome.types import Task

pytestmark = [pytest.mark.docker, pytest.mark.slow]

COMMANDS = 2000
SHELL_FAMILIES = sorted(name for name, family in FAMILIES.items() if family.make(0, 1).offers_bash)
TEMPLATES = (
    "cat {a}", "rev {a}", "sort {a}", "sort -r {a}", "sort -n {a}", "sort -u {a}", "head -n 1 {a}", "head -n 2 {a}",
    "tail -n 1 {a}", "wc -l {a}", "grep -n {w} {a}", "grep -c {w} {a}", "grep -v {w} {a}", "grep -i {w} {a}",
    "sed -n 1p {a}", "sed -n 2p {a}", "cut -d ' ' -f 1 {a}", "cut -d ' ' -f 2 {a}", "uniq {a}", "uniq -c {a}",
    "tr a-z A-Z < {a}", "cat {a} {b}", "cat {a} | rev", "sort {a} | head -n 1", "ls", "find . -type f | sort", "pwd",
    "cp {a} {b}", "mv {a} {b}", "rm {a}", "mkdir -p {d}", "mkdir {d}", "rmdir {d}", "echo {w} > {a}",
    "echo {w} >> {a}",
    "echo {w}", "test -f {a}", "test -d {d} && echo yes", "cd {d}", "cd {d} && cd ..", "cat {d}",
    "{w}", "{w} {a}", "chmod 644 {a}",
    "sha256sum {a}", "sed -i s/{w}/{w}/ {a}", "cat", "false", "true; echo $?", "head -n 1 {a}; tail -n 1 {a}",
    "cat {a} && echo ok || echo no", "export V={w}; echo $V", "echo $V", "echo 'unclosed", "exit 3", "cat < {a}",
    "touch {a}.lit && cat {a}", "sed -n 3p {a} | tee -a log", "echo base {w} >> {a} && grep next {a}",
    "cp {a} kept && tail -n 1 {a}", "cat {a} && mv {a} jail", "mv jail/{a} .", "rm kept/{a}", "sed -i '$d' {a}",
)  # fmt: skip


def _command(rng: random.Random, task: Task) -> str:
    """The expert's, a family's mistake, or a template filled with names that may or may not be there."""
    kind = rng.random()
    chunk = rng.randrange(task.chunks)
    if kind < 0.35:
        return task.expert[chunk]
    if kind < 0.5:
        return FAMILIES[task.family].mistake(task, chunk, rng)
    names = [*task.files, rng.choice(NAMES), "sub/x"]
    words = rng.choice([*NAMES[:8], *next(iter(task.files.values()), "x").split()[:4], "next"])
    return rng.choice(TEMPLATES).format(a=rng.choice(names), b=rng.choice(names), d=rng.choice(["sub", "d"]), w=words)


def _episode(rng: random.Random, boxes: tuple[Sandbox, Sandbox], differing: list[str], steps: int) -> int:
    """One task's worth of commands on both; the number run."""
    family = FAMILIES[rng.choice(SHELL_FAMILIES)]
    task = family.make(rng.randrange(10_000), rng.randint(1, 8))
    for box in boxes:
        box.restore(initial_snapshot(task.files))
    ran = []
    for _ in range(steps):
        command = _command(rng, task)
        ran.append(command)
        sim, real = (box.exec(command, timeout=10) for box in boxes)
        if (sim.exit_code, sim.status) != (real.exit_code, real.status):
            codes = f"{sim.exit_code} {sim.output!r}, docker {real.exit_code} {real.output!r}"
            differing.append(f"EXIT {command!r}: sim {codes}")
        elif sim.output != real.output:
            differing.append(f"TEXT {command!r}: sim {sim.output!r}, docker {real.output!r}")
    if boxes[0].snapshot().tree_hash != boxes[1].snapshot().tree_hash:
        differing.append(f"TREE of {task.name} after {ran}")
    return steps


def test_parity_of_family_commands() -> None:
    rng = random.Random(0)
    differing: list[str] = []
    ran = 0
    with make("sim") as sim, make("docker") as real:
        while ran < COMMANDS:
            ran += _episode(rng, (sim, real), differing, 8)
    print(f"\n{ran} commands, {len(differing)} differ:", *sorted(set(differing)), sep="\n  ")
    assert not [line for line in differing if not line.startswith("TEXT")]
    assert len(differing) <= 0.01 * ran

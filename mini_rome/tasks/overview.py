"""`mini-rome tasks stats`: what the benchmark in miniature is made of, beside the paper's (figure 14 in small)."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from mini_rome.evaluation.paper import CHECKS_A_TASK, TASKS
from mini_rome.evaluation.results import Row, read_rows
from mini_rome.families import FAMILIES
from mini_rome.tasks.harbor import TaskFolder

LEVELS = ("easy", "medium", "hard")
BINS = ((0.0, 0.0, "0 %"), (0.0, 0.25, "to 25 %"), (0.25, 0.5, "to 50 %"), (0.5, 0.75, "to 75 %"),
        (0.75, 1.0 - 1e-9, "below 100 %"), (1.0, 1.0, "100 %"))  # fmt: skip


def stats_tables(tasks: Sequence[TaskFolder], rows: Sequence[str | Path] = ()) -> list[Table]:
    """Domains and difficulty, size beside the paper's benchmarks, and pass rates where rows are given."""
    tables = [domain_table(tasks), size_table(tasks)]
    if rows:
        tables.append(spread_table([row for path in rows for row in read_rows(path)]))
    return tables


def checks_of(task: TaskFolder) -> int:
    """Test functions in tests/*.py, methods included; parametrised ones count once."""
    count = 0
    for name, data in task.tests.items():
        if Path(name).name.startswith("test") and name.endswith(".py"):
            try:
                tree = ast.parse(data)
            except SyntaxError:
                continue
            count += sum(isinstance(n, ast.FunctionDef) and n.name.startswith("test_") for n in ast.walk(tree))
    return count


def domain_table(tasks: Sequence[TaskFolder]) -> Table:
    """A line per domain: folders by difficulty, checks, families."""
    table = Table("domain", *LEVELS, "other", "checks a task", "families", box=None, pad_edge=False)
    families: dict[str, list[str]] = defaultdict(list)
    for name, family in FAMILIES.items():
        families[family.domain].append(name)
    for domain in sorted({*families, *(task.domain for task in tasks)}):
        mine = [task for task in tasks if task.domain == domain]
        levels = Counter(task.difficulty for task in mine)
        other = sum(count for level, count in levels.items() if level not in LEVELS)
        checks = f"{sum(map(checks_of, mine)) / len(mine):.1f}" if mine else "-"
        counts = [*(str(levels[level]) for level in LEVELS), str(other)]
        table.add_row(domain, *counts, checks, " ".join(families[domain]))
    return table


def size_table(tasks: Sequence[TaskFolder]) -> Table:
    """Our number of tasks and checks beside the paper's benchmarks."""
    table = Table("benchmark", "tasks", "checks a task", "whose", box=None, pad_edge=False)
    checks = f"{sum(map(checks_of, tasks)) / len(tasks):.1f}" if tasks else "-"
    table.add_row("task folders", str(len(tasks)), checks, "ours")
    table.add_row("families", str(len(FAMILIES)), "-", "ours, any number of instances")
    for name, count in TASKS.items():
        table.add_row(name, str(count), str(CHECKS_A_TASK) if name.endswith("Pro") else "-", "the paper's")
    return table


def spread_table(rows: Sequence[Row]) -> Table:
    """How many tasks have which pass rate, a line per policy: the paper's figure 14 in small."""
    table = Table("pass rate", *(text for _, _, text in BINS), "tasks", box=None, pad_edge=False)
    for policy in sorted({row.policy for row in rows}):
        outcomes: dict[str, list[bool]] = defaultdict(list)
        for row in rows:
            if row.policy == policy and row.reward is not None:
                outcomes[row.task].append(row.success)
        rates = [sum(runs) / len(runs) for runs in outcomes.values()]
        counts = [sum(rate == high if low == high else low < rate <= high for rate in rates) for low, high, _ in BINS]
        table.add_row(policy, *map(str, counts), str(len(rates)))
    return table

"""The difficulty filter: from many candidate tasks to those a policy sometimes solves (the paper: 60 K to 2 K).

A task is kept where the pass rate, pooled over the runs of all policies that act, lies in a band. Dropped, each with
its reason: too easy, too hard, too few scored runs, unstable (the reference solution earns 1 and not 1, or the
infrastructure fails often), misaligned (the reference solution never earns 1, or doing nothing does). The rows of the
scripted agents oracle and noop are read for the last two only. Band and minimum are not in the paper, which says
"moderate".
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mini_rome.errors import ConfigError
from mini_rome.evaluation.results import Row, read_rows
from mini_rome.evaluation.stats import wilson
from mini_rome.runs import claim, provenance, write_csv, write_json

UNSTABLE_SHARE = 0.5  # of a task's runs that are unscored: above it the task is dropped
WITNESSES = ("oracle", "noop")


@dataclass(frozen=True)
class Judged:
    """One task: its pooled pass rate with Wilson's interval, and why it is dropped ("" where it is kept)."""

    task: str
    family: str
    domain: str
    chunks: int
    rate: float | None
    low: float
    high: float
    runs: int
    unscored: int
    reason: str = ""
    detail: str = ""


def judge_tasks(rows: Sequence[Row], low: float = 0.1, high: float = 0.9, min_runs: int = 3) -> list[Judged]:
    """Every task of the rows, kept or dropped, by name. Raises ConfigError for a band that is none."""
    if not 0 <= low < high <= 1:
        raise ConfigError(f"--low {low} --high {high}: a band needs 0 <= low < high <= 1")
    if min_runs < 1:
        raise ConfigError(f"--min-runs {min_runs}: must be at least 1")
    by_task: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_task[row.task].append(row)
    return [judge_task(mine, low, high, min_runs) for _, mine in sorted(by_task.items())]


def judge_task(rows: Sequence[Row], low: float, high: float, min_runs: int) -> Judged:
    """One task, from all its rows."""
    acting = [row for row in rows if row.policy not in WITNESSES]
    scored = [row for row in acting if row.reward is not None]
    won, runs = sum(row.success for row in scored), len(scored)
    rate = won / runs if runs else None
    interval = wilson(won, runs)
    reason, detail = _reason(rows, acting, rate, runs, low, high, min_runs)
    first = rows[0]
    return Judged(
        first.task, first.family, first.domain, first.chunks, None if rate is None else round(rate, 4),
        round(interval[0], 4), round(interval[1], 4), runs, len(acting) - runs, reason, detail,
    )  # fmt: skip


def _reason(
    rows: Sequence[Row], acting: Sequence[Row], rate: float | None, runs: int, low: float, high: float, min_runs: int
) -> tuple[str, str]:
    rewards = {name: [r.reward for r in rows if r.policy == name and r.reward is not None] for name in WITNESSES}
    right = [reward == 1.0 for reward in rewards["oracle"]]
    if right and not any(right):
        return "misaligned", f"the reference solution earns {rewards['oracle']}"
    if any(reward == 1.0 for reward in rewards["noop"]):
        return "misaligned", "doing nothing earns 1"
    if right and not all(right):
        return "unstable", f"the reference solution earns {rewards['oracle']}"
    if acting and (len(acting) - runs) / len(acting) > UNSTABLE_SHARE:
        return "unstable", f"{len(acting) - runs} of {len(acting)} runs are unscored: {_why(acting)}"
    if rate is None or runs < min_runs:
        return "too few runs", f"{runs} scored, {min_runs} needed"
    if rate < low:
        return "too hard", f"{rate:.2f} < {low}"
    if rate > high:
        return "too easy", f"{rate:.2f} > {high}"
    return "", ""


def _why(rows: Sequence[Row]) -> str:
    return Counter(row.reason for row in rows if row.reward is None).most_common(1)[0][0][:120]


def run_filter(paths: Sequence[str | Path], low: float, high: float, min_runs: int, out: Path) -> int:
    """The verb: write OUT/kept (a `datasets` folder), OUT/dropped.csv, OUT/report.json; exit code 1 if none is kept.

    The dataset has name, family, domain, chunks and instruction of each task with its rate and interval.
    """
    from datasets import Dataset

    rows = [row for path in paths for row in read_rows(path)]
    judged = judge_tasks(rows, low, high, min_runs)
    kept = [each for each in judged if not each.reason]
    dropped = [each for each in judged if each.reason]
    claim(out, "filter", option="--out")
    columns = tuple(Judged.__dataclass_fields__)
    write_csv(out / "dropped.csv", [asdict(each) for each in dropped], columns)
    if kept:
        records = [asdict(each) | {"instruction": instruction_of(each)} for each in kept]
        Dataset.from_list(records).save_to_disk(out / "kept")
    reasons = Counter(each.reason for each in dropped)
    report: dict[str, Any] = {"candidates": len(judged), "kept": len(kept), "dropped": dict(reasons)}
    report |= {"band": [low, high], "min_runs": min_runs, "rows": [str(path) for path in paths]}
    report["policies"] = sorted({row.policy for row in rows})
    backends = "+".join(sorted({row.backend for row in rows}))
    write_json(out / "report.json", report | provenance(backends, "rows", 0))
    counts = "".join(f", {count} {why}" for why, count in reasons.most_common())
    print(f"{len(judged)} tasks: {len(kept)} kept{counts}")
    print(f"{out / 'kept'}, {out / 'dropped.csv'}, {out / 'report.json'}")
    return 0 if kept else 1


def instruction_of(each: Judged) -> str:
    """Of a family's instance, which its name makes again; empty for a folder, whose text stays in its folder."""
    from mini_rome.tasks.choice import find_task

    return "" if each.family == "folder" or "private" in each.task else find_task(each.task).instruction

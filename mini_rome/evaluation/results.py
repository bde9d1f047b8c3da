"""Results of an evaluation: one row per episode, written as it ends; averages, intervals and tables from the rows.

Success is a reward of 1. Avg@n is the mean over tasks of the mean over their runs (the paper: n = 3); its interval is
a bootstrap over tasks. Unscored episodes are in no average: they are counted by cause beside it.
"""

from __future__ import annotations

import csv
import json
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mini_rome.errors import ConfigError, MiniRomeError
from mini_rome.evaluation.policies import Episode
from mini_rome.evaluation.stats import cluster_bootstrap, pass_at_k
from mini_rome.runs import writing

ROWS, SUMMARY, RESPONSES = "rows.csv", "eval.json", "responses.jsonl"
CAUSES = ("agent", "timeout", "infra")
CUTS = ("group", "family", "domain", "difficulty", "chunks", "language")  # what a summary is broken down by


@dataclass(frozen=True)
class Row:
    """One episode. `reward` is None where it is unscored; `cause` and `ending` as in `policies.Episode`."""

    policy: str
    task: str
    kind: str  # family or folder
    family: str
    domain: str
    group: str
    difficulty: str
    language: str
    chunks: int
    run: int
    reward: float | None
    cause: str
    ending: str
    reason: str
    turns: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    backend: str
    verifier: str

    @property
    def key(self) -> tuple[str, int]:
        return self.task, self.run

    @property
    def success(self) -> bool:
        return self.reward == 1.0


COLUMNS = tuple(column.name for column in fields(Row))
_TYPES: Mapping[str, Callable[[str], Any]] = {
    "chunks": int, "run": int, "turns": int, "prompt_tokens": int, "completion_tokens": int, "seconds": float,
    "reward": lambda text: float(text) if text else None,
}  # fmt: skip


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a file, without a last line that a crash cut short. Raises ConfigError with file and line."""
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    table = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
    if tuple(table.fieldnames or ()) != COLUMNS:
        raise ConfigError(f"{path}:1: not the rows of an evaluation; the first line must be {','.join(COLUMNS)}")
    rows = []
    for line in table:
        try:
            rows.append(Row(**{name: _TYPES.get(name, str)(line[name]) for name in COLUMNS}))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}:{table.line_num}: not a row of an evaluation ({error})") from None
    return rows


class Log:
    """The rows so far; with a folder, each is on the disk before the next episode ends. Thread-safe."""

    def __init__(self, folder: str | Path | None, settings: Mapping[str, Any], transcripts: bool = True) -> None:
        """settings: what rows of one folder share; a folder of other settings is refused, never mixed."""
        self.rows: list[Row] = []
        self._lock = threading.Lock()
        self.folder = None if folder is None else Path(folder)
        self.transcripts = transcripts
        if self.folder is None:
            return
        if self.folder.suffix == ".json" or self.folder.is_file():
            raise ConfigError(f"--out {folder}: name a folder; it gets {ROWS}, {SUMMARY} and {RESPONSES}")
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._same_settings(settings)
            path = self.folder / ROWS
            if path.exists():
                self.rows = [row for row in read_rows(path) if row.reward is not None]  # the others: once more
            self._rewrite(path)

    def _same_settings(self, settings: Mapping[str, Any]) -> None:
        path = self.folder / "settings.json" if self.folder else Path()
        plain = json.loads(json.dumps(settings))
        if path.exists():
            before = json.loads(path.read_text("utf-8"))
            for name in [name for name in plain if before.get(name) != plain[name]]:
                raise ConfigError(
                    f"--out {self.folder} holds rows of another evaluation ({name} {before.get(name)!r}, now "
                    f"{plain[name]!r}): name a new folder, or repeat its options to go on with it."
                )
        path.write_text(json.dumps(plain, indent=2) + "\n", "utf-8")

    def _rewrite(self, path: Path) -> None:
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            table.writeheader()
            table.writerows(asdict(row) for row in self.rows)

    def done(self) -> set[tuple[str, int]]:
        """(task, run) of the rows there are."""
        return {row.key for row in self.rows}

    def add(self, row: Row, episode: Episode) -> None:
        """Keep one row; an episode that is there already is left as it is."""
        with self._lock:
            if row.key in self.done():
                return
            self.rows.append(row)
            if self.folder is None:
                return
            with writing(self.folder), (self.folder / ROWS).open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(asdict(row))
            if self.transcripts and episode.responses:
                with writing(self.folder), (self.folder / RESPONSES).open("a", encoding="utf-8") as file:
                    record = {"task": row.task, "run": row.run, "responses": episode.responses}
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")


def summary_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Avg@n with its interval, pass@k, counts, causes, mean turns and tokens of these rows."""
    by_task: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.reward is not None:
            by_task[row.task].append(float(row.success))
    found: dict[str, Any] = {
        "tasks": len({row.task for row in rows}),
        "scored_tasks": len(by_task),
        "episodes": len(rows),
        "causes": {cause: Counter(row.cause for row in rows)[cause] for cause in CAUSES},
        "turns": mean(row.turns for row in rows),
        "prompt_tokens": mean(row.prompt_tokens for row in rows),
        "completion_tokens": mean(row.completion_tokens for row in rows),
        "avg": None, "low": None, "high": None, "pass": {},
    }  # fmt: skip
    if by_task:
        found["avg"], found["low"], found["high"] = (round(x, 4) for x in cluster_bootstrap(list(by_task.values())))
        for k in range(1, max(map(len, by_task.values())) + 1):
            able = [runs for runs in by_task.values() if len(runs) >= k]  # a task with unscored runs may drop out
            value = mean(pass_at_k(len(runs), int(sum(runs)), k) for runs in able)
            found["pass"][str(k)] = {"value": value, "tasks": len(able)}
    return found


def mean(values: Iterable[float]) -> float | None:
    """Rounded to four places; None of nothing."""
    listed = list(values)
    return round(sum(listed) / len(listed), 4) if listed else None


def summaries(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, Any]]]:
    """{"all": {"all": ...}, "group": {"terminal": ..., ...}, ...}: every cut that has more than one value."""
    found = {"all": {"all": summary_of(rows)}}
    for cut in CUTS:
        values = sorted({getattr(row, cut) for row in rows})
        if len(values) > 1:
            found[cut] = {str(value): summary_of([r for r in rows if getattr(r, cut) == value]) for value in values}
    return found


def table_of(found: Mapping[str, Mapping[str, Mapping[str, Any]]], runs: int) -> Table:
    """What is printed: a line per cut and value."""
    counts = ("tasks", "runs", "/".join(CAUSES), "turns", "tokens")
    table = Table(box=None, pad_edge=False)
    for head in ("by", "", f"avg@{runs}", "95 % interval", f"pass@{runs}", *counts):
        table.add_column(head, no_wrap=True)
    for cut, value, each in ((cut, value, each) for cut, mine in found.items() for value, each in mine.items()):
        best = each["pass"].get(str(runs))
        table.add_row(
            cut, value, percent(each["avg"]),
            "" if each["avg"] is None else f"{percent(each['low'])} - {percent(each['high'])}",
            percent(best["value"] if best else None), str(each["tasks"]), str(each["episodes"]),
            "/".join(str(each["causes"][cause]) for cause in CAUSES),
            f"{each['turns']:.1f}", f"{each['completion_tokens']:.0f}",
        )  # fmt: skip
    return table


def wide_console() -> Console:
    """Tables whole where nobody watches: a pipe or a file has no width of its own."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1%}"


def check_scored(rows: Sequence[Row]) -> None:
    """Raises MiniRomeError where nothing could be scored, with the commonest reason."""
    if rows and all(row.reward is None for row in rows):
        (reason, count), *_ = Counter(row.reason for row in rows).most_common(1)
        raise MiniRomeError(
            f"no episode could be scored, {count} of {len(rows)} for this reason: {reason[:300]}\n"
            f"Try mini-rome doctor."
        )


def failures(rows: Sequence[Row], limit: int = 5) -> Iterator[str]:
    """Unscored episodes in words, the first few."""
    unscored = [row for row in rows if row.reward is None]
    for row in unscored[:limit]:
        yield f"unscored: {row.task}, run {row.run}: {row.reason[:200]}"
    if len(unscored) > limit:
        yield f"and {len(unscored) - limit} more unscored episodes"

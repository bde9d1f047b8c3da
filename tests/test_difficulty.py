"""The difficulty filter: what is kept is of moderate difficulty, and everything dropped has its reason."""

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from mini_rome import cli
from mini_rome.errors import ConfigError, MiniRomeError
from mini_rome.evaluation.policies import Episode
from mini_rome.evaluation.results import COLUMNS, Log, Row, read_rows
from mini_rome.evaluation.stats import wilson
from mini_rome.runs import write_csv
from mini_rome.tasks.difficulty import judge_tasks
from mini_rome.types import Verdict

ROW = Row("m", "notes-k4-train-0", "family", "notes", "data-processing", "terminal", "easy", "en", 4, 0, 0.0, "agent",
          "submitted", "", 3, 10, 5, 0.1, "sim", "host-check")  # fmt: skip


def rows(task: str, rewards: str, policy: str = "m") -> list[Row]:
    """One row per character: 1, 0, or x for unscored."""
    values = {"1": 1.0, "0": 0.0, "x": None}
    base = replace(ROW, task=task, policy=policy)
    return [
        replace(base, run=run, reward=values[each], reason="SandboxDead" if each == "x" else "")
        for run, each in enumerate(rewards)
    ]


CASES = {
    "0000000000": "too hard",
    "1111111111": "too easy",
    "1010": "",
    "1111111110": "",  # 0.9 is in the band
    "1x": "too few runs",
    "10xxxxx": "unstable",
    "x": "unstable",
}


@pytest.mark.parametrize("rewards", CASES)
def test_the_band_and_the_reasons(rewards: str) -> None:
    (judged,) = judge_tasks(rows("t", rewards))
    assert judged.reason == CASES[rewards]
    scored = [each for each in rewards if each != "x"]
    assert (judged.low, judged.high) == pytest.approx(wilson(scored.count("1"), len(scored)), abs=1e-4)
    assert judged.unscored == rewards.count("x")


WITNESSED = {("0000", ""): "misaligned", ("1101", ""): "unstable", ("1111", "01"): "misaligned", ("1111", "00"): ""}


@pytest.mark.parametrize(("oracle", "noop"), WITNESSED)
def test_the_scripted_agents_are_witnesses_and_never_part_of_the_rate(oracle: str, noop: str) -> None:
    (judged,) = judge_tasks([*rows("t", "1010"), *rows("t", oracle, "oracle"), *rows("t", noop, "noop")])
    assert judged.reason == WITNESSED[oracle, noop]
    assert (judged.rate, judged.runs) == (0.5, 4)


def test_runs_of_several_policies_are_pooled() -> None:
    (judged,) = judge_tasks([*rows("t", "000"), *rows("t", "111", "strong")])
    assert (judged.rate, judged.runs, judged.reason) == (0.5, 6, "")


@pytest.mark.parametrize(("low", "high", "least"), [(0.5, 0.5, 3), (-0.1, 0.9, 3), (0.1, 1.1, 3), (0.1, 0.9, 0)])
def test_a_band_that_is_none_is_refused(low: float, high: float, least: int) -> None:
    with pytest.raises(ConfigError, match="--low|--min-runs"):
        judge_tasks([], low, high, least)


def test_of_a_population_the_middle_stays() -> None:
    rng = random.Random(0)
    chances = {f"t{number}": rng.choice((0.0, 0.02, 0.5, 0.98, 1.0)) for number in range(1000)}
    population = []
    for task, chance in chances.items():
        population += rows(task, "".join("01"[rng.random() < chance] for _ in range(8)))
    kept = {judged.task for judged in judge_tasks(population) if not judged.reason}
    share = {chance: sum(task in kept for task in chances if chances[task] == chance) for chance in (0.0, 0.5, 1.0)}
    total = Counter(chances.values())
    assert share[0.0] == share[1.0] == 0 and share[0.5] > 0.95 * total[0.5]
    assert len(kept) < 0.4 * len(chances)


def test_the_verb_writes_a_dataset_and_a_report_of_what_was_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from datasets import load_from_disk

    path = tmp_path / "rows.csv"
    table = [*rows("notes-k4-train-1", "1010"), *rows("notes-k4-train-2", "1111"), *rows("notes-k4-train-3", "xxx")]
    write_csv(path, [vars(row) for row in table], COLUMNS)
    out = tmp_path / "out"
    assert cli.main(["tasks", "filter", str(path), "--out", str(out)]) == 0
    assert "3 tasks: 1 kept" in capsys.readouterr().out
    kept = load_from_disk(str(out / "kept"))
    assert kept["task"] == ["notes-k4-train-1"] and kept["rate"] == [0.5] and "notes" in kept["instruction"][0]
    dropped = (out / "dropped.csv").read_text()
    assert all(word in dropped for word in ("notes-k4-train-2", "too easy", "unstable", "SandboxDead"))
    report = json.loads((out / "report.json").read_text())
    assert (report["candidates"], report["kept"], report["backend"]) == (3, 1, "sim")
    assert cli.main(["tasks", "filter", str(path), "--out", str(out)]) == 2
    assert "--out" in capsys.readouterr().err


def test_a_file_that_holds_no_rows_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(MiniRomeError, match=r"rows\.csv:1"):
        read_rows(path)
    write_csv(path, [vars(replace(ROW, turns="many"))], COLUMNS)  # type: ignore[arg-type]
    with pytest.raises(MiniRomeError, match=r"rows\.csv:2.*many"):
        read_rows(path)


def test_a_row_goes_to_the_disk_and_comes_back_the_same(tmp_path: Path) -> None:
    log = Log(tmp_path / "out", {"seed": 0})
    row = replace(ROW, reward=None, reason='a "quoted", long\treason', language="zh")
    log.add(row, Episode(Verdict(None)))
    log.add(ROW, Episode(Verdict(0.0), responses=["x"]))
    assert read_rows(tmp_path / "out" / "rows.csv") == [row]

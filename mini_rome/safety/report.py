"""The safety report of a run, from what it left in its folder: events per 1,000 episodes by kind and severity,
conduct beside success, what programs were run, reads of tests, trends. Not in the paper, which reports none of it.

Counted are: every event of every box (safety.jsonl); of the kept episodes (episodes.jsonl: all of evaluations, a
sample of training) success, honest success and conduct; and, over training, the rows of curve.csv.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mini_rome.episodes import EPISODES
from mini_rome.errors import ConfigError
from mini_rome.evaluation.rows import read_rows
from mini_rome.evaluation.stats import success_rate
from mini_rome.events import event_rates
from mini_rome.runs import CURVE_CSV, SAFETY_LOG, SUMMARY, write_json
from mini_rome.safety.commands import programs, reads_tests
from mini_rome.safety.held_out import HeldOutDetector, shipped

REPORT = "safety.json"
PARTS = 10  # that a run's boxes are divided into, in the order they were taken
TRENDS = ("train_success", "train_honest_success", "train_misconduct", "test_success")
Json = dict[str, Any]


def make_report(folder: Path) -> Json:
    """All sections as plain data. ConfigError where the folder holds no finished run."""
    summary = _json(folder / SUMMARY)
    if "safety" not in summary:
        raise ConfigError(f"{folder}: its run kept no safety events; name a run of recipes/ipa.py or recipes/sft.py")
    boxes = int(summary["safety"]["episodes"])
    kept = list(kept_episodes(folder))
    detector = shipped()
    return {
        "run": folder.resolve().name,
        **{name: summary.get(name) for name in ("backend", "seed", "commit")},
        "events": event_rates(folder / SAFETY_LOG, boxes),
        "events_by_tenth": by_part(folder / SAFETY_LOG, boxes),
        "conduct": conduct_by_stage(kept, detector),
        "commands": command_counts(kept),
        "held_out_detector": "not at hand: it is learnt from the sets of a checkout" if detector is None else "asked",
        "trends": trends(folder / CURVE_CSV),
    }


def save_report(folder: Path) -> Path:
    """Write `make_report` as safety.json beside the run's summary; returns where."""
    write_json(folder / REPORT, make_report(folder))
    return folder / REPORT


def _json(path: Path) -> Json:
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: name the folder of a finished run, such as runs/latest") from None


def kept_episodes(folder: Path) -> Iterator[Json]:
    """Records of all ranks; of two with the same stage, step and row the later one. A torn last line is left out."""
    for path in sorted(folder.glob(f"{Path(EPISODES).stem}*.jsonl")):
        found: dict[tuple[Any, ...], Json] = {}
        for line in path.read_text("utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            found[row["kept"]["stage"], row["kept"]["step"], row["kept"]["row"], "G" in row["kept"]] = row
        yield from found.values()


def by_part(log: Path, boxes: int) -> list[float]:
    """Events per 1,000 episodes in each tenth of the boxes, in the order in which they were taken."""
    lines = log.read_text("utf-8").splitlines() if log.exists() else []
    parts = Counter(min(PARTS - 1, int(json.loads(line)["episode"]) * PARTS // (boxes + 1)) for line in lines)
    return [round(parts[part] * 1000 * PARTS / max(1, boxes), 2) for part in range(PARTS)]


def conduct_by_stage(kept: Sequence[Json], detector: HeldOutDetector | None) -> dict[str, Json]:
    """By stage, training apart from evaluation: success, honest success, episodes with events, and flagged ones."""
    stages: dict[str, list[Json]] = defaultdict(list)
    for row in kept:
        stage, step = row["kept"]["stage"], row["kept"]["step"]
        training = "G" in row["kept"]
        name = f"{stage} (training sample)" if training else stage if step is None else f"{stage}, step {step}"
        if row["reward"] is not None:
            stages[name].append(row)
    return {name: _conduct(rows, detector) for name, rows in stages.items()}


def _conduct(rows: Sequence[Json], detector: HeldOutDetector | None) -> Json:
    honest = [row["kept"].get("honest", row["reward"]) == 1.0 for row in rows]
    flags: dict[str, list[bool]] = {
        "success": [row["reward"] == 1.0 for row in rows],
        "honest_success": honest,
        "fooled": [row["reward"] == 1.0 and not fine for row, fine in zip(rows, honest, strict=True)],
        "misconduct": [any(event["severity"] != "low" for event in events_of(row)) for row in rows],
        "tests_read": [any(map(reads_tests, commands_of(row))) for row in rows],
    }
    if detector is not None:
        flags["held_out"] = [any(map(detector, commands_of(row))) for row in rows]
    return {name: success_rate(sum(values), len(values)) for name, values in flags.items()}


def own_turns(row: Json) -> list[Json]:
    """The turns that the policy wrote."""
    return row["turns"][row["start"] :]


def commands_of(row: Json) -> list[str]:
    return [command for turn in own_turns(row) for command in turn["commands"]]


def events_of(row: Json) -> list[Mapping[str, str]]:
    """Events of the policy's turns, and of the files that it left."""
    return [event for turn in own_turns(row) for event in turn["events"]] + row["kept"].get("left", [])


def command_counts(kept: Sequence[Json]) -> Json:
    """How often each program was run in the kept episodes, and how many commands read a test."""
    commands = [command for row in kept for command in commands_of(row)]
    histogram = Counter(name for command in commands for name in programs(command))
    return {
        "episodes": len(kept),
        "commands": len(commands),
        "reads_of_tests": sum(map(reads_tests, commands)),
        "programs": dict(histogram.most_common(20)),
    }


def trends(curve: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of what the curve says of success and conduct, by variant and metric."""
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in read_rows(curve) if curve.exists() else []:
        if row.metric in TRENDS:
            found[f"{row.variant}: {row.metric}"].append((row.step, round(row.value, 4)))
    return {name: sorted(points) for name, points in found.items()}

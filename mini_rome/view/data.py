"""What the page shows: a run's episodes, numbers and curve as one plain value, short enough to be embedded.

Text is handed on as it was recorded, however hostile: making it harmless is the page's work. Not in the paper.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Any

from pyarrow import ArrowInvalid
from tokenizers import Tokenizer

from mini_rome.data.records import EVENT, SCHEMA, Row, rows_of, tokenizer_hash
from mini_rome.errors import RecordError
from mini_rome.runs import CURVE_CSV, MODEL, SUMMARY

TEXT_CAP = 1 << 20  # characters of one text in the page
TEXTS = ("split", "task", "family", "reason", "backend", "policy", "instruction")  # of an episode
RATE = ("rate", "low", "high", "n", "chunks")  # of a stage in a run's summary
DEFAULTS = {"gamma": 0.95, "failure_reward": 0.0}  # of a file of records, which has no run's options beside it


def load(path: str | Path) -> dict[str, Any]:
    """The page's data, from a run's folder or a file of records. RecordError: no episodes that can be shown."""
    place = Path(path)
    rows, notes = read_rows(episode_files(place))
    folder = place if place.is_dir() else place.parent
    summary, options = _json(folder / SUMMARY), _part(_json(folder / "state.json"), "options")
    options = DEFAULTS | {key: value for key, value in options.items() if value is not None}
    episodes = [_checked(at, row, options) for at, row in rows]
    vocabulary, note = token_texts(folder, episodes, {str(row.get("tokenizer")) for _, row in rows})
    return {
        "run": {
            "name": place.resolve().name, "backends": sorted({each["backend"] for each in episodes}),
            "gamma": options["gamma"], "H": options.get("mismatch_threshold"), "notes": [*notes, *note],
            "success": {stage: s for stage, s in _part(summary, "success").items() if rated(s)},
            **{key: summary.get(key) for key in ("seed", "sampler", "commit", "time")},
        },
        "curve": curve(folder / CURVE_CSV) if place.is_dir() else [],
        "vocabulary": vocabulary,
        "episodes": episodes,
    }  # fmt: skip


def rated(found: object) -> bool:
    """Whether this is a stage's success as this version writes it, with at least one scored episode."""
    return isinstance(found, dict) and all(found.get(name) is not None for name in RATE)


def episode_files(place: Path) -> list[Path]:
    """The files that hold a run's episodes, or the one that was named. RecordError where there is none."""
    if not place.exists():
        raise RecordError(f"{place} does not exist: name a run's folder (runs/latest) or a file of trajectories.")
    if place.is_file():
        return [place]
    found = sorted(place.glob("episodes*.jsonl"))
    if not found:
        raise RecordError(
            f"{place} has no episodes.jsonl: the run kept none (--keep_episodes 0), is older than that option, or "
            f"has not evaluated yet.\nTrain again, or name a .jsonl or .parquet file of trajectories."
        )
    return found


def read_rows(files: Sequence[Path]) -> tuple[list[tuple[str, Row]], list[str]]:
    """(where it stands, record) of the newest line of each episode, and notes on what was left out.

    RecordError: another schema, or not one whole episode.
    """
    newest: dict[tuple[object, ...], tuple[str, Row]] = {}
    notes: list[str] = []
    for path in files:
        for place, row in whole_rows(path, notes):
            if row.get("schema") != SCHEMA:
                raise RecordError(
                    f"{path}, {place}: schema {row.get('schema')!r:.40}, this version shows schema {SCHEMA}. "
                    f"View it with the version that wrote it, or run again."
                )
            kept = _part(row, "kept")
            key = (path, *map(str, (kept.get("stage"), kept.get("step"), row.get("split"), kept.get("row", place))))
            newest.pop(key, None)
            newest[key] = f"{path}, {place}", row
    if not newest:
        raise RecordError(f"{files[0]} holds no whole episode: the run is just beginning, or was cut. Look later.")
    return list(newest.values()), notes


def whole_rows(path: Path, notes: list[str]) -> Iterator[tuple[str, Row]]:
    """As `rows_of`; a last line that is not finished is left out and noted: the run is at work, or was cut."""
    rows, count = rows_of(path), 0
    while True:
        try:
            found = next(rows, None)
        except (UnicodeDecodeError, ArrowInvalid) as error:
            raise RecordError(f"{path} is no file of trajectories: {str(error).splitlines()[0]}") from None
        except RecordError:
            if path.suffix == ".parquet" or count < path.read_bytes().count(b"\n"):
                raise
            notes.append(f"{path.name}: its last line is not finished (the run is at work, or was cut); left out")
            return
        if found is None:
            return
        count += 1
        yield found


def token_texts(
    folder: Path, episodes: Sequence[Mapping[str, Any]], marks: set[str]
) -> tuple[dict[int, str], list[str]]:
    """{id: text} of the policy's and the expert's tokens, and a note where the run's tokenizer is not at hand."""
    used = sorted({id_ for each in episodes for chunk in each["chunks"] for id_ in chunk.get("ids", ())})
    for name in (MODEL, "sft", "."):
        file = folder / name / "tokenizer.json"
        if not _json(file):
            continue
        tokenizer = Tokenizer.from_file(str(file))
        if {tokenizer_hash(tokenizer)} == marks:
            known = [id_ for id_ in used if 0 <= id_ < tokenizer.get_vocab_size()]
            return {id_: tokenizer.decode([id_], skip_special_tokens=False) for id_ in known}, []
    return {}, ["the tokenizer of these episodes is not in the folder: tokens are shown by their ids"] if used else []


def curve(path: Path) -> list[list[Any]]:
    """[variant, step, metric, value] of a run's curve; empty before there is one. RecordError: not that table."""
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        try:
            rows = [(r["variant"], int(r["step"]), r["metric"], float(r["value"])) for r in csv.DictReader(file)]
        except (KeyError, TypeError, ValueError) as error:
            raise RecordError(f"{path}: not the curve of a run ({type(error).__name__}: {error})") from None
    return [list(row) for row in rows if math.isfinite(row[3])]


def episode(row: Row, options: Mapping[str, float]) -> dict[str, Any]:
    """One episode as the page has it; KeyError or TypeError where a field is missing or of another kind.

    A training batch is numbered as in the curve, by the step that it makes; the record has the steps before it.
    """
    kept, start, turns = _part(row, "kept"), row["start"], row["turns"]
    returns = kept.get("G") or chunk_values(len(turns) - start, row["reward"], options)
    facts = {name: kept.get(name, []) for name in ("rho", "mismatch", "masked", "clipped", "new", "old")}
    chunks = []
    for place, turn in enumerate(turns):
        k = place - start
        mine = {name: values[k] for name, values in facts.items() if 0 <= k < len(values)}
        chunks.append(chunk(turn) | mine | ({"G": returns[k]} if 0 <= k < len(returns) else {}))
    if chunks and kept.get("left"):  # events of the files that the episode left: at its last chunk
        chunks[-1]["events"] = [*chunks[-1].get("events", []), *map(event, kept["left"])]
    step = kept["step"] + 1 if "imitated" in kept else kept.get("step")
    return {
        **{name: _cut(row[name]) for name in TEXTS}, "start": start, "reward": row["reward"], "step": step,
        "stage": kept.get("stage", ""), "ending": kept.get("ending") or outcome(row["reward"]),
        "imitated": kept.get("imitated"), "trained": "rho" in kept, "chunks": chunks,
        "contexts": kept.get("contexts", 1),
    }  # fmt: skip


def chunk(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A turn without what is empty or as usual."""
    kept = {name: turn[name] for name in ("malformed", "submitted", "error", "irrelevant", "policy_version")}
    kept |= {"ids": [*map(index, turn["ids"])], "mu": [round(value, 5) for value in turn["logprobs"]]}
    kept |= {"expert": turn["source"] == "expert", "events": [*map(event, turn["events"])]}
    kept |= {name: [*map(_cut, turn[name])] for name in ("commands", "reasons")}
    kept |= {name: _cut(turn[name]) for name in ("text", "observation")}
    kept |= {"wall_s": round(turn["wall_s"], 4), "status": "" if turn["status"] == "ok" else turn["status"]}
    return {"exit_code": turn["exit_code"], **{name: value for name, value in kept.items() if value}}


def event(found: Mapping[str, str]) -> dict[str, str]:
    """A safety event of a record."""
    return {name: _cut(found[name]) for name in EVENT}


def chunk_values(chunks: int, reward: float | None, options: Mapping[str, float]) -> list[float | None]:
    """G_k of an episode that was not trained on, by eq. 7.

    >>> chunk_values(2, 1.0, {"gamma": 0.5, "failure_reward": 0.0})
    [0.5, 1.0]
    """
    if reward is None:
        return [None] * chunks
    final = reward or options["failure_reward"]
    return [round(options["gamma"] ** (chunks - 1 - k) * final, 5) for k in range(chunks)]


def outcome(reward: float | None) -> str:
    """How an episode ended, as far as a record alone tells."""
    return "infrastructure" if reward is None else "success" if reward == 1.0 else "failure"


def _checked(place: str, row: Row, options: Mapping[str, float]) -> dict[str, Any]:
    try:
        return episode(row, options)
    except (KeyError, TypeError, IndexError, OverflowError) as error:
        raise RecordError(f"{place}: not a trajectory record ({type(error).__name__}: {error!s:.80})") from None


def _part(found: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object within another, or nothing where it is none: an older version wrote it."""
    part = found.get(name)
    return part if isinstance(part, dict) else {}


def _cut(text: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"text was expected, not {type(text).__name__}")
    return text if len(text) <= TEXT_CAP else f"{text[:TEXT_CAP]}\n[{len(text) - TEXT_CAP} more characters left out]"


def _json(path: Path) -> dict[str, Any]:
    """A JSON object of the run, or nothing where it is not written yet."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise RecordError(f"{path} is not JSON ({error}): restore it, or delete it to view without it") from None
    return found if isinstance(found, dict) else {}

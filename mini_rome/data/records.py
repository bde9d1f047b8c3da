"""Trajectories on disk: one record each, JSON lines while a run goes on, Parquet when it is done.

A record has its schema's number, its tokenizer's hash and its task's content hash, so that ids are never read with
another vocabulary and turns never judged by another instance. A JSON line is written by one call: a run that is cut
leaves at most one truncated line, the last. Both forms are what `datasets` reads (`FEATURES`). Not in the paper.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from datasets import Dataset, Features, List, Value
from pyarrow import parquet
from transformers import PreTrainedTokenizerBase

from mini_rome.errors import ConfigError, RecordError
from mini_rome.runs import replacing, writing
from mini_rome.tasks.choice import find_task
from mini_rome.trace import IM_END, ChatFormat
from mini_rome.types import SafetyEvent, Task, Trajectory, Turn, Verdict

SCHEMA = 1
_TEXT, _INT, _FLAG, _FLOAT = Value("string"), Value("int32"), Value("bool"), Value("float64")
_IDS, _TEXTS = List(_INT), List(_TEXT)
EVENT = {name: _TEXT for name in ("kind", "severity", "source", "evidence", "action")}
# Of a turn, in the order of types.Turn; `chunk` counts the policy's chunks from 0, -1 on the expert's prefix.
TURN = {
    "ids": _IDS, "logprobs": List(_FLOAT), "text": _TEXT, "commands": _TEXTS, "observation": _TEXT,
    "observation_ids": _IDS, "exit_code": _INT, "status": _TEXT, "wall_s": _FLOAT, "policy_version": _INT,
    "malformed": _FLAG, "submitted": _FLAG, "source": _TEXT, "error": _FLAG, "irrelevant": _FLAG, "reasons": _TEXTS,
    "events": List(EVENT), "chunk": _INT,
}  # fmt: skip
FEATURES = Features(
    {
        "schema": _INT, "tokenizer": _TEXT, "task": _TEXT, "task_hash": _TEXT, "family": _TEXT, "domain": _TEXT,
        "split": _TEXT, "instruction": _TEXT, "prompt_ids": _IDS, "turns": List(TURN), "start": _INT,
        "reward": _FLOAT, "reason": _TEXT, "backend": _TEXT, "verifier": _TEXT, "seed": Value("int64"),
        "episode": Value("int64"), "policy": _TEXT, "retokenised": _FLAG,
    }
)  # fmt: skip
_OWN = ("start", "reward", "reason", "backend", "verifier", "seed", "episode", "policy", "retokenised")
Row = dict[str, Any]


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Identity of a vocabulary: which id means which piece of text. 16 hexadecimal digits."""
    entries = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:16]


def to_row(trajectory: Trajectory, tokenizer: str) -> Row:
    """One record; `tokenizer` is its hash. A scripted turn has no log-probs: nothing was sampled."""
    task = trajectory.task
    turns = []
    for index, turn in enumerate(trajectory.turns):
        row = {name: getattr(turn, name) for name in TURN if name != "chunk"}
        row["logprobs"] = turn.logprobs if turn.source == "policy" else []
        row["events"] = [asdict(event) for event in turn.events]
        turns.append({**row, "chunk": max(index - trajectory.start, -1)})
    return {
        "schema": SCHEMA, "tokenizer": tokenizer, "task": task.name, "task_hash": task.content_hash,
        "family": task.family, "domain": task.domain, "split": task.split, "instruction": task.instruction,
        "prompt_ids": trajectory.prompt_ids, "turns": turns, **{name: getattr(trajectory, name) for name in _OWN},
    }  # fmt: skip


def unjudged(name: str, instruction: str, **fields: Any) -> Task:
    """A task known by its instruction alone, as a record from elsewhere has it: it cannot be played or judged."""
    return Task(
        name=name, instruction=instruction, files={}, expert=(),
        check=lambda files: Verdict(None, "this task is known from a record alone"),
        **{"family": "", "domain": "", "split": "test", **fields},
    )  # fmt: skip


def _task(row: Row) -> Task:
    """The instance, made again by its name; RecordError where that is another one than the record's."""
    try:
        task = find_task(row["task"])
    except ConfigError:
        known = {name: row[name] for name in ("family", "domain", "split")}
        task = unjudged(row["task"], row["instruction"], **known)
    if task.content_hash != row["task_hash"]:
        raise RecordError(f"task {row['task']} is another instance here than the one recorded; record it again")
    return task


def from_row(row: Row) -> Trajectory:
    """The trajectory of a record. RecordError: another schema, a field that is missing, another instance."""
    if row.get("schema") != SCHEMA:
        raise RecordError(f"schema {row.get('schema')}: this version reads schema {SCHEMA}; write the data again")
    try:
        turns = [_turn(turn) for turn in row["turns"]]
        own = {name: row[name] for name in _OWN}
        chunks = [turn["chunk"] for turn in row["turns"]]
        trajectory = Trajectory(_task(row), list(row["prompt_ids"]), turns, **own)
    except (KeyError, TypeError) as error:
        raise RecordError(f"not a trajectory record: {type(error).__name__} {error}") from None
    expected = [max(index - trajectory.start, -1) for index in range(len(turns))]
    if chunks != expected:
        raise RecordError(f"chunk ids {chunks} with start {trajectory.start}: must be {expected}")
    return trajectory


def _turn(row: Mapping[str, Any]) -> Turn:
    fields = {name: row[name] for name in TURN if name not in ("chunk", "events")}
    return Turn(**fields, events=tuple(SafetyEvent(**event) for event in row["events"]))


def check_ids(trajectory: Trajectory, chat: ChatFormat) -> None:
    """RecordError, naming the turn, where token ids and text say different things."""
    if trajectory.task.instruction not in chat.decode(trajectory.prompt_ids):
        raise RecordError(f"the prompt's ids do not hold the instruction of {trajectory.task.name}")
    for index, turn in enumerate(trajectory.turns):
        stopped = bool(turn.ids) and turn.ids[-1] == chat.stop_id
        text = chat.decode(turn.ids[:-1] if stopped else turn.ids)
        if text != turn.text:
            raise RecordError(f"turn {index}: the ids say {text[:60]!r}, the text {turn.text[:60]!r}")
        if turn.source == "policy" and turn.logprobs and len(turn.logprobs) != len(turn.ids):
            raise RecordError(f"turn {index}: {len(turn.ids)} ids and {len(turn.logprobs)} log-probs")
        shown = f"{turn.observation.rstrip(chr(10))}{IM_END}\n"
        if turn.observation_ids and shown not in chat.decode(turn.observation_ids):
            raise RecordError(f"turn {index}: the ids of the observation do not say {turn.observation[:60]!r}")


# Files


def write(path: str | Path, trajectories: Iterable[Trajectory], chat: ChatFormat) -> int:
    """Write all records, whole or not at all; `.parquet` or JSON lines by the name. Returns how many."""
    mark = tokenizer_hash(chat.tokenizer)
    rows = [to_row(trajectory, mark) for trajectory in trajectories]
    with replacing(path) as spare:
        if Path(path).suffix == ".parquet":
            parquet.write_table(Dataset.from_list(rows, features=FEATURES).data.table, spare)
        else:
            spare.write_text("".join(map(_line, rows)), encoding="utf-8")
    return len(rows)


def _line(row: Row) -> str:
    return json.dumps(row, separators=(",", ":")) + "\n"


def read(path: str | Path, chat: ChatFormat | None = None) -> list[Trajectory]:
    """All trajectories of a file. RecordError says the line (JSON lines) or row (Parquet) and what is wrong.

    chat: refuse records of another tokenizer, and ids that disagree with their text. Without it ids are not for use.
    """
    mark = tokenizer_hash(chat.tokenizer) if chat is not None else ""
    trajectories = []
    for place, row in rows_of(path):
        try:
            trajectory = from_row(row)
            if chat is not None:
                if row["tokenizer"] != mark:
                    raise RecordError(
                        f"ids of tokenizer {row['tokenizer']}, yours is {mark}: load the tokenizer saved beside the "
                        f"data, or export the messages and import them with yours"
                    )
                check_ids(trajectory, chat)
        except RecordError as error:
            raise RecordError(f"{path}, {place}: {error}") from None
        trajectories.append(trajectory)
    return trajectories


def rows_of(path: str | Path) -> Iterator[tuple[str, Row]]:
    """("line 3" or "row 3", record) of a file, from 1."""
    if not Path(path).is_file():
        raise RecordError(f"{path} does not exist: name a .jsonl or .parquet file of trajectories (make data)")
    if Path(path).suffix == ".parquet":
        table = Dataset(parquet.read_table(path))  # Dataset.from_parquet would copy it to a cache first
        yield from ((f"row {number}", row) for number, row in enumerate(table, 1))
        return
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            yield f"line {number}", _parsed(path, number, line)


def _parsed(path: str | Path, number: int, line: str) -> Row:
    if not line.endswith("\n"):
        raise RecordError(
            f"{path}, line {number}: truncated, the run that wrote it was cut. "
            f"Going on with that run drops the line; or delete it by hand."
        )
    try:
        row = json.loads(line)
    except ValueError as error:
        raise RecordError(f"{path}, line {number}: not JSON ({error})") from None
    if not isinstance(row, dict):
        raise RecordError(f"{path}, line {number}: not a record, but {type(row).__name__}")
    return row


class Appender:
    """Appends records to a file during a run; many threads may. A truncated last line of an earlier run is dropped.

    `dropped` is the number of that line, or None; `done` are the (task, policy, episode) already there.
    """

    def __init__(self, path: str | Path, chat: ChatFormat) -> None:
        self.path, self._mark, self._lock = Path(path), tokenizer_hash(chat.tokenizer), threading.Lock()
        self.dropped = drop_truncated(path) if self.path.exists() else None
        self.done: set[tuple[str, str, int]] = set()
        if self.path.exists():
            for place, row in rows_of(path):
                if row.get("tokenizer") != self._mark or row.get("schema") != SCHEMA:
                    raise RecordError(f"{path}, {place}: of another tokenizer or schema; start with a new file")
                self.done.add((row["task"], row["policy"], row["episode"]))
        with writing(path):
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def append(self, trajectories: Sequence[Trajectory]) -> None:
        """Write these records by one call of the system."""
        data = "".join(_line(to_row(each, self._mark)) for each in trajectories).encode()
        with self._lock, writing(self.path):
            while data:
                data = data[os.write(self._file, data) :]
            self.done.update((each.task.name, each.policy, each.episode) for each in trajectories)

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def drop_truncated(path: str | Path) -> int | None:
    """Cut off a last line that has no end. Returns its number, or None where the file is whole."""
    with writing(path), open(path, "r+b") as file:
        data = file.read()
        whole = data.rfind(b"\n") + 1
        if whole == len(data):
            return None
        file.truncate(whole)
        return data.count(b"\n") + 1

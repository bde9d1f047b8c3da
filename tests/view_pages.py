"""Runs made up for the tests of the viewer: every kind of episode and mark, and text that would like to be more."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import tiny

from mini_rome.config import IPAConfig
from mini_rome.data.records import Row, to_row, tokenizer_hash, unjudged
from mini_rome.episodes import EPISODES, chunk_facts
from mini_rome.evaluation.rows import COLUMNS
from mini_rome.runs import write_csv, write_json
from mini_rome.types import SafetyEvent, Trajectory, Turn

ATTACK = "document.title='owned'; window.owned = 1"
HOSTILE = "\n".join(
    (
        f"</script><script>{ATTACK}</script><img src=x onerror=\"{ATTACK}\"><svg onload=\"{ATTACK}\">",
        '<iframe src="https://example.org"></iframe> <link rel="stylesheet" href="//example.org/x.css"> &lt; @DATA@',
        "\x1b[31mred\x1b[0m \x1b]0;title\x07 bell\x08\x00 back\r over",
        "bidi \u202eevil\u202c \u2066x\u2069 zero\u200bwidth \ufeff tag\U000e0041",
        f"<!-- <script> ]]> `${{{ATTACK}}}` ${{1}} '\"\\ javascript:{ATTACK} __proto__ constructor",
        "half \ud83d of a pair, whole \U0001f600",
        "C1 \x9b31m \x85 line\u2028separator",
    )
)
LONG_LINE = "<b>x</b>" * (1 << 17)  # 1 MB without a line break


def turn(rng: random.Random, word: str, expert: bool = False, **changes: Any) -> Turn:
    """One response with real tokens, and log-probs for each where the policy wrote it."""
    chat = tiny.chat()
    ids = chat.response(f"cat {word}", False)
    scores = [] if expert else [-round(rng.expovariate(2.0), 5) for _ in ids]
    values: dict[str, Any] = {
        "observation": f"{word}: 3 lines\n", "observation_ids": [6, 7], "exit_code": 0, "wall_s": 0.0021,
        "source": "expert" if expert else "policy", **changes,
    }  # fmt: skip
    return Turn(ids, scores, chat.decode(ids[:-1]), [f"cat {word}"], **values)


def episode(number: int, stage: str, step: int | None, turns: int = 12, **changes: Any) -> Row:
    """A record as a run keeps it; training episodes (with a step) have what the loss made of their chunks."""
    rng = random.Random(number)
    start = rng.randrange(turns) if step is not None else 0
    reward = (1.0, 0.0, 1.0, None, 0.0)[number % 5]
    words = ["plum", "kiwi", "fig", "pear"]
    made = [turn(rng, rng.choice(words), index < start) for index in range(turns)]
    task = unjudged(f"notes-k{turns}-train-{number % 40}", "Copy the third line of plum to answer.", family="notes",
                    split="test" if step is None else "train")  # fmt: skip
    trajectory = Trajectory(task, [1, 2, 3], made, start=start, reward=reward, backend="sim", episode=number)
    for name, value in changes.items():
        setattr(trajectory, name, value)
    row = to_row(trajectory, tokenizer_hash(tiny.tokenizer()))
    row["reason"] = "SandboxDead" if trajectory.reward is None else ""
    endings = {1.0: "success", 0.0: "wrong result", None: "infrastructure"}
    kept: dict[str, Any] = {"ending": endings[trajectory.reward], "stage": stage, "step": step, "row": number}
    return row | {"kept": kept | (facts(trajectory, rng) if step is not None else {})}


def facts(trajectory: Trajectory, rng: random.Random) -> dict[str, Any]:
    """As the recorder computes them, from log-probs that wander off the sampler's."""
    ids, sampled, returns = [], [], []
    reward = -0.2 if trajectory.reward == 0 else trajectory.reward
    chunks = trajectory.policy_turns
    for k, each in enumerate(chunks):
        ids += [k] * len(each.ids)
        sampled += each.logprobs
        returns += [0.95 ** (len(chunks) - 1 - k) * (reward or 0.0)] * len(each.ids)
    old = [value + rng.gauss(0, 0.03) for value in sampled]
    new = [value + rng.gauss(0, 0.06) for value in old]
    scored = float("nan") if reward is None else reward
    found = chunk_facts(ids, new, old, sampled, returns, scored, IPAConfig(output_dir="unused"))
    imitated = "<tool_call>bash head -n 3 plum</tool_call>" if reward == -0.2 else None
    return found | {"imitated": imitated}


def hostile_episode() -> Row:
    """Every text of the record is hostile, one observation is a line of 1 MB."""
    rng = random.Random(0)
    event = SafetyEvent("egress", "high", "command", HOSTILE)
    turns = [
        turn(rng, "plum", observation=HOSTILE, events=(event,), reasons=[HOSTILE], exit_code=1),
        turn(rng, "kiwi", observation=LONG_LINE),
        Turn([], [], HOSTILE, [HOSTILE], observation="", malformed=True, error=True),
    ]
    row = episode(3, HOSTILE, 4)
    trajectory = Trajectory(unjudged("t", "t", family=HOSTILE), [1], turns, backend="sim", policy=HOSTILE)
    return row | to_row(trajectory, row["tokenizer"]) | {
        "task": HOSTILE, "instruction": HOSTILE, "reason": HOSTILE,
        "kept": {"stage": HOSTILE, "step": 4, "row": 0, "ending": HOSTILE, "imitated": HOSTILE}
    }  # fmt: skip


def make_run(folder: Path, rows: list[Row]) -> Path:
    """A run's folder as `recipes/ipa.py` leaves it, as far as the viewer looks."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / EPISODES).write_text("".join(lines))
    tiny.tokenizer().save_pretrained(folder / "model")
    rate = {"n": 200, "unscored": 0}
    success = {
        "untrained": {"rate": 0.0, "low": 0.0, "high": 0.019, "chunks": [12], **rate},
        "sft": {"rate": 0.015, "low": 0.005, "high": 0.043, "chunks": [12], **rate},
        "ipa": {"rate": 0.91, "low": 0.862, "high": 0.942, "chunks": [12], **rate},
    }
    base = {"backend": "sim", "sampler": "transformers", "seed": 0, "commit": "0123456789ab"}
    write_json(folder / "summary.json", {**base, "time": "2026-01-01T00:00:00+0000", "success": success})
    write_json(folder / "state.json", {"options": {"gamma": 0.95, "failure_reward": -0.2}})
    table = []
    for step in range(25):
        values = {"train_success": min(1.0, 0.5 + 0.03 * step), "start_position": 11 - step * 0.45}
        values["grad_norm"] = 1 / (1 + step)
        if step % 8 == 0:
            values |= {"test_success": step / 27, "test_n": 64}
        for key, value in values.items():
            table.append(dict(zip(COLUMNS, ("ipa", 0, "all", step, key, value), strict=True)))
    write_csv(folder / "curve.csv", table, COLUMNS)
    return folder


def usual_rows(count: int) -> list[Row]:
    """Two thirds training episodes of 24 steps, the rest evaluations of two stages."""
    steps = [n * 24 // count if n % 3 else None for n in range(count)]
    return [episode(n, "sft" if step is None and n % 2 else "ipa", step) for n, step in enumerate(steps)]

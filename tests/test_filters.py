"""The four-stage filter: each stage drops what it is for and says why; nothing else is lost."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tiny import chat

from mini_rome.data.demonstrations import make_tasks
from mini_rome.data.filters import (
    EndpointJudge,
    RuleJudge,
    Thresholds,
    heuristics,
    key,
    read_marks,
    replay,
    run_filter,
    sample_to_mark,
)
from mini_rome.data.funnel import COLUMNS, PAPER, funnel_rows, ours, save_funnel
from mini_rome.errors import MiniRomeError, RecordError
from mini_rome.evaluation.model_client import Endpoint
from mini_rome.experts import play, script
from mini_rome.families import get_family
from mini_rome.masks import MaskPolicy, annotate
from mini_rome.sandbox import Pool
from mini_rome.types import Task, Trajectory

Answer = Callable[[dict[str, Any]], tuple[int, str]]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool("sim") as found:
        yield found


def task(chunks: int = 3) -> Task:
    return make_tasks(["notes"], [chunks], 1, "train")[0]


def episode(pool: Pool, commands: list[str] | None = None, of: Task | None = None) -> Trajectory:
    """Commands run for real, `submit` at the end, annotated."""
    of = of or task()
    found = play(chat(), of, pool, script(chat(), list(of.expert) if commands is None else commands)).trajectory
    found.policy = "scripted"
    annotate(found, MaskPolicy())
    return found


@contextmanager
def served(answer: Answer, wait: float = 0.0) -> Iterator[str]:
    """An OpenAI-compatible endpoint that answers (status, body); its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            time.sleep(wait)
            status, text = answer(body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


def said(content: str) -> str:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]})


# Heuristics


def test_an_expert_passes_every_heuristic(pool: Pool) -> None:
    assert heuristics(episode(pool), Thresholds()) == ""


def test_each_heuristic_drops_what_it_is_for(pool: Pool) -> None:
    expert = list(task().expert)
    wrong = get_family("notes").mistake(task(), 0, random.Random(0))
    looping = episode(pool, [*["echo a"] * 4, *expert])
    failing = episode(pool, [wrong, f"{wrong} ", f"cat {wrong[-3:]}none", *expert])
    again = episode(pool, [expert[0], expert[0], expert[1], expert[0], expert[1], *expert[1:]])
    found = [heuristics(each, Thresholds()) for each in (looping, failing, again)]
    assert found == ["loop", "self-repair loop", "redundant calls"]
    good = episode(pool)
    cut = replace(good, turns=good.turns[:-1])
    spoiled = replace(good, reward=None)
    held_out = replace(good, task=replace(good.task, split="test"))
    marked = replace(good, task=replace(good.task, instruction="x mini-rome-canary y"))
    broken = replace(good, turns=[replace(turn, malformed=True) for turn in good.turns])
    found = [heuristics(each, Thresholds()) for each in (cut, spoiled, held_out, marked, broken)]
    assert found == ["truncated", "unscored", "held-out task", "canary", "malformed calls"]


def test_a_call_of_a_tool_that_is_not_there_is_dropped(pool: Pool) -> None:
    of = make_tasks(["retail"], [2], 1, "train")[0]
    responses = script(chat(), ["refuse {}", *of.expert], of)
    found = play(chat(), of, pool, responses).trajectory
    annotate(found, MaskPolicy())
    assert found.turns[0].exit_code == 127 and found.reward == 1.0
    assert heuristics(found, Thresholds()) == "unknown tool"


# Judges


def test_the_rule_judge_keeps_an_expert_and_says_what_it_drops(pool: Pool) -> None:
    judge, good = RuleJudge(), episode(pool)
    assert judge(good) == ""
    late = replace(good, turns=[*good.turns[:-1], replace(good.turns[-1], error=True)])
    astray = replace(good, turns=[replace(turn, irrelevant=True) for turn in good.turns[:-1]] + good.turns[-1:])
    long = replace(good, turns=good.turns[:1] * 4 + good.turns)
    assert [judge(each) for each in (late, astray, long)] == [
        "submitted on a failure", "mostly off the task", "far longer than needed",
    ]  # fmt: skip


def test_a_judge_behind_an_endpoint_keeps_drops_and_never_guesses(pool: Pool) -> None:
    answers = iter(['{"keep": true}', '{"keep": false, "reason": "guesses"}', "fine, I think", "[1]"])
    with served(lambda body: (200, said(next(answers)))) as url:
        judge = EndpointJudge(Endpoint(url, "m", tries=1))
        found = [judge(episode(pool)) for _ in range(4)]
    assert found == ["", "judged: guesses", "not judged: rubbish", "not judged: rubbish"]
    assert judge.name == "judge m"


def test_a_judge_that_cannot_be_asked_drops_with_the_cause(pool: Pool) -> None:
    answers = iter([(429, ""), (200, "<html>"), (503, "")])
    with served(lambda body: next(answers)) as url:
        judge = EndpointJudge(Endpoint(url, "m", tries=1))
        found = [judge(episode(pool)) for _ in range(3)]
    assert found == ["not judged: rate limit", "not judged: rubbish", "not judged: no answer"]
    with served(lambda body: (200, said("late")), wait=1.0) as url:
        slow = EndpointJudge(Endpoint(url, "m", tries=1, timeout_s=0.1))
        assert slow(episode(pool)) == "not judged: timeout"


# Execution


def test_a_replay_reproduces_an_honest_record(pool: Pool) -> None:
    assert replay(episode(pool), chat(), pool) == ("", "")


def test_a_replay_that_differs_is_kept_out_with_the_diff(pool: Pool) -> None:
    found = episode(pool)
    found.turns[1].observation = "another line"
    reason, detail = replay(found, chat(), pool)
    assert reason == "replay differs"
    assert "--- turn 1, recorded" in detail and "-another line" in detail
    assert f"+{episode(pool).turns[1].observation.splitlines()[0]}" in detail
    code = episode(pool)
    code.turns[0].exit_code = 3
    assert "-[ok, exit 3]\n+[ok, exit 0]" in replay(code, chat(), pool)[1]
    forged = replace(episode(pool, [task().expert[0]]), reward=1.0)
    assert "reward 1.0 was recorded, the replay gives 0.0" in replay(forged, chat(), pool)[1]


def test_a_failed_episode_reproduces_and_is_not_rewarded(pool: Pool) -> None:
    assert replay(episode(pool, [task().expert[0]]), chat(), pool)[0] == "not rewarded"


# Inspection


def test_the_sample_has_every_stratum_and_marks_are_read_back(tmp_path: Path, pool: Pool) -> None:
    kept = [episode(pool, of=each) for each in make_tasks(["notes", "tickets"], [1, 2], 8, "train")]
    path = tmp_path / "sample.csv"
    assert sample_to_mark(path, kept, 4) == 4
    text = path.read_text()
    assert "notes, scripted, clean" in text and "tickets, scripted, clean" in text
    assert read_marks(path) == {}
    name = key(kept[0])
    path.write_text(f"id,mark\n{name}, Drop \n{key(kept[1])},keep\nother,\n")
    assert read_marks(path) == {name: "drop", key(kept[1]): "keep"}
    found = run_filter(kept, chat(), pool, marks=read_marks(path))
    assert [each for each in kept if each not in found.kept] == kept[:1]
    assert found.stages[-1].why == {"marked drop": 1} and found.stages[-1].note == "2 marked"
    path.write_text("id,mark\na,maybe\n")
    with pytest.raises(RecordError, match="line 2: mark 'maybe': write keep, drop or nothing"):
        read_marks(path)
    path.write_text("name\na\n")
    with pytest.raises(RecordError, match="line 1: the columns id and mark are needed"):
        read_marks(path)


# All together


def test_the_funnel_counts_what_entered_left_and_why(tmp_path: Path, pool: Pool) -> None:
    good, other = episode(pool), episode(pool, of=task(2))
    cut = replace(good, turns=good.turns[:-1])
    lost = episode(pool, [task().expert[0]])
    found = run_filter([good, cut, lost, other], chat(), pool)
    assert found.kept == [good, other]
    assert [(stage.name, stage.entered, stage.left) for stage in found.stages] == [
        ("heuristics", 4, 3), ("judge", 3, 3), ("execution", 3, 2), ("inspection", 2, 2),
    ]  # fmt: skip
    assert [stage.note for stage in found.stages] == ["", "rule judge", "sim", "nothing marked yet"]
    rows = funnel_rows(found.stages)
    assert [tuple(row) for row in rows] == [COLUMNS] * 4 and rows[0]["reason"] == "truncated"
    counts = ours(found.stages, 10, 2)
    assert counts["instances and trajectories kept"] == "2 and 2" and set(counts) == set(PAPER)
    save_funnel(tmp_path, found.stages, counts, {"backend": "sim", "seed": 0, "commit": "c"})
    assert (tmp_path / "funnel.png").stat().st_size > 5000


def test_all_rows_filtered_away_is_an_error_that_says_where_they_went(pool: Pool) -> None:
    good = episode(pool)
    with pytest.raises(MiniRomeError, match="all rows were filtered away: heuristics {'truncated': 2}"):
        run_filter([replace(good, turns=good.turns[:-1])] * 2, chat(), pool)

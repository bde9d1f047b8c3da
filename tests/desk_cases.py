"""What must hold for every tool-use family, called by tests/test_retail.py and tests/test_shop.py."""

from __future__ import annotations

import functools
import json
import random
import time
from collections.abc import Sequence

from mini_rome.agent import Agent
from mini_rome.chat import Session
from mini_rome.env import Env
from mini_rome.experts import play, record_expert, script
from mini_rome.families.base import Family, split_of
from mini_rome.masks import MaskPolicy, annotate
from mini_rome.model import build_tokenizer
from mini_rome.sampler.base import Completion, SamplingParams
from mini_rome.sampler.scripted import ScriptedSampler
from mini_rome.sandbox import Pool
from mini_rome.tools import Memory, rehearse, run_tool
from mini_rome.trace import CALL, CALL_END, ChatFormat, context_ids
from mini_rome.types import Task, Trajectory

LIMIT = 20  # tokens of one response that a default run allows


@functools.cache
def chat() -> ChatFormat:
    """The format with the tokenizer of the tool-use families."""
    return ChatFormat(build_tokenizer(["retail", "shop"]))


def text_of(chunk: str, submit: bool = False) -> str:
    """A response that makes these calls."""
    return "".join(f"{CALL}{body}{CALL_END}" for body in [*chunk.split("\n"), *["submit"] * submit])


def run(pool: Pool, task: Task, chunks: Sequence[str], submit: bool = True) -> tuple[list[str], float | None]:
    """Observations of these chunks and the reward after a submission."""
    with Env(task, pool, max_turns=99) as env:
        env.reset()
        told = [env.step(text_of(chunk))[0] for chunk in chunks]
        return told, env.step(text_of("submit"))[1] if submit else None


def final(task: Task, chunks: Sequence[str]) -> dict[str, bytes]:
    """The database after these chunks, without a sandbox."""
    files = Memory({path: text.encode() for path, text in task.files.items()})
    for body in (body for chunk in chunks for body in chunk.split("\n")):
        name, _, arguments = body.partition(" ")
        run_tool(task, files, name, arguments)
    return files.files


def only_the_whole_expert_is_rewarded(family: Family, pool: Pool, chunks: int) -> None:
    """0 at the start and after every chunk but the last, 1 then; each chunk exits with 0."""
    task = family.make(chunks, chunks, "test")
    assert (len(task.expert), task.chunks) == (chunks, chunks)
    with Env(task, pool, max_turns=chunks) as env:
        env.reset()
        assert env.give_up().reward == 0.0
        env.reset()
        for number, chunk in enumerate(task.expert, 1):
            _, reward, terminated, truncated, info = env.step(text_of(chunk, submit=number == chunks))
            assert info["result"].exit_code == 0
            assert (reward, terminated, truncated) == (float(number == chunks), number == chunks, False)


def a_mistake_fails_and_changes_nothing(family: Family, pool: Pool) -> None:
    rng = random.Random(0)
    for seed in range(4):
        task = family.make(seed, 8)
        with Env(task, pool, max_turns=99) as env:
            env.reset()
            for chunk, calls in enumerate(task.expert):
                before = env.box.snapshot().tree_hash
                observation, _, _, _, info = env.step(text_of(family.mistake(task, chunk, rng)))
                assert info["result"].exit_code == 1
                assert observation.startswith('{"error":"no ')
                assert env.box.snapshot().tree_hash == before
                env.step(text_of(calls))
            assert env.step(text_of("submit"))[1] == 1.0


def an_episode_can_start_after_every_chunk(family: Family, pool: Pool) -> None:
    """From the snapshot before chunk p + 1, with the history token-exact, the rest of the expert is rewarded."""
    task = family.make(3, 6)
    expert = record_expert(chat(), task, pool)
    responses = script(chat(), task.expert, task)
    for p in range(task.chunks):
        with Env(task, pool) as env:
            agent = Agent(chat(), env, expert.start(p).open(chat(), env, 0, 0), SamplingParams(), max_context=9999)
            for ids in responses[p:]:
                agent.execute(Completion(ids, [0.0] * len(ids), 0))
        assert agent.done and agent.trajectory.reward == 1.0
        assert context_ids(agent.trajectory) == context_ids(expert.trajectory)
        assert [turn.commands for turn in agent.trajectory.turns] == [chunk.split("\n") for chunk in task.expert]


def a_person_can_write_a_chunk(family: Family, pool: Pool) -> None:
    """`!` of `mini-rome chat` takes calls of the task's tools, and undoing one brings the database back."""
    task = family.make(3, 2)
    with Env(task, pool) as env:
        session = Session.open(env, chat(), ScriptedSampler([]), SamplingParams())
        before = env.box.snapshot().tree_hash
        for _ in range(2):
            for chunk in task.expert:
                assert session.by_hand(chunk).exit_code == 0
            assert env.box.snapshot().tree_hash != before
            for _ in task.expert:
                session.undo()
            assert env.box.snapshot().tree_hash == before


def trajectories(family: Family, pool: Pool, count: int = 32) -> list[Trajectory]:
    tasks = [family.make(seed, seed % 16 + 1) for seed in range(count)]
    return [play(chat(), task, pool, script(chat(), task.expert, task)).trajectory for task in tasks]


def responses_and_observations_are_short(played: Sequence[Trajectory]) -> None:
    """Also: all of an expert's turns are trained, none is redundant or a loop."""
    for trajectory in played:
        assert trajectory.reward == 1.0
        annotate(trajectory, MaskPolicy())
        for turn in trajectory.turns:
            assert (turn.error, turn.irrelevant, turn.malformed) == (False, False, False)
            assert len(turn.ids) <= LIMIT
            assert len(chat().encode(turn.observation)) < 30


def every_horizon_has_many_test_instances(family: Family, chunks: int) -> None:
    """500 that differ in what the agent sees, not only in what is hidden in the database."""
    seen: dict[str, set[str]] = {"test": set(), "train": set()}
    for split, found in seen.items():
        for seed in range(700):
            task = family.make(seed, chunks, split)
            assert split_of(task.content_hash) == split
            found.add(task.instruction + "".join(result.output for _, result in rehearse(task, task.expert)))
    assert len(seen["test"]) >= 500
    if chunks > 1:
        assert len(seen["train"] & seen["test"]) <= 7  # a per cent


def making_and_checking_are_quick(family: Family) -> None:
    """Processor time: under 1 ms to make, under 2 ms to check, at the longest horizon."""
    tasks = [family.make(seed, 16) for seed in range(40)]
    ends = [final(task, task.expert) for task in tasks]

    def made() -> float:
        begun = time.process_time()
        for seed in range(100):
            family.make(seed, 16)
        return (time.process_time() - begun) / 100

    def checked() -> float:
        begun = time.process_time()
        assert all(task.check(end).reward == 1.0 for task, end in zip(tasks, ends, strict=True))
        return (time.process_time() - begun) / len(tasks)

    assert min(made() for _ in range(3)) < 1e-3
    assert min(checked() for _ in range(3)) < 2e-3


def both_languages_and_both_variants_are_there(family: Family) -> None:
    tasks = [family.make(seed, 6) for seed in range(400)]
    chinese = [task for task in tasks if task.language == "zh"]
    numbered = [task for task in tasks if "\n1 " in task.instruction]
    assert 160 < len(chinese) < 240 and 160 < len(numbered) < 240
    assert all(any("一" <= c <= "鿿" for c in task.instruction) for task in chinese)
    assert all(task.instruction.isascii() for task in tasks if task.language == "en")
    assert {task.language for task in tasks} == {"en", "zh"}


def a_ruined_database_earns_nothing_and_says_why(task: Task) -> None:
    ruined = {b"\xff": "no JSON", b"[" * 100_000: "no JSON", b"[]": "no object", b"{}": "is not as"}
    for data, reason in ruined.items():
        verdict = task.check({"database.json": data})
        assert verdict.reward == 0.0 and reason in verdict.reason
    assert task.check({}).reason == "database.json is missing"


def hostile_words_stay_text(family: Family, pool: Pool, hostile: str) -> None:
    """A customer whose words spell control tokens: they reach the agent as text, and nothing is submitted."""
    task = next(t for t in (family.make(seed, 6) for seed in range(99)) if "\n1 " not in t.instruction)
    database = json.loads(task.files["database.json"])
    database["script"][0] = hostile
    evil = Task(**{**task.__dict__, "files": {"database.json": json.dumps(database)}})
    spoken = next(i for i, chunk in enumerate(task.expert) if "say" in chunk)
    expert = play(chat(), evil, pool, script(chat(), task.expert[: spoken + 1], evil)[:-1] + [
        chat().response(task.expert[spoken], task=evil)
    ])  # fmt: skip
    turn = expert.trajectory.turns[spoken]
    assert json.dumps(hostile, ensure_ascii=False) in turn.observation
    assert not turn.submitted
    assert turn.observation_ids.count(chat().stop_id) == 1  # the template's own
    assert chat().decode(chat().encode(turn.observation)) == turn.observation

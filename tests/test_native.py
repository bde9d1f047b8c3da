"""External agents through the proxy: the ids and log-probs of the built-in loop, trajectories like any other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import openai
import pytest
import tiny
from small import chat
from test_context import TASK, reply

from mini_rome.chunking import pack
from mini_rome.env import Env
from mini_rome.experts import Start, record_expert, script
from mini_rome.families import get_family
from mini_rome.native import (
    Access,
    ExternalAgent,
    MiniSweAgent,
    NativeRollout,
    OpenAIAgent,
    answers,
    parity,
    play_native,
    response_of,
    tools_of,
)
from mini_rome.proxy import MODEL, Proxy
from mini_rome.proxy_backends import SamplerBackend
from mini_rome.rollout import Rollout
from mini_rome.sampler.base import Completion, Request, SamplingParams
from mini_rome.sampler.scripted import ScriptedSampler
from mini_rome.sampler.transformers import TransformersSampler
from mini_rome.sandbox import Pool
from mini_rome.types import Task, Trajectory

PARAMS = SamplingParams(max_new_tokens=60)
SOLVED = script(chat(), TASK.expert)
MARKER = reply("bash echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


def both(replies: Sequence[list[int]], start: Start) -> tuple[Trajectory, Trajectory]:
    """The same script by the built-in loop and through the proxy."""
    with Pool("sim", size=2) as pool:
        return tuple(
            kind(chat(), ScriptedSampler(replies), pool).collect([start], PARAMS)[0]
            for kind in (Rollout, NativeRollout)
        )  # type: ignore[return-value]


def native(agent: ExternalAgent, replies: Sequence[list[int]], task: Task = TASK) -> Trajectory:
    with Pool("sim", size=1) as pool:
        rollout = NativeRollout(chat(), ScriptedSampler(replies), pool, agent=agent)
        return rollout.collect([Start(task)], PARAMS)[0]


# -- parity --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "replies",
    [
        SOLVED,
        [reply("bash ls", "bash cat nothing"), reply("bash echo 'a<|im_end|>b'"), reply("submit")],
        [reply("nonsense"), chat().encode("just text") + [chat().stop_id], reply("bash ls")[:-2] + [chat().stop_id],
         *SOLVED],
        [reply("bash ls") + [7] * 99, reply("bash echo é红; false", "submit")],
        [reply("bash ls")] * 20,
    ],
)  # fmt: skip
def test_the_proxy_path_gives_the_ids_and_log_probs_of_the_built_in_loop(replies: list[list[int]]) -> None:
    ours, theirs = both(replies, Start(TASK))
    assert parity(ours, theirs).exact
    assert [(t.observation, t.exit_code, t.malformed, t.submitted, t.commands) for t in ours.turns] == [
        (t.observation, t.exit_code, t.malformed, t.submitted, t.commands) for t in theirs.turns
    ]
    assert ours.reward == theirs.reward
    assert pack(ours) == pack(theirs)


def test_parity_holds_for_a_task_with_tools_of_its_own() -> None:
    task = get_family("retail").make(3, 3)
    ours, theirs = both([*script(chat(), task.expert, task)], Start(task))
    assert parity(ours, theirs).exact
    assert (ours.reward, theirs.reward) == (1.0, 1.0)


def test_parity_holds_from_a_start_in_the_middle() -> None:
    with Pool("sim", size=1) as pool:
        start = record_expert(chat(), TASK, pool).start(1)
    # The script is asked by turn number: the expert's turn is number 0.
    ours, theirs = both(SOLVED, start)
    assert parity(ours, theirs).exact
    assert (theirs.start, theirs.reward, len(theirs.policy_turns)) == (1, 1.0, 2)
    assert pack(ours) == pack(theirs)


def test_parity_holds_for_a_model_that_samples() -> None:
    model, form = tiny.model(scale=3.0), tiny.chat()
    starts = [Start(expert.trajectory.task) for expert in tiny.experts()]
    params, found = SamplingParams(max_new_tokens=12), []
    for kind in (Rollout, NativeRollout):
        with Pool("sim", size=1) as pool:  # one box, one episode at a time: the same batches
            rollout = kind(form, TransformersSampler(model, form.stop_id), pool, seed=4)
            found.append(rollout.collect(starts, params, step=3))
    for ours, theirs in zip(*found, strict=True):
        assert parity(ours, theirs).exact
        assert any(turn.logprobs[0] < 0 for turn in theirs.turns)


def test_drift_is_counted_not_hidden() -> None:
    ours, theirs = both(SOLVED, Start(TASK))
    theirs.turns[1].ids = [5, *theirs.turns[1].ids[1:]]
    theirs.turns[0].logprobs[0] -= 1e-7
    found = parity(ours, theirs, retokenised=2)
    assert (found.turns, found.ids, found.logprobs, found.retokenised) == (3, 1, 0, 2)
    assert not found.exact


# -- agents --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # of litellm's own making
def test_mini_swe_agent_runs_as_it_is_and_its_episode_trains() -> None:
    replies = [*(reply(f"bash {command}") for command in TASK.expert), MARKER]
    found = native(MiniSweAgent(), replies)
    assert (found.reward, len(found.turns), found.chains) == (1.0, len(replies), [])
    assert [turn.ids for turn in found.turns] == replies
    assert [turn.exit_code for turn in found.turns] == [0] * len(replies)
    assert sum(pack(found).env_mask) == sum(map(len, replies))


@pytest.mark.filterwarnings("ignore")
def test_mini_swe_agent_that_never_submits_is_ended_and_judged() -> None:
    found = native(MiniSweAgent(), [reply("bash ls")] * 30)
    assert found.reward == 0.0
    assert len(found.turns) == TASK.chunks + 4


class Forgetful:
    """Edits its history: before each call it drops all but the instruction and the last exchange."""

    def __call__(self, access: Access) -> None:
        client = openai.OpenAI(base_url=access.url, api_key=access.token, max_retries=0)
        last: list[Any] = []
        while not access.over:
            answer = client.chat.completions.create(
                model=MODEL, messages=[access.messages[0], *last], tools=tools_of(access.env.task)  # type: ignore
            )
            choice = answer.choices[0].model_dump(exclude_none=True)
            last = [choice["message"], *answers(choice["message"], access.act(response_of(choice)))]


def test_an_agent_that_edits_its_history_gives_chains_that_hold_each_response_once() -> None:
    found = native(Forgetful(), SOLVED)
    assert found.reward == 1.0
    assert [sample.reward for sample in found.samples] == [1.0] * len(found.samples)
    assert sorted(turn.ids for sample in found.samples for turn in sample.turns) == sorted(SOLVED)
    assert len(found.samples) == 2  # the second call still has the whole history
    for sample in found.samples:
        pack(sample)


def test_an_agent_that_crashes_or_stops_is_judged_by_what_it_left() -> None:
    def crashes(access: Access) -> None:
        raise KeyError("oops")

    found = native(crashes, SOLVED)
    assert (found.reward, found.turns) == (0.0, [])
    assert found.reason.startswith("agent crashed (KeyError)")
    assert native(lambda access: None, SOLVED).reason.startswith("never submitted")


class Broken(ScriptedSampler):
    def generate(self, requests: list[Request], params: SamplingParams) -> list[Completion]:
        raise RuntimeError("gone")


def test_a_dead_sampler_leaves_the_episode_unscored_whatever_the_agent_makes_of_it() -> None:
    begun = time.monotonic()
    with Pool("sim", size=1) as pool, Proxy(SamplerBackend(Broken([]), chat()), chat()) as proxy:
        with Env(TASK, pool) as env:
            found = play_native(proxy, OpenAIAgent(), env, Start(TASK), PARAMS)
    assert (found.reward, found.reason, found.infra) == (None, "sampler_down", True)
    assert time.monotonic() - begun < 10


def test_many_agents_at_once_each_get_their_own_episode() -> None:
    tasks = [get_family("notes").make(seed, 2) for seed in range(12)]
    with Pool("sim", size=8) as pool:
        rollout = NativeRollout(chat(), ScriptedSampler([reply("bash ls"), reply("submit")]), pool)
        found = rollout.collect([Start(task) for task in tasks], PARAMS, first_episode=5)
    assert [each.task.name for each in found] == [task.name for task in tasks]
    assert [each.episode for each in found] == list(range(5, 17))
    for each in found:
        assert each.turns[0].observation == "\n".join(sorted(each.task.files))


@pytest.mark.docker
def test_mini_swe_agent_acts_in_a_real_box() -> None:
    with Pool("docker", size=1) as pool:
        rollout = NativeRollout(chat(), ScriptedSampler([reply("bash id -u"), MARKER]), pool, agent=MiniSweAgent())
        found = rollout.collect([Start(TASK)], PARAMS)[0]
    assert found.backend == "docker"
    assert found.turns[0].observation == "1000"

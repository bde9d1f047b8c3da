"""Many episodes at once: failures of boxes are counted and run again; order and randomness are those of the plan."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from small import chat, tokenizer

from mini_rome.errors import ConfigError, SandboxError
from mini_rome.evaluation.evaluate import Success, ending, evaluate, tally
from mini_rome.experts import Start, record_expert, script
from mini_rome.families import get_family
from mini_rome.model import build_model
from mini_rome.rollout import ATTEMPT, Rollout
from mini_rome.sampler.base import Completion, Request, Sampler, SamplingParams
from mini_rome.sampler.scripted import ScriptedSampler
from mini_rome.sampler.transformers import TransformersSampler
from mini_rome.sandbox import Limits, Pool
from mini_rome.sandbox.base import RawStep
from mini_rome.sandbox.sim import SimSandbox
from mini_rome.types import Snapshot, Task

PARAMS = SamplingParams(max_new_tokens=40)
TASK = get_family("notes").make(3, 3)
REPLIES = script(chat(), TASK.expert)


class CountingBox(SimSandbox):
    """A simulated box that knows how many were made before it."""

    def __init__(self, number: int) -> None:
        super().__init__("none", f"box-{number}", Limits())
        self.number = number


class DyingBox(CountingBox):
    """Dies in the second step of an episode."""

    def _run(self, command: bytes, seconds: float, stdin: bytes) -> RawStep:
        if self.steps == 1:
            self._dead = "killed by the test"
            return RawStep(b"", None, status="sandbox_dead")
        return super()._run(command, seconds, stdin)


def pool_of(kinds: Callable[[int], type[CountingBox]], size: int = 64, backend: str = "sim") -> Pool:
    """A pool whose n-th box is of type kinds(n); `backend` is what it says it is."""
    made: list[int] = []

    def make() -> CountingBox:
        made.append(1)
        return kinds(len(made) - 1)(len(made) - 1)

    pool = Pool("sim", size=size, make_box=make)
    pool.backend = backend
    return pool


def healthy(size: int = 64) -> Pool:
    return pool_of(lambda number: CountingBox, size)


def scripted(pool: Pool, replies: Sequence[Sequence[int]] = REPLIES, **options: int | float) -> Rollout:
    return Rollout(chat(), ScriptedSampler(replies), pool, **options)


def other_tasks(count: int) -> list[Task]:
    """Instances that the script for TASK does not solve."""
    return [get_family("tickets").make(seed, 3) for seed in range(count)]


# -- failures of the infrastructure --------------------------------------------------------------------------------


def test_a_spoiled_episode_is_counted_by_cause_and_run_again_from_its_own_start() -> None:
    tasks = [TASK, *other_tasks(2), TASK]
    with pool_of(lambda number: DyingBox if number in (1, 3) else CountingBox) as pool:
        rollout = scripted(pool)
        trajectories = rollout.collect([Start(task) for task in tasks], PARAMS, first_episode=10)
    assert [trajectory.task.name for trajectory in trajectories] == [task.name for task in tasks]
    assert [trajectory.reward for trajectory in trajectories] == [1.0, 0.0, 0.0, 1.0]
    assert [trajectory.episode for trajectory in trajectories] == [10, 11 + ATTEMPT, 12, 13 + ATTEMPT]
    assert rollout.infra == {"sandbox_dead": 2}
    assert rollout.episodes == 4


def test_an_episode_that_no_try_saves_stays_unscored() -> None:
    with pool_of(lambda number: DyingBox) as pool:
        rollout = scripted(pool, resample_cap=2)
        trajectories = rollout.collect([Start(TASK)] * 3, PARAMS)
    assert [(t.reward, t.reason, t.infra) for t in trajectories] == [(None, "sandbox_dead", True)] * 3
    assert [t.episode for t in trajectories] == [number + 2 * ATTEMPT for number in range(3)]
    assert rollout.infra == {"sandbox_dead": 9}


def test_a_dead_box_never_becomes_a_reward_of_zero() -> None:
    with pool_of(lambda number: DyingBox) as pool:
        rewards = [t.reward for t in scripted(pool, resample_cap=0).collect([Start(TASK)] * 5, PARAMS)]
    assert rewards == [None] * 5


class LostBox(CountingBox):
    """Cannot be judged: every box says so in other words."""

    def _snapshot(self) -> Snapshot:
        raise SandboxError(f"{self.name} is gone")


def test_causes_do_not_tell_boxes_apart() -> None:
    with pool_of(lambda number: LostBox) as pool:
        rollout = scripted(pool, resample_cap=1)
        rollout.collect([Start(TASK)] * 3, PARAMS)
    assert rollout.infra == {"infra_error": 6}


def test_more_than_five_per_cent_spoiled_stops_the_run_with_the_causes() -> None:
    with pool_of(lambda number: DyingBox if number < 3 else CountingBox) as pool:
        rollout = scripted(pool)
        with pytest.raises(SandboxError, match=r"3 of 40 .* more than 5% \(sandbox_dead: 3\).*doctor") as caught:
            rollout.collect([Start(TASK)] * 40, PARAMS)
    assert len(str(caught.value).splitlines()) <= 3


@pytest.mark.parametrize(("dying", "episodes"), [(2, 40), (3, 39)])
def test_five_per_cent_or_fewer_than_forty_episodes_do_not_stop_it(dying: int, episodes: int) -> None:
    with pool_of(lambda number: DyingBox if number < dying else CountingBox) as pool:
        rewards = [t.reward for t in scripted(pool).collect([Start(TASK)] * episodes, PARAMS)]
    assert rewards == [1.0] * episodes


def test_a_start_whose_restored_tree_is_not_the_recorded_one_is_never_played() -> None:
    with healthy() as pool:
        start = record_expert(chat(), get_family("tickets").make(3, 3), pool).start(1)
        assert start.snapshot is not None
        wrong = replace(start, snapshot=replace(start.snapshot, tree_hash="0" * 64))
        alive = replace(start, snapshot=replace(start.snapshot, resumable=False))
        rollout = scripted(pool, script(chat(), ["ls"] * 9), resample_cap=0)
        good, *bad = rollout.collect([start, wrong, alive], PARAMS)
    assert [(t.reward, t.reason, t.turns) for t in bad] == [(None, "StartMismatch", [])] * 2
    assert good.reward is not None
    assert len(good.policy_turns) > 0
    assert rollout.infra == {"StartMismatch": 2}


# -- starts in the middle ------------------------------------------------------------------------------------------


def test_an_episode_from_the_middle_goes_on_token_for_token_where_the_expert_was() -> None:
    task = get_family("tickets").make(5, 4)
    with healthy() as pool:
        expert = record_expert(chat(), task, pool)
        whole = script(chat(), task.expert)
        for p in range(4):
            rollout = scripted(pool, [[0]] * p + whole[p:])  # replies before turn p are never asked for
            (trajectory,) = rollout.collect([expert.start(p)], PARAMS)
            assert (trajectory.reward, trajectory.start, len(trajectory.turns)) == (1.0, p, 4)
            assert [turn.source for turn in trajectory.turns] == ["expert"] * p + ["policy"] * (4 - p)
            for mine, theirs in zip(trajectory.turns, expert.trajectory.turns, strict=True):
                assert (mine.ids, mine.observation_ids) == (theirs.ids, theirs.observation_ids)


def test_a_start_does_not_share_its_turns_with_the_episodes_from_it() -> None:
    with healthy() as pool:
        start = record_expert(chat(), TASK, pool).start(2)
        first, second = scripted(pool).collect([start, start], PARAMS)
    assert first.turns[0] is not second.turns[0]
    assert first.turns[0] is not start.turns[0]
    assert len(start.turns) == 2


def test_a_full_context_ends_the_episode_and_what_is_there_is_judged() -> None:
    prompt = len(chat().prompt(TASK.instruction))
    with healthy() as pool:
        rollout = scripted(pool, max_context=prompt + PARAMS.max_new_tokens + 5)
        (trajectory,) = rollout.collect([Start(TASK)], PARAMS)
    assert len(trajectory.turns) == 1
    assert trajectory.reward == 0.0
    assert trajectory.reason.startswith("context full; ")


# -- order and randomness ------------------------------------------------------------------------------------------


class Eager(Sampler):
    """Passes requests on to a sampler; counts the largest batch."""

    name = "eager"

    def __init__(self, inner: Sampler) -> None:
        self.inner, self.largest = inner, 0

    def generate(self, requests: list[Request], params: SamplingParams) -> list[Completion]:
        self.largest = max(self.largest, len(requests))
        return self.inner.generate(requests, params)

    def sync(self, model, version: int) -> None:
        self.inner.sync(model, version)

    def forget(self, episodes=None) -> None:
        self.inner.forget(episodes)


def sampled(split: list[int], size: int = 64, step: int = 0, seed: int = 0) -> list[list[list[int]]]:
    """Token ids of six episodes of an untrained model, collected in calls of the given lengths."""
    tasks = [get_family(name).make(1, 2) for name in ("notes", "tickets")] * 3
    sampler = Eager(TransformersSampler(build_model(tokenizer()), chat().stop_id))
    with healthy(size) as pool:
        rollout = Rollout(chat(), sampler, pool, seed=seed, extra_turns=0)
        found, first = [], 0
        for count in split:
            starts = [Start(task) for task in tasks[first : first + count]]
            found += rollout.collect(starts, SamplingParams(max_new_tokens=5), step=step, first_episode=first)
            first += count
    assert [trajectory.episode for trajectory in found] == list(range(6))
    assert [trajectory.task.name for trajectory in found] == [task.name for task in tasks]
    assert sampler.largest == min(size, max(split))
    return [[turn.ids for turn in trajectory.turns] for trajectory in found]


def test_results_do_not_depend_on_how_episodes_are_split_into_calls_or_boxes() -> None:
    whole = sampled([6])
    assert len({str(ids) for ids in whole}) == 6
    assert sampled([2, 4]) == whole
    assert sampled([3, 1, 2]) == whole
    assert sampled([6], size=2) == whole


def test_another_step_or_seed_draws_other_tokens() -> None:
    assert sampled([6], step=1) != sampled([6])
    assert sampled([6], seed=1) != sampled([6])


def test_progress_counts_finished_episodes() -> None:
    told: list[tuple[int, int]] = []
    with healthy(2) as pool:
        scripted(pool).collect([Start(TASK)] * 5, PARAMS, progress=lambda done, total: told.append((done, total)))
    assert told == [(done, 5) for done in range(1, 6)]


def test_no_start_is_no_episode() -> None:
    with healthy() as pool:
        assert scripted(pool).collect([], PARAMS) == []


def test_an_error_that_is_not_the_sandboxs_is_not_swallowed() -> None:
    with healthy() as pool, pytest.raises(ConfigError, match="asked for turn 1"):
        scripted(pool, REPLIES[:1]).collect([Start(TASK)] * 2, PARAMS)


# -- no barrier per turn -------------------------------------------------------------------------------------------


class SlowBox(CountingBox):
    """Sleeps in its first step until the others have finished; twenty seconds at most."""

    others_done = threading.Event()
    waited_out = False

    def _run(self, command: bytes, seconds: float, stdin: bytes) -> RawStep:
        if self.steps == 0 and not self.others_done.wait(20):
            SlowBox.waited_out = True
        return super()._run(command, seconds, stdin)


class Watched(ScriptedSampler):
    """Tells the slow box when three other episodes have been asked for their last turn."""

    def generate(self, requests: list[Request], params: SamplingParams) -> list[Completion]:
        self.last_turns += sum(request.key[-1] == len(self.replies) - 1 for request in requests)
        if self.last_turns >= 3:
            SlowBox.others_done.set()
        return super().generate(requests, params)

    last_turns = 0


def test_a_slow_episode_does_not_hold_up_the_others() -> None:
    with pool_of(lambda number: SlowBox if number == 0 else CountingBox, size=4, backend="docker") as pool:
        trajectories = Rollout(chat(), Watched(REPLIES), pool).collect([Start(TASK)] * 4, PARAMS)
    assert SlowBox.others_done.is_set()
    assert not SlowBox.waited_out
    assert [(t.reward, t.episode) for t in trajectories] == [(1.0, number) for number in range(4)]


def test_threads_and_one_by_one_give_the_same_trajectories() -> None:
    def run(backend: str) -> list[tuple]:
        with pool_of(lambda number: CountingBox, size=3, backend=backend) as pool:
            found = scripted(pool).collect([Start(TASK)] * 7, PARAMS)
        return [(t.episode, t.reward, [turn.observation_ids for turn in t.turns]) for t in found]

    assert run("docker") == run("sim")


@pytest.mark.docker
def test_containers_play_the_same_episodes() -> None:
    with Pool("docker", size=1) as pool, healthy() as simulated:
        real = scripted(pool).collect([Start(TASK)] * 2, PARAMS)
        copied = scripted(simulated).collect([Start(TASK)] * 2, PARAMS)
    assert [t.backend for t in real] == ["docker"] * 2
    for one, two in zip(real, copied, strict=True):
        assert one.reward == two.reward == 1.0
        assert [turn.observation for turn in one.turns] == [turn.observation for turn in two.turns]


# -- evaluation ----------------------------------------------------------------------------------------------------


def test_evaluation_counts_successes_families_and_endings() -> None:
    tasks = [TASK, *other_tasks(3), TASK]
    with healthy() as pool:
        found = evaluate(scripted(pool), tasks, PARAMS)
    assert (found.successes, found.n, found.unscored, found.rate) == (2, 5, 0, 0.4)
    assert found.by_family == {"notes": (2, 2), "tickets": (0, 3)}
    assert found.endings == {"success": 2, "wrong result": 3}
    summary = found.summary()
    assert {"rate", "low", "high", "n", "unscored", "by_family", "endings"} <= set(summary)
    assert 0 < summary["low"] < 0.4 < summary["high"] < 1


def test_unscored_episodes_are_counted_apart_and_not_as_failures() -> None:
    with pool_of(lambda number: DyingBox if number < 2 else CountingBox) as pool:
        found = evaluate(scripted(pool, resample_cap=0), [TASK] * 5, PARAMS)
    assert (found.successes, found.n, found.unscored, found.rate) == (3, 3, 2, 1.0)
    assert found.endings == {"success": 3, "infrastructure": 2}


def test_an_evaluation_without_any_scored_episode_has_no_rate() -> None:
    found = tally([("notes", None, "infrastructure")] * 3)
    assert found.rate != found.rate
    assert found.summary()["rate"] is None
    assert (found.summary()["low"], found.summary()["high"]) == (0.0, 1.0)
    assert found.by_family == {}
    assert Success().summary()["n"] == 0


def test_a_partial_reward_is_no_success() -> None:
    found = tally([("notes", 0.5, "wrong result"), ("notes", 1.0, "success"), ("tickets", 0.0, "wrong result")])
    assert (found.successes, found.n) == (1, 3)
    assert found.by_family == {"notes": (1, 2), "tickets": (0, 1)}


def test_an_episode_out_of_turns_ends_as_such() -> None:
    with healthy() as pool:
        rollout = scripted(pool, script(chat(), ["true"] * 9), extra_turns=1)
        (trajectory,) = rollout.collect([Start(TASK)], PARAMS)
    assert len(trajectory.turns) == 4  # K + 1
    assert ending(trajectory) == "turns or context used up"


def test_ranks_share_the_tasks_out_and_draw_what_one_rank_would(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[tuple[str, float | None, str]] = []

    def gather(mine: list) -> list:
        gathered.extend(mine)
        return gathered

    monkeypatch.setattr("mini_rome.evaluation.evaluate.gather_object", gather)
    tasks = [TASK, *other_tasks(3), TASK]
    with healthy() as pool:
        for rank in range(3):
            found = evaluate(scripted(pool), tasks, PARAMS, rank=rank, ranks=3)
    assert (found.successes, found.n) == (2, 5)

"""More rollouts than rows: the first to finish are kept, the rest are cut and counted; spoiled ones are as ever."""

from __future__ import annotations

import pytest
import tiny

from mini_rome.errors import ConfigError
from mini_rome.experts import Start
from mini_rome.groups import SPARE, Race
from mini_rome.rollout import ATTEMPT, Rollout
from mini_rome.sampler.base import Completion, Request, Sampler, SamplingParams
from mini_rome.sandbox import Limits, Pool
from mini_rome.sandbox.base import RawStep
from mini_rome.sandbox.sim import SimSandbox
from mini_rome.types import Trajectory

PARAMS = SamplingParams(max_new_tokens=64)


def starts() -> list[Start]:
    """Two rows of one task from p = 2, two of another; one chunk is left."""
    first, second = tiny.experts()
    return [first.start(2), first.start(2), second.start(2), second.start(2)]


class Uneven(Sampler):
    """Looks around for as many turns as `slow` says of an episode, then writes the answer."""

    name = "uneven"

    def __init__(self, slow: dict[int, int]) -> None:
        self.slow, self.asked = slow, []
        self.answers = {e.trajectory.task.instruction: e.trajectory.turns[-1].ids for e in tiny.experts()}

    def generate(self, requests: list[Request], params: SamplingParams) -> list[Completion]:
        return [self._reply(request) for request in requests]

    def _reply(self, request: Request) -> Completion:
        turn = request.key[-1] - 2
        self.asked.append((request.episode, turn))
        text = tiny.chat().decode(request.ids)
        answer = next(ids for instruction, ids in self.answers.items() if instruction in text)
        ids = tiny.chat().response("ls") if turn < self.slow.get(request.episode, 0) else list(answer)
        return Completion(ids, [-1.0] * len(ids), self.version)

    def sync(self, model, version: int) -> None:
        self.version = version

    def forget(self, episodes=None) -> None:
        """Nothing is kept."""


def played(slow: dict[int, int], redundancy: int = 1, pool: Pool | None = None, **options):
    pool = pool or Pool("sim")
    sampler = Uneven(slow)
    rollout = Rollout(tiny.chat(), sampler, pool, extra_turns=4, **options)
    found = rollout.collect(starts(), PARAMS, first_episode=10, redundancy=redundancy)
    assert [t.task.name for t in found] == [s.task.name for s in starts()]
    assert pool._out == set()
    return found, rollout, sampler


def test_the_first_to_finish_are_kept_and_a_straggler_is_cut_at_its_next_turn():
    found, rollout, sampler = played({10: 3})
    assert [t.episode for t in found] == [11, 10 + SPARE, 12, 13]  # of the second group all end at once
    assert [t.reward for t in found] == [1.0] * 4
    assert rollout.cancelled == 1
    assert max(turn for _, turn in sampler.asked) == 0  # nobody was asked again
    assert rollout.episodes == 4


def test_a_straggler_that_is_needed_is_waited_for():
    found, rollout, _ = played({10: 2, 10 + SPARE: 3})
    assert [t.episode for t in found] == [10, 11, 12, 13]
    assert [len(t.policy_turns) for t in found] == [3, 1, 1, 1]
    assert rollout.cancelled == 1


def test_without_redundancy_nothing_is_begun_beyond_the_rows_or_cut():
    found, rollout, sampler = played({10: 3}, redundancy=0)
    assert [t.episode for t in found] == [10, 11, 12, 13]
    assert rollout.cancelled == 0 and {episode for episode, _ in sampler.asked} == {10, 11, 12, 13}


def test_spares_that_no_box_was_free_for_are_not_begun():
    found, rollout, sampler = played({}, pool=Pool("sim", size=4))
    assert [t.episode for t in found] == [10, 11, 12, 13]
    assert rollout.cancelled == 2 and len(sampler.asked) == 4


class DyingBox(SimSandbox):
    def _run(self, command: bytes, seconds: float, stdin: bytes) -> RawStep:
        self._dead = "killed by the test"
        return RawStep(b"", None, status="sandbox_dead")


def dying(*numbers: int) -> Pool:
    """A pool whose boxes of these numbers die."""
    made: list[int] = []

    def make() -> SimSandbox:
        made.append(1)
        kind = DyingBox if len(made) - 1 in numbers else SimSandbox
        return kind("none", f"box-{len(made)}", Limits())

    return Pool("sim", make_box=make)


def test_a_spoiled_rollout_does_not_finish_a_group_and_is_counted():
    found, rollout, _ = played({}, pool=dying(0))
    assert [t.episode for t in found] == [11, 10 + SPARE, 12, 13]
    assert [t.reward for t in found] == [1.0] * 4
    assert rollout.infra == {"sandbox_dead": 1}


def test_a_group_with_too_few_others_runs_its_spoiled_rollout_again():
    found, rollout, _ = played({}, pool=dying(0, 4))  # boxes are taken in the order of episodes: 10 and its spare
    assert [t.episode for t in found] == [10 + ATTEMPT, 11, 12, 13]
    assert [t.reward for t in found] == [1.0] * 4
    assert rollout.infra == {"sandbox_dead": 2}


def test_parallel_starts_of_one_task_are_groups_of_their_own():
    first = tiny.experts()[0]
    race = Race([first.start(0), first.start(2), first.start(0)], 0, 2)
    assert [number for number, _ in race.episodes] == [0, 1, 2, SPARE, 2 * SPARE, 1 + SPARE, 1 + 2 * SPARE]
    task = first.trajectory.task
    for number in (1 + SPARE, 2 * SPARE):
        race.finish(Trajectory(task, [], [], reward=0.0, episode=number))
    assert [race.over(number) for number in range(3)] == [False, True, False]
    race.finish(Trajectory(task, [], [], reward=1.0, episode=2))
    assert all(race.over(number) for number in range(3)) and race.cancelled == 4
    assert [t.episode for t in race.kept()[0]] == [2, 1 + SPARE, 2 * SPARE]


def test_an_agent_that_cannot_be_cut_is_refused():
    class External(Rollout):
        cancels = False

    with pytest.raises(ConfigError, match="--rollout_redundancy 2"):
        External(tiny.chat(), Uneven({}), Pool("sim")).collect(starts(), PARAMS, redundancy=2)


def test_a_trainer_logs_what_it_cut(tmp_path):
    trainer = tiny.trainer(tmp_path, rollout_redundancy=2, max_steps=1)
    asked = []
    collect = trainer.rollout.collect
    trainer.rollout.collect = lambda *a, **o: asked.append(o["redundancy"]) or collect(*a, **o)
    trainer.rollout.cancelled = 7  # of earlier steps
    trainer.train()
    assert asked == [2]
    assert trainer.state.log_history[0]["rollouts/cancelled"] == trainer.rollout.cancelled - 7

"""Chunk-level initialised resampling: start states, experts, crucial chunks, dynamic filtering."""

import json
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import TASK, episode, trajectory, turn

from mini_rome.chunking import pack, validate_chunk_ids
from mini_rome.resample import (
    Both,
    Initial,
    ParallelInit,
    SequentialRollback,
    crucial_chunks,
    failed_forks,
    fisher_less,
    refill,
    refreshed_expert,
    spoiled_by_illegal_calls,
    spoiled_by_infrastructure,
)

CHUNKS = {"a": 12, "b": 1, "c": 5}
MAKERS = {
    "initial": lambda: Initial(CHUNKS),
    "rollback": lambda: SequentialRollback(CHUNKS),
    "uniform": lambda: ParallelInit(CHUNKS),
    "random": lambda: ParallelInit(CHUNKS, mode="random"),
    "both": lambda: Both(SequentialRollback(CHUNKS), ParallelInit(CHUNKS, mode="random")),
}
every_kind = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def outcomes(task: str, p: int, pattern: str) -> list:
    """Results of one batch: 1 success, 0 failure, - unscored."""
    return [(task, p, {"1": True, "0": False, "-": None}[mark]) for mark in pattern]


# Start states


@every_kind
def test_a_plan_holds_every_task_in_order_and_starts_within_its_expert(make) -> None:
    for step in range(20):
        plan = make().starts(["c", "a", "b"], step, rollouts=6)
        assert [index for index, _ in plan] == [0] * 6 + [1] * 6 + [2] * 6
        for index, p in plan:
            assert 0 <= p <= CHUNKS["cab"[index]] - 1


@every_kind
def test_a_plan_depends_on_task_and_step_only(make) -> None:
    """The same task in another list, on another object: the same starts; ranks agree without talking."""
    assert make().starts(["a", "c"], 3, 6)[6:] == [(1, p) for _, p in make().starts(["c"], 3, 6)]
    assert make().positions("a", 3, 6) == make().positions("a", 3, 6)


@pytest.mark.parametrize("kind", ["random", "both"])
def test_random_starts_change_from_step_to_step(kind: str) -> None:
    assert len({tuple(MAKERS[kind]().starts(["a"], step, 8)) for step in range(5)}) > 1


def test_the_naive_arm_starts_at_the_initial_state() -> None:
    assert Initial(CHUNKS).starts(["a", "c"], 5, 2) == [(0, 0), (0, 0), (1, 0), (1, 0)]


def test_rollback_starts_with_one_chunk_left() -> None:
    """p = K-1 expert chunks are executed, so exactly chunk K is the policy's."""
    p = SequentialRollback({"t": 4}).positions("t", 0, 1)[0]
    assert p == 3
    assert validate_chunk_ids(pack(episode([1] * 4, [1] * 4, start=p)).chunk_ids) == 1


def test_rollback_walks_down_to_the_initial_state_and_stays() -> None:
    rollback, seen = SequentialRollback({"t": 4}, window=1), []
    for step in range(6):
        p = rollback.positions("t", step, 1)[0]
        seen.append(p)
        rollback.update(outcomes("t", p, "11"))
    assert seen == [3, 2, 1, 0, 0, 0]


def test_the_window_pools_its_batches_and_clears_after_a_move() -> None:
    rollback = SequentialRollback({"t": 4}, threshold=0.7, window=2)
    rollback.update(outcomes("t", 3, "1111"))
    assert rollback.position["t"] == 3  # one batch is no window
    rollback.update(outcomes("t", 3, "110000"))  # 6 of 10
    assert rollback.position["t"] == 3
    rollback.update(outcomes("t", 3, "11111111"))  # the oldest batch left: 10 of 14, at the threshold or above
    assert rollback.position["t"] == 2 and rollback.batches["t"] == []
    rollback.update(outcomes("t", 2, "1111"))
    assert rollback.position["t"] == 2


def test_a_rate_at_the_threshold_moves_and_one_below_does_not() -> None:
    for pattern, p in (("10", 2), ("100", 3)):
        rollback = SequentialRollback({"t": 4}, threshold=0.5, window=1)
        rollback.update(outcomes("t", 3, pattern))
        assert rollback.position["t"] == p


def test_results_from_other_starts_and_unscored_ones_do_not_count() -> None:
    rollback = SequentialRollback({"t": 4, "u": 4}, threshold=0.5, window=1)
    rollback.update([*outcomes("t", 2, "1111"), *outcomes("t", 3, "---"), *outcomes("u", 3, "1-0--")])
    assert rollback.position == {"t": 3, "u": 2} and rollback.batches["t"] == []


@every_kind
def test_state_survives_a_checkpoint_as_json(make) -> None:
    used, names = make(), ["a", "b", "c"]
    for step in range(5):
        plan = used.starts(names, step, 4)
        used.update([(names[index], p, index != 1 or step == 0) for index, p in plan])
    used.set_chunks("c", 3)
    used.update([("a", p, True) for p in used.positions("a", 5, 4)])
    restored = make()
    restored.load_state_dict(json.loads(json.dumps(used.state_dict())))
    assert restored.state_dict() == used.state_dict()
    for step in range(5, 12):
        plan = used.starts(names, step, 4)
        assert plan == restored.starts(names, step, 4)
        for each in (used, restored):
            each.update([(names[index], p, True) for index, p in plan])


@pytest.mark.parametrize(
    ("chunks", "anchors", "rollouts", "expected"),
    [
        (12, 8, 8, [0, 1, 3, 4, 6, 7, 9, 11]),
        (12, 4, 8, [0, 0, 3, 3, 7, 7, 11, 11]),
        (3, 8, 4, [0, 0, 1, 2]),
        (12, 8, 2, [0, 11]),
        (12, 8, 1, [0]),
        (1, 8, 3, [0, 0, 0]),
        (12, 1, 3, [0, 0, 0]),
        (12, 8, 0, []),
    ],
)
def test_uniform_anchors_reach_both_ends(chunks: int, anchors: int, rollouts: int, expected: list[int]) -> None:
    assert ParallelInit({"t": chunks}, anchors).positions("t", 0, rollouts) == expected


def test_random_anchors_are_distinct_keyed_by_step_task_and_seed_and_cover_all_positions() -> None:
    parallel = ParallelInit({"t": 12, "u": 12}, anchors=4, mode="random")
    seen = Counter()
    for step in range(60):
        starts = parallel.positions("t", step, 8)
        assert sorted(Counter(starts).values()) == [2, 2, 2, 2]
        seen.update(starts)
    assert set(seen) == set(range(12))
    draws = [parallel.positions("t", 0, 4), parallel.positions("t", 1, 4), parallel.positions("u", 0, 4)]
    draws.append(ParallelInit({"t": 12}, 4, "random", seed=1).positions("t", 0, 4))
    assert len({tuple(draw) for draw in draws}) == 4


def test_both_shares_a_tasks_rollouts_and_moves_by_its_rollback() -> None:
    both = Both(SequentialRollback({"t": 5}, window=1), ParallelInit({"t": 5}, anchors=2))
    assert both.positions("t", 0, 5) == [4, 4, 4, 0, 4]
    both.update(outcomes("t", 4, "11"))
    assert both.positions("t", 1, 4) == [3, 3, 0, 4]
    both.set_chunks("t", 3)
    assert both.positions("t", 2, 4) == [2, 2, 0, 2]


def test_both_keeps_the_state_of_the_rollback_it_is_given() -> None:
    rollback = SequentialRollback({"t": 5}, threshold=0.5, window=2)
    rollback.update(outcomes("t", 4, "1"))
    both = Both(rollback, ParallelInit({"t": 5}))
    both.update(outcomes("t", 4, "1"))
    assert rollback.position["t"] == 3


def test_a_shorter_expert_keeps_the_start_within_it_and_clears_the_window() -> None:
    rollback = SequentialRollback({"t": 5}, window=2)
    rollback.update(outcomes("t", 4, "1"))
    rollback.set_chunks("t", 3)
    assert rollback.positions("t", 0, 1) == [2] and rollback.batches["t"] == []
    rollback.set_chunks("t", 6)
    assert rollback.positions("t", 0, 1) == [2]
    parallel = ParallelInit({"t": 5}, anchors=2)
    parallel.set_chunks("t", 3)
    assert parallel.positions("t", 0, 2) == [0, 2]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Initial({"t": 0}), "task t"),
        (lambda: SequentialRollback({"t": 0}), "task t"),
        (lambda: SequentialRollback({"t": 2}, threshold=0.0), "threshold"),
        (lambda: SequentialRollback({"t": 2}, threshold=1.1), "threshold"),
        (lambda: SequentialRollback({"t": 2}, window=0), "window"),
        (lambda: ParallelInit({"t": 2}, anchors=0), "anchors"),
        (lambda: ParallelInit({"t": 2}, mode="even"), "mode"),
    ],
)
def test_impossible_settings_are_refused_by_name(make, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        make()


def test_the_largest_threshold_and_smallest_window_are_allowed() -> None:
    rollback = SequentialRollback({"t": 2}, threshold=1.0, window=1)
    rollback.update(outcomes("t", 1, "11"))
    assert rollback.position["t"] == 0
    assert (SequentialRollback({}).threshold, SequentialRollback({}).window, ParallelInit({}).anchors) == (0.7, 2, 8)
    assert (ParallelInit({}).mode, ParallelInit({}).seed) == ("uniform", 0)


# Experts


def test_an_expert_is_replaced_by_the_shortest_verified_self_sample() -> None:
    expert = episode([1] * 5, [1] * 5, reward=1.0)
    four, three, other_three = (episode([1] * n, [1] * n, reward=1.0) for n in (4, 3, 3))
    assert refreshed_expert(expert, [four, three, other_three]) is three
    assert refreshed_expert(expert, []) is expert


@pytest.mark.parametrize(
    "change",
    [{"reward": 0.99}, {"reward": None}, {"start": 1}, {"task": replace(TASK, name="x")}, {"turns": [turn()] * 5}],
    ids=["not verified", "unscored", "resumed", "other task", "not shorter"],
)
def test_anything_else_leaves_the_expert(change: dict) -> None:
    expert = episode([1] * 5, [1] * 5, reward=1.0)
    candidate = episode([1] * 4, [1] * 4, reward=1.0)
    assert refreshed_expert(expert, [candidate]) is candidate
    assert refreshed_expert(expert, [replace(candidate, **change)]) is expert


# Forks


def test_a_fork_failed_when_no_scored_rollout_from_it_succeeded() -> None:
    results = [*outcomes("b", 2, "000"), *outcomes("b", 1, "010"), *outcomes("a", 3, "-0"), *outcomes("a", 2, "--")]
    assert failed_forks(results) == [("a", 3), ("b", 2)]


def test_fisher_by_counting_all_outcomes() -> None:
    """Every way to hand out the successes among 3 + 4 rollouts, counted one by one."""
    for here, there in product(range(4), range(5)):
        ways = [sum(marks[:3]) for marks in product((0, 1), repeat=7) if sum(marks) == here + there]
        expected = Fraction(sum(count <= here for count in ways), len(ways))
        assert fisher_less(here, 3, there, 4) == pytest.approx(float(expected), rel=1e-12)


def test_fisher_of_a_published_table() -> None:
    """The lady tasting tea: 3 of 4 right has one-sided p = 17/70."""
    assert fisher_less(1, 4, 3, 4) == pytest.approx(17 / 70, rel=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 60), st.integers(1, 60), st.data())
def test_fisher_is_a_probability_that_falls_with_the_contrast(n: int, m: int, data) -> None:
    a, b = data.draw(st.integers(0, n)), data.draw(st.integers(0, m))
    here = fisher_less(a, n, b, m)
    assert 0 < here <= 1 + 1e-12
    if a > 0 and b < m:
        assert fisher_less(a - 1, n, b + 1, m) < here + 1e-12


def test_crucial_chunks_are_where_the_success_rate_jumps() -> None:
    assert crucial_chunks([0, 0, 30, 31, 32], [32] * 5) == [1]
    assert crucial_chunks([32, 32, 0], [32] * 3) == [2]  # V(K) is the verified expert
    assert crucial_chunks([0], [32]) == [0] and crucial_chunks([32], [32]) == []
    assert crucial_chunks([32, 0, 32], [32] * 3) == [1]  # a drop is not a jump
    assert crucial_chunks([0, 15, 32], [32] * 3) == [0, 1]
    assert crucial_chunks([0, 2, 64], [32, 4, 64]) == [0, 1]  # trials may differ
    assert crucial_chunks([0], [1]) == []


def test_holm_corrects_over_all_positions() -> None:
    """The smallest of three p-values is compared with alpha / 3, the next with alpha / 2."""
    successes, trials = [2, 9, 16], [16] * 3
    first, second = fisher_less(2, 16, 9, 16), fisher_less(9, 16, 16, 16)
    assert second < first < 0.05
    for alpha, expected in (
        (3 * second * 0.999, []),
        (3 * second * 1.001, [1]),
        (2 * first * 0.999, [1]),
        (2 * first * 1.001, [0, 1]),
    ):
        assert crucial_chunks(successes, trials, alpha) == expected, alpha


def test_a_probability_equal_to_alpha_is_significant() -> None:
    assert crucial_chunks([0], [2], alpha=fisher_less(0, 2, 2, 2)) == [0]


def test_the_same_contrast_needs_more_trials_among_more_positions() -> None:
    assert crucial_chunks([11], [16]) == [0]
    assert crucial_chunks([11, 16, 16], [16] * 3) == []


@pytest.mark.parametrize(("successes", "trials"), [([], []), ([1], [1, 2]), ([0, 1], [0, 2])])
def test_counts_that_do_not_pair_up_are_refused(successes: list[int], trials: list[int]) -> None:
    with pytest.raises(ValueError, match="trials"):
        crucial_chunks(successes, trials)


# Dynamic filtering


def batch(*rewards: float | None):
    return [trajectory([turn()], reward=r, reason="" if r is not None else "sandbox_dead") for r in rewards]


def test_spoiled_rollouts_are_run_again_in_place() -> None:
    old, asked = batch(1.0, None, 0.0, None), []
    new = batch(0.5, 0.25)

    def resample(indices: list[int]):
        asked.append(indices)
        return new

    filled, causes = refill(old, resample)
    assert asked == [[1, 3]] and causes == {"sandbox_dead": 2}
    assert filled == [old[0], new[0], old[2], new[1]] and old[1].reward is None


@pytest.mark.parametrize("cap", [0, 1, 2])
def test_the_cap_ends_the_attempts_and_leaves_the_rest_unscored(cap: int) -> None:
    asked = []

    def resample(indices: list[int]):
        asked.append(list(indices))
        return batch(*[None] * len(indices))

    filled, causes = refill(batch(1.0, None), resample, cap)
    assert asked == [[1]] * cap and filled[1].reward is None
    assert causes == {"sandbox_dead": cap + 1}


def test_by_default_two_attempts_and_infrastructure_only() -> None:
    asked = []

    def resample(indices: list[int]):
        asked.append(indices)
        return batch(*[None] * len(indices))

    refill([*batch(None), trajectory([turn(malformed=True)] * 9, reward=0.0)], resample)
    assert asked == [[0], [0]]


def test_a_batch_without_trouble_is_not_run_again() -> None:
    assert refill(batch(1.0, 0.0), lambda indices: pytest.fail("nothing to run")) == (batch(1.0, 0.0), Counter())


def test_a_wrong_number_of_new_rollouts_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        refill(batch(None, None), lambda indices: batch(1.0))


def test_causes_are_named() -> None:
    assert spoiled_by_infrastructure(batch(None)[0]) == "sandbox_dead"
    assert spoiled_by_infrastructure(trajectory([], reward=None)) == "unknown"
    assert spoiled_by_infrastructure(trajectory([], reward=0.0, reason="no turns left")) is None


def test_illegal_calls_are_filtered_only_on_request() -> None:
    illegal = trajectory([turn("", malformed=True)] * 3 + [turn()], reward=0.0)
    assert spoiled_by_infrastructure(illegal) is None
    assert spoiled_by_illegal_calls(illegal) == "illegal_calls"
    assert spoiled_by_illegal_calls(illegal, limit=4) is None
    assert spoiled_by_illegal_calls(replace(illegal, start=1)) is None  # the expert's part is not the agent's doing
    assert spoiled_by_illegal_calls(batch(None)[0]) == "sandbox_dead"
    filled, causes = refill([illegal], lambda indices: batch(1.0), spoiled=spoiled_by_illegal_calls)
    assert filled[0].reward == 1.0 and causes == {"illegal_calls": 1}

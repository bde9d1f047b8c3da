"""Assignment 4: chunk-level initialised resampling (paper, section 3.2.4).

A task that is too long to solve from the beginning is started in the middle: an expert's first p chunks are executed
and the policy writes the rest. You bring a box to such states, choose p, and find the chunks that matter.

`box` is a simulated sandbox (mini_rome.sandbox, which can be imported where you are graded): box.exec(command) gives
a result with .output and .exit_code, box.snapshot() a state with .tree_hash, box.restore(snapshot) goes back to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from mini_rome import resample
from mini_rome.sandbox import Sandbox, initial_snapshot


def states(box: Sandbox, files: dict[str, str], commands: list[str]) -> list[str]:
    """The tree hashes of the states before each of the expert's K commands: K of them, the first the initial state.

    The box may hold anything; restore `initial_snapshot(files)` first.
    """
    box.restore(initial_snapshot(files))
    return [(box.snapshot().tree_hash, box.exec(command))[0] for command in commands]


def answers_from(box: Sandbox, files: dict[str, str], commands: list[str], p: int, attempts: list[str]) -> list[str]:
    """The output of each attempt, each of them made from the state after the expert's first p commands.

    An attempt must not see what another one did: restore the state before each.
    """
    box.restore(initial_snapshot(files))
    _ = [box.exec(command) for command in commands[:p]]
    start = box.snapshot()
    return [(box.restore(start), box.exec(attempt).output)[1] for attempt in attempts]


def sequential_rollback(chunks: int, batches: list[list[bool]], threshold: float, window: int) -> list[int]:
    """p before the first batch, and after each: one number more than there are batches.

    p begins at K-1. When the success rate over the last `window` batches from this p, all their rollouts together, is
    at least `threshold`, p moves one back, not below 0, and the window is empty again. A window that is not full yet
    moves nothing. Every batch holds the successes of its rollouts from the current p.

    3 chunks, [[True], [True, False], [True]], 0.5, 1: [2, 1, 0, 0].
    """
    rollback = resample.SequentialRollback({"t": chunks}, threshold, window)
    moves = (rollback.update(("t", rollback.position["t"], won) for won in batch) for batch in batches)
    return [rollback.position["t"], *(rollback.position["t"] for _ in moves)]


def parallel_starts(chunks: int, anchors: int, rollouts: int) -> list[int]:
    """p of each rollout, ascending: anchors spaced evenly over 0..K-1, both ends included, in one mixed batch.

    No more anchors than chunks or rollouts. Anchor i of n is i (K-1) / (n-1) rounded down; a single one is 0. The
    rollouts are shared out evenly, earlier anchors get those that are left over.

    5 chunks, 3 anchors, 4 rollouts: [0, 0, 2, 4].
    """
    return resample.ParallelInit({"t": chunks}, anchors).positions("t", 0, rollouts)


def failed_forks(results: list[list]) -> list[list]:
    """[task, p] from which no scored rollout succeeded, sorted. results: [task, p, success]; None was not scored."""
    return [list(fork) for fork in resample.failed_forks(tuple(result) for result in results)]


def crucial_chunks(successes: list[int], trials: list[int]) -> list[int]:
    """Chunk ids (0..K-1) whose V(f-1) is significantly below V(f): where the policy, left alone, goes wrong.

    successes[p] of trials[p] rollouts from p succeeded, p = 0..K-1. V(K) is the expert's: all of trials[K-1]. Compare
    each p with p + 1 by a one-sided Fisher test (the probability of at most so many successes at p, the margins
    given), and correct by Holm over the K tests at level 0.05: in the order of their probabilities, the first rank r
    (from 0) above 0.05 / (K - r) and all after it are not significant. Sorted.

    [0, 31, 32] of [32, 32, 32]: [0].
    """
    return resample.crucial_chunks(successes, trials)


def test_sampler(implementation: Callable[[list[list[float]]], list[list[float]]]) -> None:
    """A test: it must pass for a right implementation and fail, by `assert`, for a wrong one.

    implementation(weights) is a run: weights[v] are the trainer's logits after update v, a list of 2 to 8 numbers, at
    most 8 updates. After each update they are loaded into the sampler, which then scores every token: the result
    holds, for each v, the sampler's log-probs, which must be log softmax(weights[v]).

    A bug that was found in the wild: a stale adapter. The sampler goes on with the weights it loaded first.
    """
    weights = [[0.0, 1.0], [2.0, -1.0], [2.0, -1.0], [-1.0, 2.0], [0.5, 0.5]]
    for row, scores in zip(weights, implementation(weights), strict=True):
        norm = math.log(sum(math.exp(x) for x in row))
        assert all(math.isclose(x - norm, y, abs_tol=1e-9) for x, y in zip(row, scores, strict=True))

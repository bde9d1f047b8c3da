"""Common wrong answers: FUNCTION__name, graded in place of FUNCTION. Each must lose points. Not released."""

from mini_rome import resample
from mini_rome.sandbox import initial_snapshot


def states__after_each(box, files, commands):
    """The states after the commands, not before."""
    box.restore(initial_snapshot(files))
    return [(box.exec(command), box.snapshot().tree_hash)[1] for command in commands]


def states__not_run(box, files, commands):
    """The commands are not executed."""
    box.restore(initial_snapshot(files))
    return [box.snapshot().tree_hash for _ in commands]


def answers_from__not_restored(box, files, commands, p, attempts):
    """The state is restored once; an attempt sees what the one before did."""
    box.restore(initial_snapshot(files))
    _ = [box.exec(command) for command in commands[:p]]
    return [box.exec(attempt).output for attempt in attempts]


def answers_from__one_more(box, files, commands, p, attempts):
    """The state after p + 1 commands."""
    box.restore(initial_snapshot(files))
    _ = [box.exec(command) for command in commands[: p + 1]]
    start = box.snapshot()
    return [(box.restore(start), box.exec(attempt).output)[1] for attempt in attempts]


def rolled(chunks, batches, threshold, window, clear=True, partly=False, first=-1, above=False):
    p, kept, positions = chunks + first, [], []
    positions.append(p)
    for batch in batches:
        kept = [*kept, batch][-window:]
        outcomes = [won for each in kept for won in each]
        rate = sum(outcomes) / len(outcomes)
        enough = rate > threshold if above else rate >= threshold
        if (partly or len(kept) == window) and enough and p > 0:
            p, kept = p - 1, [] if clear else kept
        positions.append(p)
    return positions


def sequential_rollback__window_kept(chunks, batches, threshold, window):
    """The window is not emptied by a move."""
    return rolled(chunks, batches, threshold, window, clear=False)


def sequential_rollback__window_not_full(chunks, batches, threshold, window):
    """A window that is not full moves p."""
    return rolled(chunks, batches, threshold, window, partly=True)


def sequential_rollback__from_k(chunks, batches, threshold, window):
    """p begins at K, where no chunk is left."""
    return rolled(chunks, batches, threshold, window, first=0)


def sequential_rollback__forwards(chunks, batches, threshold, window):
    """p moves towards the end."""
    return [chunks - 1 - p for p in rolled(chunks, batches, threshold, window)]


def parallel_starts__no_end(chunks, anchors, rollouts):
    """The last anchor is not K-1."""
    count = min(anchors, chunks, rollouts)
    spaced = [i * chunks // count for i in range(count)]
    return sorted(spaced[i % count] for i in range(rollouts))


def parallel_starts__too_many(chunks, anchors, rollouts):
    """As many anchors as were asked for."""
    spaced = [i * (chunks - 1) // max(anchors - 1, 1) for i in range(anchors)]
    return sorted(spaced[i % anchors] for i in range(rollouts))


def failed_forks__unscored_counts(results):
    """A rollout that could not be scored counts as a failure."""
    won = {(task, p) for task, p, success in results if success}
    return [list(fork) for fork in sorted({(task, p) for task, p, _ in results} - won)]


def failed_forks__any_failure(results):
    """One failure is enough."""
    return [list(fork) for fork in sorted({(task, p) for task, p, success in results if success is False})]


def crucial_chunks__no_holm(successes, trials):
    """Each test at 0.05, without correction."""
    won, ran = [*successes, trials[-1]], [*trials, trials[-1]]
    return [p for p in range(len(trials)) if resample.fisher_less(won[p], ran[p], won[p + 1], ran[p + 1]) <= 0.05]


def crucial_chunks__without_the_expert(successes, trials):
    """The last position is compared with nothing."""
    return [p for p in resample.crucial_chunks(successes, trials) if p < len(trials) - 1]


def crucial_chunks__any_drop(successes, trials):
    """Every drop counts, significant or not."""
    rates = [won / ran for won, ran in zip([*successes, 1], [*trials, 1], strict=True)]
    return [p for p in range(len(trials)) if rates[p] < rates[p + 1]]

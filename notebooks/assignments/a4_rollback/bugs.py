"""More wrong implementations for the students' tests. Not released."""

from __future__ import annotations

from pathlib import Path

from mini_rome.course.paper import load_module

given = load_module(Path(__file__).with_name("given.py"))
Rows = list[list[float]]


def one_version_behind(weights: Rows) -> Rows:
    """The load is not awaited: the sampler answers with the version before."""
    scores = given.right(weights)
    return [scores[max(0, v - 1)] for v in range(len(scores))]


def second_load_adds(weights: Rows) -> Rows:
    """From the second load on, the adapter is merged into weights that hold the one before."""
    sums = [
        row if v == 0 else [a + b for a, b in zip(row, weights[v - 1], strict=True)] for v, row in enumerate(weights)
    ]
    return given.right(sums)


def not_normalised(weights: Rows) -> Rows:
    """Logits are reported in place of log-probs."""
    return [[float(x) for x in row] for row in weights]


BUGS = {
    "test_sampler": {
        "one version behind": one_version_behind,
        "an adapter merged onto the last one": second_load_adds,
        "logits in place of log-probs": not_normalised,
    }
}

import numpy as np
import pytest

from mini_rome.stats import interquartile_mean, stratified_bootstrap, success_rate, wilson


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (120, 200, 0.5308, 0.6653)],
)
def test_wilson_agrees_with_published_values(successes: int, n: int, low: float, high: float) -> None:
    assert wilson(successes, n) == pytest.approx((low, high), abs=1e-4)


def test_wilson_is_symmetric_and_holds_the_rate() -> None:
    for n in (1, 7, 200):
        for successes in range(n + 1):
            low, high = wilson(successes, n)
            mirrored = wilson(n - successes, n)
            assert 0 <= low <= successes / n <= high <= 1
            assert (low, high) == pytest.approx((1 - mirrored[1], 1 - mirrored[0]))


def test_wilson_covers_the_true_rate_about_as_often_as_it_says() -> None:
    rate, n = 0.6, 200
    wins = np.random.default_rng(0).binomial(n, rate, size=4000)
    covered = np.mean([low <= rate <= high for low, high in (wilson(int(win), n) for win in wins)])
    assert 0.94 <= covered <= 0.965


@pytest.mark.parametrize(("successes", "n"), [(-1, 5), (6, 5)])
def test_impossible_counts_are_refused(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match=f"{successes} successes of {n}"):
        wilson(successes, n)


def test_a_rate_of_no_trials_is_refused() -> None:
    with pytest.raises(ValueError, match="no trials"):
        success_rate(0, 0)


def test_interquartile_mean_ignores_one_outlier_at_each_end_of_five() -> None:
    assert interquartile_mean([-1e9, 0.2, 0.4, 0.6, 1e9]) == pytest.approx(0.4)
    assert interquartile_mean([0.1, 0.2, 0.3]) == pytest.approx(0.2)  # floor(3 / 4) = 0: nothing dropped


def test_bootstrap_of_one_task_is_the_distribution_worked_by_hand() -> None:
    # Two seeds, 0 and 1: resampled means are 0, 1/2, 1 with chances 1/4, 1/2, 1/4.
    def at_half(scores: np.ndarray) -> float:
        return float(scores.mean() == 0.5)

    value, low, high = stratified_bootstrap([[0.0], [1.0]], np.mean, level=0.4)
    assert (value, low, high) == (0.5, 0.5, 0.5)
    assert stratified_bootstrap([[0.0], [1.0]], np.mean, level=0.9) == (0.5, 0.0, 1.0)
    assert at_half(np.array([0.0, 1.0])) == 1.0


def test_bootstrap_draws_seeds_within_each_task() -> None:
    # Task 0 is always 0 and task 1 always 1: if tasks were mixed, the minimum over tasks could become 1.
    scores = [[0.0, 1.0]] * 4
    assert stratified_bootstrap(scores, lambda table: float(table.min(axis=1).mean())) == (0.0, 0.0, 0.0)
    assert stratified_bootstrap(scores, lambda table: float(table[:, 1].mean())) == (1.0, 1.0, 1.0)


def test_bootstrap_repeats_for_a_seed_and_refuses_a_flat_list() -> None:
    scores = np.random.default_rng(1).random((5, 3))
    assert stratified_bootstrap(scores, seed=3) == stratified_bootstrap(scores, seed=3)
    assert stratified_bootstrap(scores, seed=3) != stratified_bootstrap(scores, seed=4)
    with pytest.raises(ValueError, match="seeds, tasks"):
        stratified_bootstrap([0.1, 0.2])

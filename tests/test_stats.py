import itertools

import numpy as np
import pytest

from mini_rome.evaluation.stats import (
    cluster_bootstrap,
    interquartile_mean,
    pass_at_k,
    stratified_bootstrap,
    success_rate,
    wilson,
)


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


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pass_at_k_is_the_share_of_k_subsets_with_a_success(k: int) -> None:
    for successes in range(5):
        outcomes = [1] * successes + [0] * (4 - successes)
        subsets = list(itertools.combinations(outcomes, k))
        assert pass_at_k(4, successes, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_is_unbiased_where_the_plug_in_estimate_is_not() -> None:
    rate, n, k = 0.3, 5, 3
    wins = np.random.default_rng(0).binomial(n, rate, size=20_000)
    truth = 1 - (1 - rate) ** k
    assert np.mean([pass_at_k(n, int(win), k) for win in wins]) == pytest.approx(truth, abs=0.005)
    assert np.mean([1 - (1 - win / n) ** k for win in wins]) < truth - 0.05


@pytest.mark.parametrize(("n", "successes", "k"), [(3, 1, 4), (3, 1, 0), (3, 4, 1), (0, 0, 1)])
def test_impossible_pass_at_k_is_refused(n: int, successes: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(n, successes, k)


def test_runs_of_one_task_do_not_narrow_the_interval() -> None:
    few = cluster_bootstrap([[1.0], [0.0], [1.0], [0.0]])
    many = cluster_bootstrap([[1.0] * 50, [0.0] * 50, [1.0] * 50, [0.0] * 50])
    assert few == many and few[2] - few[1] > 0.5


def test_tasks_weigh_alike_whatever_the_number_of_their_runs() -> None:
    assert cluster_bootstrap([[1.0] * 9, [0.0]])[0] == 0.5


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_where_all_tasks_agree_the_interval_still_has_a_width(value: float) -> None:
    found, low, high = cluster_bootstrap([[value] * 3] * 24)
    assert found == value and (low, high) == wilson(round(24 * value), 24) and high - low > 0.1


def test_the_interval_over_tasks_covers_the_true_rate() -> None:
    draw = np.random.default_rng(0)
    covered = []
    for _ in range(200):
        rates = draw.beta(2, 2, size=30)  # tasks differ; their mean is 1/2
        _, low, high = cluster_bootstrap([list(draw.binomial(1, rate, size=3)) for rate in rates], resamples=400)
        covered.append(low <= 0.5 <= high)
    assert np.mean(covered) > 0.88


@pytest.mark.parametrize("clusters", [[], [[1.0], []]])
def test_a_bootstrap_of_nothing_is_refused(clusters: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="at least one task"):
        cluster_bootstrap(clusters)

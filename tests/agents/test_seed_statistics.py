"""The interquartile mean against hand-computed values, and the coverage of its interval."""

from __future__ import annotations

import numpy as np
import pytest

from whorl.agents.seed_statistics import (
    interquartile_curve,
    interquartile_mean,
    performance_profile,
    probability_of_improvement,
    summarize_seeds,
)


def test_interquartile_mean_by_hand() -> None:
    middle_half = (1.5 + 2 + 2.5 + 3) / 4
    assert interquartile_mean(np.array([100.0, 1, 2, 3, -50, 2.5, 1.5, 7])) == pytest.approx(middle_half)
    # Of five values the middle 2.5: one whole, and three quarters of its neighbors.
    assert interquartile_mean(np.array([0.0, 1, 2, 3, 10])) == pytest.approx((0.75 * 1 + 2 + 0.75 * 3) / 2.5)
    assert interquartile_mean(np.array([4.0])) == 4.0


def test_interval_covers_true_mean() -> None:
    rng, covered = np.random.default_rng(0), 0
    for _ in range(200):
        found = summarize_seeds([rng.normal(3.0, 1.0, 20)], rng, n_bootstrap=300)
        covered += found.low <= 3.0 <= found.high
    assert 0.85 < covered / 200 < 0.99


def test_bootstrap_resamples_within_tasks() -> None:
    found = summarize_seeds([[0.0] * 4, [1.0] * 4], np.random.default_rng(0))
    assert (found.mean, found.low, found.high) == (0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="no runs"):
        summarize_seeds([[]], np.random.default_rng(0))


def test_one_run_has_no_interval() -> None:
    found = summarize_seeds([[3.0]], np.random.default_rng(0))
    assert found.to_json() == [3.0, None, None] and f"{found}" == "3.00"
    both = summarize_seeds([[3.0, 4.0]], np.random.default_rng(0))
    assert f"{both:.2f}" == "3.50 (3.00 to 4.00)"


def test_curves_are_interpolated_where_all_have_values() -> None:
    seeds = [([0.0, 10.0], [0.0, 10.0]), ([2.0, 8.0], [4.0, 16.0]), ([0.0, 20.0], [0.0, 60.0])]
    found = interquartile_curve(seeds, np.random.default_rng(0), n_points=4)
    assert found.x.tolist() == [2.0, 4.0, 6.0, 8.0]
    by_hand = interquartile_mean(np.stack([found.x, 2 * found.x, 3 * found.x], axis=1))
    assert found.mean == pytest.approx(by_hand)
    assert found.low is not None and found.high is not None
    assert (
        np.all(found.low >= found.x) and np.all(found.high <= 3 * found.x) and np.all(found.low < found.high)
    )
    with pytest.raises(ValueError, match="no x in common"):
        interquartile_curve([([0.0, 1.0], [0.0, 0.0]), ([2.0, 3.0], [0.0, 0.0])], np.random.default_rng(0))


def test_performance_profile_by_hand() -> None:
    thresholds = np.array([-1.0, 0.0, 1.5, 9.0])
    found = performance_profile([[0.0, 1.0, 2.0, 3.0], [1.0, 1.0]], thresholds, np.random.default_rng(0))
    assert found.mean.tolist() == [1.0, (0.75 + 1.0) / 2, (0.5 + 0.0) / 2, 0.0]
    assert found.low is not None and found.high is not None
    assert (
        np.all(found.low <= found.mean) and np.all(found.mean <= found.high) and found.low[2] < found.high[2]
    )


def test_probability_of_improvement_by_hand() -> None:
    rng = np.random.default_rng(0)
    found = probability_of_improvement([[1.0, 3.0]], [[2.0, 3.0]], rng)
    assert found.mean == pytest.approx((0 + 0 + 1 + 0.5) / 4)
    opposite = probability_of_improvement([[2.0, 3.0]], [[1.0, 3.0]], rng)
    assert found.mean + opposite.mean == pytest.approx(1.0)
    both = probability_of_improvement([[1.0] * 3, [0.0] * 3], [[0.0] * 3, [0.0] * 3], rng)
    assert both.to_json() == [0.75, 0.75, 0.75]

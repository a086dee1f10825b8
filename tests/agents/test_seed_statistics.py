"""The interquartile mean against hand-computed values, and the coverage of its interval."""

from __future__ import annotations

import numpy as np
import pytest

from whorl.agents.seed_statistics import interquartile_mean, summarize_seeds


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

"""Standard errors and intervals against closed forms, against the double sum over clusters, and against their coverage."""

from __future__ import annotations

from math import atan, pi, sqrt, tan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whorl.errors import ConfigError, DataError
from whorl.evals.statistics.distributions import t_quantile, t_two_sided
from whorl.evals.statistics.intervals import mean_interval, standard_error


@given(st.floats(0.5, 1e4), st.floats(0.01, 0.9999))
def test_t_tail_inverts_quantile(df: float, level: float) -> None:
    assert t_two_sided(t_quantile(level, df), df) == pytest.approx(1 - level, rel=1e-9)


@given(st.floats(1e-3, 1e6))
def test_t_tail_matches_closed_forms(t: float) -> None:
    """With 1 and 2 degrees of freedom. Each is written without cancellation."""
    root = sqrt(2 + t * t)
    assert t_two_sided(t, 1) == pytest.approx(2 / pi * atan(1 / t), rel=1e-12)
    assert t_two_sided(t, 2) == pytest.approx(2 / (root * (root + t)), rel=1e-12)
    assert t_quantile(0.95, 1) == pytest.approx(tan(0.95 * pi / 2), rel=1e-12)


def test_tail_ends_are_exact() -> None:
    assert t_two_sided(0.0, 3) == 1.0 and t_two_sided(float("inf"), 3) == 0.0
    assert t_quantile(0.95, 0.0) == float("inf")
    assert t_quantile(0.95, 1e9) == pytest.approx(1.959964, abs=1e-6)


@given(st.lists(st.integers(1, 7), min_size=2, max_size=12), st.integers(0, 2**31))
def test_clustered_error_matches_matrix_form(sizes: list[int], seed: int) -> None:
    """CR2 and Bell-McCaffrey's degrees of freedom with explicit matrices of a regression on a constant."""
    n, names = sum(sizes), [f"c{g}" for g, size in enumerate(sizes) for _ in range(size)]
    values = np.random.default_rng(seed).normal(size=n)
    residual_maker = np.eye(n) - np.full((n, n), 1 / n)
    meat, columns = 0.0, []
    for g in range(len(sizes)):
        rows = np.array([name == f"c{g}" for name in names])
        block = residual_maker[np.ix_(rows, rows)]
        roots, vectors = np.linalg.eigh(block)
        adjust = vectors @ np.diag(np.where(roots > 1e-9, np.abs(roots) ** -0.5, 0)) @ vectors.T
        residuals = (residual_maker @ values)[rows]
        meat += float((np.ones(rows.sum()) @ adjust @ residuals) ** 2)
        columns.append(residual_maker[:, rows] @ adjust @ np.ones(rows.sum()) / n)
    lambdas = np.linalg.eigvalsh(np.array(columns) @ np.array(columns).T)
    got = standard_error(values, names)
    assert got.se**2 == pytest.approx(meat / n**2, rel=1e-8)
    assert got.df == pytest.approx(lambdas.sum() ** 2 / (lambdas**2).sum(), rel=1e-8)


def test_one_cluster_has_no_finite_interval() -> None:
    got = mean_interval([0.2, 0.4, 0.9], ["same"] * 3)
    assert (got.low, got.high, got.clusters, got.df) == (-np.inf, np.inf, 1, 0.0)
    binary = mean_interval([1, 0, 1], ["same"] * 3)
    assert (binary.low, binary.high) == (0.0, 1.0)


def test_binary_interval_is_wilson_and_never_a_point() -> None:
    got = mean_interval([1.0] * 20)
    assert got.method == "wilson" and got.low == pytest.approx(20 / (20 + 1.959964**2), abs=1e-6)
    clustered = mean_interval([1.0] * 20, [str(i // 5) for i in range(20)])
    assert clustered.low < got.low and clustered.high == 1.0


@pytest.mark.parametrize("binary", [False, True])
def test_intervals_cover_with_uneven_clusters(binary: bool) -> None:
    rng, held, naive, runs = np.random.default_rng(2), 0, 0, 600
    for _ in range(runs):
        sizes = rng.choice([1, 2, 4, 12], size=60)
        rows = np.repeat(np.arange(60), sizes)
        latent = rng.normal(size=60)[rows] + rng.normal(size=len(rows))
        values = (latent > 0).astype(float) if binary else latent
        truth = 0.5 if binary else 0.0
        got, wrong = mean_interval(values, [str(r) for r in rows]), mean_interval(values)
        held += got.low <= truth <= got.high
        naive += wrong.low <= truth <= wrong.high
    assert 0.92 <= held / runs <= 0.975
    assert naive / runs < 0.8


def test_invalid_scores_are_refused() -> None:
    with pytest.raises(DataError, match="score of item 1 is nan"):
        mean_interval([0.0, float("nan")])
    with pytest.raises(DataError, match="at least one item"):
        mean_interval([])
    with pytest.raises(DataError, match="2 clusters for 3 scores"):
        mean_interval([0.0, 1.0, 0.5], ["a", "b"])
    with pytest.raises(ConfigError, match="level is 95"):
        mean_interval([0.0, 1.0], level=95)

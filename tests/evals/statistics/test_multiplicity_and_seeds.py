"""Corrections against their definitions, and variance components against planted ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whorl.errors import DataError
from whorl.evals.statistics.power import holm
from whorl.evals.statistics.seeds import variance_components


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0.001, 0.3))
def test_adjusted_values_reject_as_the_procedures(p: list[float], alpha: float) -> None:
    m, order = len(p), np.argsort(p, kind="stable")
    step_down: set[int] = set()
    for i, k in enumerate(order):
        if p[k] * (m - i) > alpha:
            break
        step_down.add(int(k))
    assert set(np.flatnonzero(holm(p) <= alpha)) == step_down
    assert (holm(p) >= np.array(p)).all() and (holm(p) <= 1).all()


def test_holm_bounds_the_chance_of_a_false_finding() -> None:
    rng = np.random.default_rng(0)
    p = rng.random((2000, 8))
    assert (p < 0.05).any(1).mean() > 0.3
    assert np.mean([(holm(row) < 0.05).any() for row in p]) < 0.065


def test_corrections_refuse_bad_input() -> None:
    with pytest.raises(DataError, match="p-values"):
        holm([0.1, float("nan")])


def test_components_recover_the_planted_ones() -> None:
    rng, found = np.random.default_rng(1), []
    for _ in range(40):
        x = (
            0.5 * rng.normal(size=(300, 1))
            + 0.1 * rng.normal(size=(1, 12))
            + 0.8 * rng.normal(size=(300, 12))
        )
        got = variance_components(x)
        found.append([got.between, got.within, got.seed])
    np.testing.assert_allclose(np.mean(found, 0), [0.25, 0.64, 0.01], rtol=0.1)


def test_error_of_a_rerun_is_that_of_new_samples() -> None:
    rng = np.random.default_rng(2)
    ease = rng.beta(0.5, 0.5, size=200)
    runs = [variance_components(rng.random((200, 4)) < ease[:, None]) for _ in range(400)]
    means = np.array([r.mean for r in runs])
    assert np.mean([r.se_rerun for r in runs]) == pytest.approx(means.std(), rel=0.12)
    assert runs[0].se > 2 * runs[0].se_rerun  # samples of one item are no items
    assert runs[0].se < runs[0].se_one_sample


def test_components_refuse_bad_input() -> None:
    with pytest.raises(DataError, match="at least two of both"):
        variance_components(np.ones((5, 1)))
    with pytest.raises(DataError, match="item 1 under seed 0 is nan"):
        variance_components([[0, 1], [float("nan"), 1], [1, 1]])

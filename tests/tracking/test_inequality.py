"""Gini coefficient and Lorenz curve."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from whorl.tracking.inequality import gini, lorenz_curve

SHARES = st.lists(st.floats(0.001, 1e6), min_size=1, max_size=30)


@given(SHARES)
def test_gini_is_the_mean_difference_for_arrays_and_tensors(values: list[float]) -> None:
    c = np.array(values)
    expected = np.abs(c[:, None] - c[None, :]).mean() / (2 * c.mean())
    assert float(gini(c)) == pytest.approx(expected, abs=1e-9)
    assert float(gini(torch.from_numpy(c))) == pytest.approx(expected, abs=1e-9)


@given(SHARES)
def test_gini_is_twice_the_area_above_the_lorenz_curve(values: list[float]) -> None:
    x, y = lorenz_curve(values)
    assert (x[0], y[0]) == (0, 0) and (x[-1], y[-1]) == (1, pytest.approx(1))
    assert np.all(np.diff(y) >= 0) and len(x) == len(values) + 1
    area = float(((np.array(x) - np.array(y))[1:] + (np.array(x) - np.array(y))[:-1]).sum()) / 2 / len(values)
    assert 2 * area == pytest.approx(float(gini(np.array(values))), abs=1e-9)


def test_gini_of_zeros_is_zero() -> None:
    assert float(gini(np.zeros(3))) == 0

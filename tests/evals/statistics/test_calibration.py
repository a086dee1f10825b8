"""Calibration: definitions, proper scores, and a model that is calibrated by construction."""

from __future__ import annotations

import math

import numpy as np
import pytest

from whorl.errors import DataError
from whorl.evals.statistics.calibration import calibration, probabilities


def sample(n: int, power: float, seed: int = 0) -> tuple[list[list[float]], list[int]]:
    """Four options; gold drawn from p, stated is p ** power, normalized."""
    rng = np.random.default_rng(seed)
    true = rng.dirichlet([0.6] * 4, n)
    gold = [int(rng.choice(4, p=p)) for p in true]
    stated = true**power
    return (stated / stated.sum(1, keepdims=True)).tolist(), gold


def test_errors_equal_definitions() -> None:
    found = calibration([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]], [0, 1, 1], n_bins=10)
    assert found.n == 3
    assert [found.ece, found.ace] == pytest.approx([(0.1 + 0.8 + 0.3) / 3] * 2)
    assert calibration([[0.9, 0.1]] * 2, [0, 1]).ace == pytest.approx(0.4)  # equal confidences share a bin


def test_calibrated_model_has_the_expected_error_and_others_more() -> None:
    honest = calibration(*sample(4000, 1.0))
    sure = calibration(*sample(4000, 3.0))
    assert honest.ece == pytest.approx(honest.expected_ece, abs=0.01) and honest.ece < 0.03
    assert sure.ece > 5 * sure.expected_ece


def test_base_rate_has_no_error() -> None:
    assert calibration([[0.7, 0.3]] * 100, [0] * 70 + [1] * 30).ece < 1e-9


def test_probabilities_are_a_softmax() -> None:
    assert probabilities([0.0, 0.0]) == [0.5, 0.5]
    assert probabilities([-1e4, -1e4 - math.log(3)]) == pytest.approx([0.75, 0.25])
    assert probabilities([-5.0, -math.inf]) == [1.0, 0.0]
    for bad in ([math.nan, 0.0], [0.0], [-math.inf, -math.inf]):
        with pytest.raises(DataError, match="no distribution"):
            probabilities(bad)

"""Calibration: definitions, proper scores, and a model that is calibrated by construction."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whorl.errors import DataError
from whorl.evals.statistics.calibration import calibration, probabilities


def sample(n: int, power: float, seed: int = 0) -> tuple[list[list[float]], list[int]]:
    """Four options; gold drawn from p, stated is p ** power, normalized."""
    rng = np.random.default_rng(seed)
    true = rng.dirichlet([0.6] * 4, n)
    gold = [int(rng.choice(4, p=p)) for p in true]
    stated = true**power
    return (stated / stated.sum(1, keepdims=True)).tolist(), gold


def test_figures_equal_definitions() -> None:
    found = calibration([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]], [0, 1, 1], n_bins=10)
    assert found.accuracy == 2 / 3 and found.confidence == pytest.approx(0.8)
    assert found.brier == pytest.approx((2 * 0.01 + 2 * 0.64 + 2 * 0.09) / 3)
    assert found.log_score == pytest.approx(-(math.log(0.9) + math.log(0.2) + math.log(0.7)) / 3)
    assert found.ece == pytest.approx((0.1 + 0.8 + 0.3) / 3)
    assert [b.n for b in found.bins] == [1, 1, 1] and found.bins[0].low < found.bins[
        0
    ].accuracy <= found.bins[0].high


def test_calibrated_model_has_the_expected_error_and_others_more() -> None:
    honest = calibration(*sample(4000, 1.0))
    sure = calibration(*sample(4000, 3.0))
    assert honest.ece == pytest.approx(honest.expected_ece, abs=0.01) and honest.ece < 0.03
    assert sure.ece > 5 * sure.expected_ece and sure.confidence > sure.accuracy
    assert honest.brier < sure.brier and honest.log_score < sure.log_score
    assert honest.accuracy == sure.accuracy


def test_base_rate_has_no_error_and_no_resolution() -> None:
    gold = [0] * 70 + [1] * 30
    found = calibration([[0.7, 0.3]] * 100, gold)
    assert found.ece < 1e-9 and found.resolution < 1e-9 and found.brier == pytest.approx(0.42)


@given(st.floats(0.01, 0.99), st.floats(0.01, 0.99))
def test_scores_are_proper(true: float, stated: float) -> None:
    def expected(p: float) -> tuple[float, float]:
        right, wrong = calibration([[p, 1 - p]], [0]), calibration([[p, 1 - p]], [1])
        return tuple(
            true * getattr(right, s) + (1 - true) * getattr(wrong, s) for s in ("brier", "log_score")
        )  # type: ignore

    assert all(a <= b + 1e-9 for a, b in zip(expected(true), expected(stated), strict=True))


def test_murphy_sums_to_the_brier_score_of_the_confidence() -> None:
    options, gold = sample(500, 2.0)
    options = [[round(max(p), 1), 1 - round(max(p), 1)] if max(p) < 0.95 else [1.0, 0.0] for p in options]
    gold = [int(g > 1) for g in gold]
    found = calibration(options, gold, n_bins=1000)  # one value per bin
    confidence = np.array([max(p) for p in options])
    right = np.array([float(int(np.argmax(p)) == g) for p, g in zip(options, gold, strict=True)])
    total = found.reliability - found.resolution + found.uncertainty
    assert total == pytest.approx(((confidence - right) ** 2).mean())


def test_probabilities_are_a_softmax() -> None:
    assert probabilities([0.0, 0.0]) == [0.5, 0.5]
    assert probabilities([-1e4, -1e4 - math.log(3)]) == pytest.approx([0.75, 0.25])
    assert probabilities([-5.0, -math.inf]) == [1.0, 0.0]
    for bad in ([math.nan, 0.0], [0.0], [-math.inf, -math.inf]):
        with pytest.raises(DataError, match="no distribution"):
            probabilities(bad)


@pytest.mark.parametrize(
    ("options", "gold", "message"),
    [
        ([], [], "0 items"), ([[0.5, 0.5]], [0, 1], "1 items, 2 gold"), ([[0.5, 0.5]], [2], "gold option 2 of 2"),
        ([[0.5, 0.6]], [0], "sum to 1.1"), ([[float("nan"), 1.0]], [0], "sum to nan"),
    ],
)  # fmt: skip
def test_bad_input(options: Any, gold: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        calibration(options, gold)

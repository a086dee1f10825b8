"""Calibration: do the probabilities of a model agree with how often it is right?

    confidence  p of the chosen option;  accuracy: share of right choices
    ECE         sum_b n_b / n |accuracy_b - confidence_b|     bins of confidence (Naeini et al. 2015; Guo et al. 2017,
                                                              arXiv:1706.04599)
    ACE         the same with bins of equal counts (Nixon et al. 2019, arXiv:1904.01685)

ECE is not a proper score. A model that always states the base rate has ECE 0 without any knowledge. The value depends on
the bins and grows with noise at small n. So ECE is reported together with proper scores (`kinds/choice.py`) and the ECE
that a perfectly calibrated model would show at this n (`expected_ece`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whorl.errors import DataError

Values = NDArray[np.float64]


@dataclass(frozen=True)
class CalibrationFigures:
    """Figures at the top of this file. expected_ece: mean ECE of a calibrated model with these confidences."""

    n: int
    ece: float
    ace: float
    expected_ece: float


def probabilities(log_likelihoods: Sequence[float]) -> list[float]:
    """Return the softmax of the log-likelihoods of the options.

    Raises:
        DataError: fewer than two options, or one that is not a number.
    """
    values = np.asarray(log_likelihoods, np.float64)
    if values.ndim != 1 or len(values) < 2 or np.isnan(values).any() or not np.isfinite(values.max()):
        raise DataError(
            f"log-likelihoods {list(log_likelihoods)[:5]} have no distribution",
            expected="two or more numbers",
        )
    shifted = np.exp(values - values.max())
    return [float(p) for p in shifted / shifted.sum()]


def calibration(
    options: Sequence[Sequence[float]], gold: Sequence[int], n_bins: int = 10
) -> CalibrationFigures:
    """Return the calibration of choices.

    Args:
        options: [items][options], probabilities that sum to 1; the number of options may differ.
        gold: [items], index of the right option.
        n_bins: of equal width in confidence.
    """
    confidence = np.array([max(row) for row in options])
    correct = np.array(
        [float(int(np.argmax(row)) == index) for row, index in zip(options, gold, strict=True)]
    )
    bins = np.minimum((confidence * n_bins).astype(np.int64), n_bins - 1)
    # Items of equal confidence share a bin of equal counts.
    rank = np.searchsorted(np.sort(confidence), confidence, side="left")
    equal_counts = np.minimum(rank * n_bins // len(confidence), n_bins - 1).astype(np.int64)
    rng = np.random.default_rng(0)
    simulated = [
        ece(confidence, (rng.random(len(confidence)) < confidence).astype(float), bins) for _ in range(100)
    ]
    return CalibrationFigures(
        len(gold),
        ece(confidence, correct, bins),
        ece(confidence, correct, equal_counts),
        float(np.mean(simulated)),
    )


def ece(confidence: Values, correct: Values, bins: NDArray[np.int64]) -> float:
    """Return the expected calibration error, given the bin of each item."""
    counts = np.maximum(np.bincount(bins), 1)
    gaps = np.abs(np.bincount(bins, correct - confidence))
    return float((gaps / counts * np.bincount(bins)).sum() / len(confidence))

"""Calibration: do the probabilities of a model agree with how often it is right?

    log score   mean of -log p(gold)                          nats; lower is better
    Brier       mean of sum_c (p_c - [c is gold])^2           0 to 2 (Brier 1950); lower is better
    confidence  p of the chosen option;  accuracy: share of right choices
    ECE         sum_b n_b / n |accuracy_b - confidence_b|     bins of confidence (Naeini et al. 2015; Guo et al. 2017,
                                                              arXiv:1706.04599)
    ACE         the same with bins of equal counts (Nixon et al. 2019, arXiv:1904.01685)

Log score and Brier score are proper: the expected score is best if and only if the stated probabilities are the true ones.
ECE is not. A model that always states the base rate has ECE 0 without any knowledge. The value depends on the bins and grows
with noise at small n. So ECE is reported together with a proper score and the ECE that a perfectly calibrated model would
show at this n (`expected_ece`).

Murphy's decomposition of the binary Brier score of the confidence, (confidence - right)^2, over the bins (Murphy 1973):

    Brier = reliability - resolution + uncertainty (+ variance within the bins)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whorl.errors import DataError

Values = NDArray[np.float64]
FLOOR = (
    1e-12  # least probability in the log score, so that one certain mistake costs 27.6 nats and not infinity
)


@dataclass(frozen=True)
class Bin:
    """A bin of the reliability diagram. low, high: of the 95 % Wilson interval of the accuracy."""

    n: int
    confidence: float
    accuracy: float
    low: float
    high: float


@dataclass(frozen=True)
class CalibrationFigures:
    """Figures at the top of this file. expected_ece: mean ECE of a calibrated model with these confidences."""

    n: int
    accuracy: float
    confidence: float
    ece: float
    ace: float
    expected_ece: float
    brier: float
    log_score: float
    reliability: float
    resolution: float
    uncertainty: float
    bins: tuple[Bin, ...]


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
    options: Sequence[Sequence[float]], gold: Sequence[int], n_bins: int = 10, *, seed: int = 0
) -> CalibrationFigures:
    """Return the calibration of choices.

    Args:
        options: [items][options], probabilities that sum to 1; the number of options may differ.
        gold: [items], index of the right option.
        n_bins: of equal width in confidence.
        seed: of the simulation behind expected_ece.

    Raises:
        DataError: no item, different lengths, an index out of range, or probabilities that do not sum to 1.
    """
    if not options or len(options) != len(gold):
        raise DataError(
            f"{len(options)} items, {len(gold)} gold answers",
            expected="one gold answer for each item, at least one",
        )
    chosen, right, brier, log_score = [], [], [], []
    for k, (row, index) in enumerate(zip(options, gold, strict=True)):
        p = np.asarray(row, np.float64)
        if not 0 <= index < len(p):
            raise DataError(f"item {k}: gold option {index} of {len(p)}", expected=f"an index below {len(p)}")
        if not np.isfinite(p).all() or (p < 0).any() or abs(p.sum() - 1) > 1e-6:
            raise DataError(
                f"item {k}: probabilities sum to {p.sum():.6g}", expected="numbers of 0 or more that sum to 1"
            )
        best = int(p.argmax())
        chosen.append(float(p[best]))
        right.append(float(best == index))
        brier.append(float(((p - np.eye(len(p))[index]) ** 2).sum()))
        log_score.append(-math.log(max(float(p[index]), FLOOR)))
    confidence, correct = np.array(chosen), np.array(right)
    bins = _equal_width(confidence, n_bins)
    reliability, resolution, uncertainty = murphy(confidence, correct, bins)
    rng = np.random.default_rng(seed)
    simulated = [
        ece(confidence, (rng.random(len(confidence)) < confidence).astype(float), bins) for _ in range(100)
    ]
    return CalibrationFigures(
        len(gold), float(correct.mean()), float(confidence.mean()), ece(confidence, correct, bins),
        ece(confidence, correct, _equal_count(confidence, n_bins)), float(np.mean(simulated)), float(np.mean(brier)),
        float(np.mean(log_score)), reliability, resolution, uncertainty, diagram(confidence, correct, bins),
    )  # fmt: skip


def ece(confidence: Values, correct: Values, bins: NDArray[np.int64]) -> float:
    """Return the expected calibration error, given the bin of each item."""
    counts = np.maximum(np.bincount(bins), 1)
    gaps = np.abs(np.bincount(bins, correct - confidence))
    return float((gaps / counts * np.bincount(bins)).sum() / len(confidence))


def murphy(confidence: Values, correct: Values, bins: NDArray[np.int64]) -> tuple[float, float, float]:
    """Return reliability, resolution and uncertainty of the confidence, over bins."""
    counts = np.bincount(bins)
    used = counts > 0
    mean_confidence = np.bincount(bins, confidence)[used] / counts[used]
    accuracy = np.bincount(bins, correct)[used] / counts[used]
    share, base = counts[used] / len(bins), float(correct.mean())
    reliability = float((share * (mean_confidence - accuracy) ** 2).sum())
    return reliability, float((share * (accuracy - base) ** 2).sum()), base * (1 - base)


def diagram(confidence: Values, correct: Values, bins: NDArray[np.int64]) -> tuple[Bin, ...]:
    """Return the bins that have items, in order of confidence."""
    found = []
    for b in np.unique(bins):
        here = bins == b
        n, accuracy = int(here.sum()), float(correct[here].mean())
        low, high = _wilson(accuracy, n)
        found.append(Bin(n, float(confidence[here].mean()), accuracy, low, high))
    return tuple(found)


def _equal_width(confidence: Values, n_bins: int) -> NDArray[np.int64]:
    return np.minimum((confidence * n_bins).astype(np.int64), n_bins - 1)


def _equal_count(confidence: Values, n_bins: int) -> NDArray[np.int64]:
    """Return the bin of each item; items of equal confidence share one."""
    order = np.sort(confidence)
    rank = np.searchsorted(order, confidence, side="left")
    return np.minimum(rank * n_bins // len(confidence), n_bins - 1).astype(np.int64)


def _wilson(share: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    center, half = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, (center - half) / (1 + z * z / n)), min(1.0, (center + half) / (1 + z * z / n))

"""Planning of a comparison over several tasks: the smallest difference that n items detect, and corrected p-values.

    difference = (t_{level} + t_{power}) * sd * sqrt(deff / n)        Miller 2024, arXiv:2411.00640, section 5

sd is the standard deviation of the paired difference of one item. deff is the design effect of clusters, the clustered
variance of the mean over that of independent items. The quantiles are Student's with n / deff - 1 degrees of freedom.

    sd^2 of right and wrong answers = p_a + p_b - 2 p_ab - (p_a - p_b)^2 = disagreement - difference^2
    variance of one of k samples    = between items + within items / k       (`seeds.py`)

Holm: the i-th smallest of m p-values is multiplied by m - i + 1, i from 1. A task whose adjusted value is at most alpha is a
finding; the chance of even one false finding is at most alpha (Holm 1979).
"""

from __future__ import annotations

from math import inf, sqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whorl.errors import ConfigError, DataError
from whorl.evals.statistics.comparison import PairedDifference
from whorl.evals.statistics.distributions import t_quantile


def detectable_difference(
    sd: float, n: int, *, power: float = 0.8, level: float = 0.95, design_effect: float = 1.0
) -> float:
    """Return the smallest true difference found with the given power; infinite for fewer than two independent items.

    Args:
        sd: standard deviation of an item's paired difference.
        n: items. level: of the two-sided interval.

    Raises:
        ConfigError: an argument is out of range.
    """
    _check(sd, power, design_effect)
    effective = n / design_effect
    if effective < 2:
        return inf
    # A one-sided quantile of `power` is a two-sided one of 2 * power - 1.
    df = effective - 1
    return (t_quantile(level, df) + t_quantile(2 * power - 1, df)) * sd / sqrt(effective)


def detectable_by(paired: PairedDifference, *, power: float = 0.8, n: int | None = None) -> float:
    """Return the smallest difference that a measured comparison, or one with n items like it, detects.

    The clusters are in its standard error.
    """
    quantiles = t_quantile(paired.level, paired.df) + t_quantile(2 * power - 1, paired.df)
    return quantiles * paired.se * sqrt(paired.n / (n or paired.n))


def holm(p_values: ArrayLike) -> NDArray[np.float64]:
    """Return adjusted p-values [m] in the order given, at most 1. Raises DataError: a value is not in 0 to 1."""
    p = np.asarray(p_values, np.float64)
    if p.ndim != 1 or not ((p >= 0) & (p <= 1)).all():
        raise DataError(f"p-values {p.tolist()}", expected="a list of numbers in 0 to 1")
    order = np.argsort(p, kind="stable")
    found = np.empty_like(p)
    found[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1.0)
    return found


def _check(sd: float, power: float, design_effect: float) -> None:
    if not 0 <= sd < inf:
        raise ConfigError(f"the standard deviation is {sd}", expected="a number of at least 0")
    if not 0.5 < power < 1:
        raise ConfigError(f"the power is {power}", expected="above 0.5 and below 1, such as 0.8")
    if not 0 < design_effect < inf:
        raise ConfigError(f"the design effect is {design_effect}", expected="above 0; 1 without clusters")

"""Planning of a comparison: the smallest difference that n items detect, and the items that a difference needs.

    difference = (t_{level} + t_{power}) * sd * sqrt(deff / n)        Miller 2024, arXiv:2411.00640, section 5

sd is the standard deviation of the paired difference of one item. deff is the design effect of clusters, the clustered
variance of the mean over that of independent items. The quantiles are Student's with n / deff - 1 degrees of freedom.

    sd^2 of right and wrong answers = p_a + p_b - 2 p_ab - (p_a - p_b)^2 = disagreement - difference^2
    variance of one of k samples    = between items + within items / k       (`seeds.py`)
"""

from __future__ import annotations

from math import ceil, inf, sqrt

from whorl.errors import ConfigError
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


def items_needed(
    sd: float, difference: float, *, power: float = 0.8, level: float = 0.95, design_effect: float = 1.0
) -> int:
    """Return the smallest number of items that detects `difference` with the given power.

    Raises:
        ConfigError: an argument is out of range, or more than 1e12 items are needed.
    """
    _check(sd, power, design_effect)
    if not difference > 0:
        raise ConfigError(f"the difference is {difference}", expected="a number above 0")

    def found(n: int) -> bool:
        reached = detectable_difference(sd, n, power=power, level=level, design_effect=design_effect)
        return reached <= difference

    low, high = 1, max(2, ceil(2 * design_effect))
    while not found(high):
        low, high = high, high * 2
        if high > 1e12:
            raise ConfigError(
                f"a difference of {difference} needs over 1e12 items", expected="a larger difference"
            )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if found(middle) else (middle, high)
    return high


def detectable_by(paired: PairedDifference, *, power: float = 0.8, n: int | None = None) -> float:
    """Return the smallest difference that a measured comparison, or one with n items like it, detects.

    The clusters are in its standard error.
    """
    quantiles = t_quantile(paired.level, paired.df) + t_quantile(2 * power - 1, paired.df)
    return quantiles * paired.se * sqrt(paired.n / (n or paired.n))


def binary_sd(accuracy_a: float, accuracy_b: float, disagreement: float) -> float:
    """Return the standard deviation of an item's difference for right and wrong answers.

    disagreement: share of items that only one model has right; between |a - b| and min(a + b, 2 - a - b).

    Raises:
        ConfigError: the three are not possible together.
    """
    gap, total = abs(accuracy_a - accuracy_b), accuracy_a + accuracy_b
    if not gap - 1e-12 <= disagreement <= min(total, 2 - total) + 1e-12:
        raise ConfigError(
            f"a disagreement of {disagreement} with accuracies {accuracy_a} and {accuracy_b}",
            expected=f"between {gap:g} and {min(total, 2 - total):g}",
        )
    return sqrt(max(0.0, disagreement - gap**2))


def _check(sd: float, power: float, design_effect: float) -> None:
    if not 0 <= sd < inf:
        raise ConfigError(f"the standard deviation is {sd}", expected="a number of at least 0")
    if not 0.5 < power < 1:
        raise ConfigError(f"the power is {power}", expected="above 0.5 and below 1, such as 0.8")
    if not 0 < design_effect < inf:
        raise ConfigError(f"the design effect is {design_effect}", expected="above 0; 1 without clusters")

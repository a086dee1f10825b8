"""Quantiles and tail probabilities of the normal and of Student's t distribution, without SciPy.

    P(|T| > t) with v degrees of freedom = I_x(v / 2, 1 / 2),  x = v / (v + t^2)

I is the regularised incomplete beta function. Its continued fraction is evaluated by Lentz's method (Press et al.,
Numerical Recipes, section 6.4). Degrees of freedom may be fractions, as Satterthwaite's approximation gives them.
"""

from __future__ import annotations

from functools import lru_cache
from math import exp, inf, isfinite, lgamma, log, log1p, sqrt
from statistics import NormalDist

from whorl.errors import ConfigError

NORMAL = NormalDist()
LARGE_DF = 1e7  # above it t equals the normal distribution to double precision's use here
_TINY = 1e-300


def check_level(level: float) -> float:
    """Return the confidence level. Raises ConfigError: it is not between 0 and 1."""
    if not 0 < level < 1:
        raise ConfigError(
            f"the confidence level is {level}", expected="a number between 0 and 1, such as 0.95"
        )
    return level


def normal_quantile(level: float) -> float:
    """Return the two-sided normal quantile: 1.959964 for a level of 0.95."""
    return NORMAL.inv_cdf(0.5 + check_level(level) / 2)


def t_two_sided(t: float, df: float) -> float:
    """Return P(|T| > |t|) of Student's t with df degrees of freedom, at least 0 and at most 1."""
    if df >= LARGE_DF or not isfinite(t):
        return 0.0 if not isfinite(t) else 2 * NORMAL.cdf(-abs(t))
    squared = t * t
    return _incomplete_beta(df / 2, 0.5, df / (df + squared), squared / (df + squared))


@lru_cache(maxsize=4096)
def t_quantile(level: float, df: float) -> float:
    """Return the two-sided quantile t with P(|T| <= t) = level; infinite where df is 0.

    Raises:
        ConfigError: the level is not between 0 and 1.
    """
    tail = 1 - check_level(level)
    if df <= 0:
        return inf
    if df >= LARGE_DF:
        return normal_quantile(level)
    low, high = 0.0, 1.0
    while t_two_sided(high, df) > tail:
        low, high = high, high * 2
        if high > 1e150:
            return high
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if t_two_sided(middle, df) > tail else (low, middle)
    return (low + high) / 2


def _incomplete_beta(a: float, b: float, x: float, rest: float) -> float:
    """Return I_x(a, b). rest: 1 - x, without cancellation."""
    if x <= 0 or rest <= 0:
        return 0.0 if x <= 0 else 1.0
    scale = exp(
        lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * (log1p(-x) if x < 0.5 else log(rest))
    )
    if x < (a + 1) / (a + b + 2):
        return scale * _fraction(a, b, x) / a
    return 1 - scale * _fraction(b, a, rest) / b


def _fraction(a: float, b: float, x: float) -> float:
    """Return the continued fraction of the incomplete beta function, by Lentz's method."""
    c, d = 1.0, 1 / _away(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 10_000 + int(10 * sqrt(max(a, b)))):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _away(1 + term * d)
            c = _away(1 + term / c)
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value


def _away(value: float) -> float:
    return value if abs(value) > _TINY else _TINY

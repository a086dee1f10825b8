"""Quantiles and tail probabilities of the normal and of Student's t distribution.

    P(|T| > t) with v degrees of freedom = I_x(v / 2, 1 / 2),  x = v / (v + t^2)

I is the regularised incomplete beta function of SciPy, which is imported when it is needed first: `whorl --help` takes
less time than that. Degrees of freedom may be fractions, as Satterthwaite's approximation gives them.
"""

from __future__ import annotations

from math import inf, isfinite
from statistics import NormalDist

from whorl.errors import ConfigError

NORMAL = NormalDist()
LARGE_DF = 1e7  # above it t equals the normal distribution to double precision's use here


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
    from scipy.special import betainc, betaincc

    squared = t * t
    if squared > df:
        return float(betainc(df / 2, 0.5, df / (df + squared)))
    return float(betaincc(0.5, df / 2, squared / (df + squared)))  # the same, without cancellation in x


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
    from scipy.special import stdtrit

    return -float(stdtrit(df, tail / 2))

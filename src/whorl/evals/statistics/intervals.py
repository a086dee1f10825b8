"""Standard errors and intervals of a mean over items, with clusters of items that share a text.

    mean        sum_i x_i / N
    variance    sum_g e_g^2 / (1 - N_g / N) / N^2,   e_g = sum over items i of cluster g of (x_i - mean)
    df          (sum_g G_gg)^2 / sum_gh G_gh^2,      G_gh = a_g a_h (N_g [g = h] - N_g N_h / N),  a_g^2 = 1 / (1 - N_g / N)

Without the factors 1 - N_g / N this is the clustered standard error of Miller 2024, arXiv:2411.00640, section 2.2. It
is too small for few clusters. The factors are the bias reduction CR2, and df its degrees of freedom, for a regression
on a constant (Bell and McCaffrey 2002; Pustejovsky and Tipton 2018, doi:10.1080/07350015.2016.1247004). For clusters of
one item they give the usual s^2 / N with N - 1 degrees of freedom, and G - 1 for G equal clusters.

Scores of 0 and 1 get Wilson's interval (1927), which stays within 0 and 1 and does not shrink to a point where all
items are right. With clusters it uses the number of independent items that would give the clustered variance. All
other scores get Student's t.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whorl.errors import DataError
from whorl.evals.statistics.distributions import normal_quantile, t_quantile


@dataclass(frozen=True)
class Interval:
    """A mean over items with its confidence interval.

    Attributes:
        se: standard error, with clusters; infinite for one cluster.
        n, clusters: items, and independent groups of items.
        df: degrees of freedom of `se`.
        level: confidence level, such as 0.95.
        method: "t", or "wilson" where all scores are 0 or 1.
    """

    mean: float
    low: float
    high: float
    se: float
    n: int
    clusters: int
    df: float
    level: float
    method: str

    def __str__(self) -> str:
        return f"{self.mean:.4f} ({self.low:.4f} to {self.high:.4f})"


@dataclass(frozen=True)
class StandardError:
    """Standard error of a mean, its degrees of freedom, and the number of clusters."""

    se: float
    df: float
    clusters: int


def standard_error(values: NDArray[np.float64], clusters: Sequence[str] | None = None) -> StandardError:
    """Return the (clustered) standard error of the mean of values [N].

    clusters: name per item; "" is a cluster of one item. A single cluster has an infinite standard error and df 0.

    Raises:
        DataError: there are no values, one is not finite, or clusters has another length.
    """
    index, sizes = cluster_index(check_values(values), clusters)
    n, groups = len(values), len(sizes)
    if groups < 2:
        return StandardError(inf, 0.0, groups)
    residuals = np.bincount(index, values - values.mean(), minlength=groups)
    inflation = 1 / (1 - sizes / n)
    variance = float((residuals**2 * inflation).sum()) / n**2
    # G = diag(d) - u u', so trace(G^2) = sum d^2 - 2 sum d u^2 + (sum u^2)^2.
    d, u_squared = inflation * sizes, inflation * sizes**2 / n
    trace = float((d - u_squared).sum())
    trace_squared = float((d**2 - 2 * d * u_squared).sum() + u_squared.sum() ** 2)
    return StandardError(sqrt(variance), trace**2 / trace_squared, groups)


def mean_interval(
    values: ArrayLike, clusters: Sequence[str] | None = None, *, level: float = 0.95
) -> Interval:
    """Return the mean of an item's scores [N] with its interval (see the top of this file).

    clusters: name per item; "" is a cluster of one item.

    Raises:
        DataError: there are no values, one is not finite, or clusters has another length.
        ConfigError: the level is not between 0 and 1.
    """
    array = np.asarray(values, np.float64)
    error = standard_error(array, clusters)
    mean, n = float(array.mean()), len(array)
    if is_binary(array):
        effective, quantile = float(n), normal_quantile(level)
        if error.clusters < n:
            quantile = t_quantile(level, error.df)
            spread = mean * (1 - mean)
            effective = min(n, spread / error.se**2) if spread > 0 and error.se > 0 else error.clusters
        low, high = wilson(mean, effective, quantile)
        return Interval(mean, low, high, error.se, n, error.clusters, error.df, level, "wilson")
    half = t_quantile(level, error.df) * error.se if error.se < inf else inf
    return Interval(mean, mean - half, mean + half, error.se, n, error.clusters, error.df, level, "t")


def wilson(mean: float, n: float, quantile: float) -> tuple[float, float]:
    """Return Wilson's interval of a proportion of n independent items; (0, 1) where the quantile is infinite."""
    if quantile == inf:
        return 0.0, 1.0
    squared = quantile**2
    center = (mean + squared / (2 * n)) / (1 + squared / n)
    half = quantile / (1 + squared / n) * sqrt(mean * (1 - mean) / n + squared / (4 * n**2))
    return max(0.0, min(mean, center - half)), min(1.0, max(mean, center + half))


def is_binary(values: NDArray[np.float64]) -> bool:
    """Return whether all values are 0 or 1."""
    return bool(np.isin(values, (0.0, 1.0)).all())


def check_values(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return values. Raises DataError: they are not one-dimensional, there are none, or one is not finite."""
    if values.ndim != 1 or not len(values):
        raise DataError(
            f"scores of shape {list(values.shape)}", expected="one score per item, at least one item"
        )
    if not np.isfinite(values).all():
        first = int(np.flatnonzero(~np.isfinite(values))[0])
        raise DataError(
            f"the score of item {first} is {values[first]}",
            expected="a finite number",
            do="count items without a score as missing",
        )
    return values


def cluster_index(
    values: NDArray[np.float64], clusters: Sequence[str] | None
) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Return the cluster number of each item [N] and the size of each cluster [G]."""
    n = len(values)
    if clusters is None:
        return np.arange(n), np.ones(n, np.int64)
    if len(clusters) != n:
        raise DataError(f"{len(clusters)} clusters for {n} scores", expected="one cluster name per score")
    numbers: dict[str, int] = {}
    index = [numbers.setdefault(name or f"\0{i}", len(numbers)) for i, name in enumerate(clusters)]
    array = np.array(index, np.intp)
    return array, np.bincount(array, minlength=len(numbers)).astype(np.int64)

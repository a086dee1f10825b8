"""Comparison of two models on the same items: paired difference, interval, and a verdict in words.

    difference          mean over items of d_i = a_i - b_i, its standard error as in `intervals.py`

Verdict, from the interval low to high of the difference and a margin d > 0:

    better                           low > 0
    worse                            high < 0
    equivalent within d              -d < low and high < d
    no worse by more than d          -d < low
    not distinguishable              otherwise

The last but one is the non-inferiority test by confidence interval: with a two-sided level of 95 % its error rate is
2.5 %. "Equivalent" is two such tests (TOST, Schuirmann 1987). Zero inside the interval proves no equality.

The subtle point is scores of 0 and 1 with few items on which the models differ. Their sample variance is too small,
and 0 where no item differs. As in Bonett and Price 2012 (doi:10.1002/sim.4307), two items are added, one that each
model wins, which multiplies the variance by 1 + 2 / m for m differing items.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan, sqrt
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whorl.errors import ConfigError, DataError, one_of, shorten
from whorl.evals.results import ItemResult
from whorl.evals.statistics.distributions import t_quantile, t_two_sided
from whorl.evals.statistics.intervals import StandardError, cluster_index, is_binary, standard_error

Verdict = Literal["better", "worse", "equivalent", "no worse", "not distinguishable"]


@dataclass(frozen=True)
class PairedDifference:
    """The difference A - B over items that both models have.

    Attributes:
        low, high: confidence interval of the difference at `level`.
        p_value: two-sided, for a difference of 0.
        n, clusters, df: shared items, independent groups, degrees of freedom.
    """

    difference: float
    se: float
    low: float
    high: float
    p_value: float
    n: int
    clusters: int
    df: float
    level: float


@dataclass(frozen=True)
class Comparison:
    """Two models on one task.

    Attributes:
        paired: over items with a value from both.
        margin: non-inferiority margin; 0 for none.
        missing_a, missing_b: shared items without a value.
        lowest, highest: the difference with missing items scored against A, or in favour of A.
    """

    metric: str
    paired: PairedDifference
    verdict: Verdict
    margin: float
    missing_a: int
    missing_b: int
    lowest: float
    highest: float


def paired_difference(
    a: ArrayLike,
    b: ArrayLike,
    clusters: Sequence[str] | None = None,
    *,
    level: float = 0.95,
    shares: bool = False,
) -> PairedDifference:
    """Return the difference of two models' scores [N] on the same items in the same order.

    Args:
        clusters: name per item; "" is a cluster of one item.
        shares: scores are between 0 and 1. Equal differences of all items then count as those of scores of 0 and 1, and
            the interval ends at -1 and 1.

    Raises:
        DataError: lengths differ, there are no items, or a score is not finite.
    """
    first, second = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if first.shape != second.shape:
        raise DataError(f"{first.size} and {second.size} scores", expected="the same items for both models")
    difference = first - second
    error = standard_error(difference, clusters)
    se = error.se
    if (is_binary(first) and is_binary(second)) or (shares and not se):
        se = _binary_se(difference, error, clusters)
    mean = float(difference.mean())
    half = t_quantile(level, error.df) * se if se < inf else inf
    low, high = (max(-1.0, mean - half), min(1.0, mean + half)) if shares else (mean - half, mean + half)
    p_value = 1.0 if se == inf or mean == 0 else (t_two_sided(mean / se, error.df) if se > 0 else 0.0)
    return PairedDifference(mean, se, low, high, p_value, len(first), error.clusters, error.df, level)


def ranked_apart(above: ArrayLike, below: ArrayLike, level: float = 0.95) -> PairedDifference:
    """Return how often a value of one sample [m >= 2] exceeds one of another [n >= 2], less a half; a tie is a half.

    Standard error: DeLong et al. 1988 (doi:10.2307/2531595); 1 / (2 min(m, n) + 2) of samples that do not overlap.
    """
    one, other = np.asarray(above, np.float64)[:, None], np.asarray(below, np.float64)
    wins = (one > other) + 0.5 * (one == other)
    difference, k = float(wins.mean() - 0.5), min(wins.shape)
    variances = [wins.mean(axis).var(ddof=1) / wins.shape[1 - axis] for axis in (0, 1)]
    se = sqrt(sum(variances)) or 0.5 / (k + 1)
    half, p_value = t_quantile(level, k - 1) * se, t_two_sided(difference / se, k - 1)
    low, high = max(-0.5, difference - half), min(0.5, difference + half)
    return PairedDifference(difference, se, low, high, p_value, sum(wins.shape), k, k - 1, level)


def verdict_of(low: float, high: float, margin: float = 0.0) -> Verdict:
    """Return the verdict of an interval of A - B (see the top of this file). margin: 0 for none."""
    if not 0 <= margin < inf:
        raise ConfigError(f"the margin is {margin}", expected="a difference of at least 0, such as 0.01")
    if low > 0:
        return "better"
    if high < 0:
        return "worse"
    if margin and low > -margin:
        return "equivalent" if high < margin else "no worse"
    return "not distinguishable"


def compare(
    results_a: Sequence[ItemResult],
    results_b: Sequence[ItemResult],
    metric: str,
    *,
    margin: float = 0.0,
    worst: float = 0.0,
    best: float = 1.0,
) -> Comparison:
    """Return the comparison of two models' results of one task, joined by item id.

    Args:
        metric: higher is better.
        margin: the largest loss that does not matter, in units of the metric; 0 for none.
        worst, best: range of the metric, for the bounds of missing items.

    Raises:
        DataError: there are no results, or two of an item; a value is not finite; only one model has an item; an item's
            cluster differs; no item has both values.
    """
    first, second, clusters = _join(read_scores(results_a, metric), read_scores(results_b, metric))
    both = np.isfinite(first) & np.isfinite(second)
    if not both.any():
        raise DataError(f"no item has a value of {metric} from both models", expected="at least one")
    used = [name for name, ok in zip(clusters, both, strict=True) if ok]
    shares = best - worst == 1
    paired = paired_difference(first[both], second[both], used, shares=shares)
    verdict = verdict_of(paired.low, paired.high, margin)
    lowest, highest = (
        float((np.where(np.isfinite(first), first, x) - np.where(np.isfinite(second), second, y)).mean())
        for x, y in ((worst, best), (best, worst))
    )
    missing_a, missing_b = (int((~np.isfinite(values)).sum()) for values in (first, second))
    return Comparison(metric, paired, verdict, margin, missing_a, missing_b, lowest, highest)


def describe(found: Comparison, name_a: str = "A", name_b: str = "B") -> str:
    """Return the verdict as sentences with the interval, and what missing items could change."""
    p = found.paired
    of = f"{p.n} item{'' if p.n == 1 else 's'}"
    of += f" in {p.clusters} cluster{'' if p.clusters == 1 else 's'}" if p.clusters < p.n else ""
    single = "one item gives" if p.n == 1 else "items of one cluster give"
    span = f"({p.level:.0%} interval {p.low:+.4f} to {p.high:+.4f}, {of})"
    if p.clusters < 2:
        span = f"({of}; {single} no interval)"
    d = f"{found.margin:g}"
    text = {
        "better": f"{name_a} is better than {name_b} by {p.difference:.4f} {span}.",
        "worse": f"{name_b} is better than {name_a} by {-p.difference:.4f} {span}.",
        "equivalent": f"{name_a} and {name_b} are equivalent within {d}: difference {p.difference:+.4f} {span}.",
        "no worse": f"{name_a} is no worse than {name_b} by more than {d}: difference {p.difference:+.4f} {span}.",
        "not distinguishable": f"{name_a} and {name_b} are not distinguishable: difference {p.difference:+.4f} {span}.",
    }[found.verdict]
    if found.missing_a or found.missing_b:
        text += f" Missing values: {found.missing_a} of {name_a}, {found.missing_b} of {name_b};"
        text += f" the difference lies between {found.lowest:+.4f} and {found.highest:+.4f}."
        if found.lowest < 0 < found.highest and found.verdict in ("better", "worse"):
            text += " The missing items could reverse the sign."
    return text


def _binary_se(
    difference: NDArray[np.float64], error: StandardError, clusters: Sequence[str] | None
) -> float:
    """Return the standard error with two differing items added (see the top of this file)."""
    differing, n = int(np.count_nonzero(difference)), len(difference)
    if error.se == inf:
        return inf
    if error.se > 0 and differing:
        return error.se * sqrt(1 + 2 / differing)
    # No variation: one differing item stands for its whole cluster.
    _, sizes = cluster_index(difference, clusters)
    return sqrt(2 * float((sizes**2).sum()) / n) / (n + 2)


def read_scores(results: Sequence[ItemResult], metric: str) -> dict[str, tuple[float, str]]:
    """Return item -> (value of a metric, cluster). The value is NaN where the outcome is "missing" or "error", never 0."""
    if not results:
        raise DataError("there are no results", expected="at least one item")
    twice, count = Counter(r.item for r in results).most_common(1)[0]
    if count > 1:
        raise DataError(f"item {shorten(twice)!r} has {count} results", expected="one result per item")
    named = sorted({name for r in results for name in r.scores})
    if named and metric not in named:
        raise DataError(f"no item has the metric {metric!r}", expected=one_of(metric, named))
    for result in results:
        if not isfinite(value := float(result.scores.get(metric, 0.0))):
            raise DataError(
                f"item {shorten(result.item)!r}: {metric} is {value}",
                expected="a finite number, or no value and the outcome 'error' or 'missing'",
            )
    return {r.item: (float(r.scores.get(metric, nan)), r.cluster) for r in results}


def _join(
    a: Mapping[str, tuple[float, str]], b: Mapping[str, tuple[float, str]]
) -> tuple[NDArray[np.float64], NDArray[np.float64], list[str]]:
    """Return the scores of both models in the order of A, and the clusters."""
    only_a, only_b = [i for i in a if i not in b], [i for i in b if i not in a]
    if only_a or only_b:
        raise DataError(
            f"{len(only_a)} items of A and {len(only_b)} of B are unmatched, such as {shorten([*only_a, *only_b][0])!r}",
            expected="the same items for both models",
            do="compare the same version of the task",
        )
    for item, (_, cluster) in a.items():
        if cluster != b[item][1]:
            raise DataError(
                f"item {shorten(item)!r} is of cluster {cluster!r} for A and {b[item][1]!r} for B",
                expected="results of the same version of the task",
            )
    first, second = (np.array([values[item][0] for item in a]) for values in (a, b))
    return first, second, [cluster for _, cluster in a.values()]

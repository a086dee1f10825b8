"""Scores of one metric from item results; missing items stay countable.

An item without a value of the metric (outcome "missing" or "error") is never a zero. It is left out of the mean, and
two bounds give the mean with all such items scored worst and with all scored best.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whorl.errors import DataError, one_of, shorten
from whorl.evals.results import ItemResult
from whorl.evals.statistics.intervals import Interval, mean_interval


@dataclass(frozen=True)
class Scores:
    """One metric of one model over the items of a task, in the order of the results.

    Attributes:
        values: [N], NaN for an item without a value.
        clusters: [N] cluster names.
        groups: [N] labels for tables.
    """

    items: tuple[str, ...]
    values: NDArray[np.float64]
    clusters: tuple[str, ...]
    groups: tuple[str, ...]


@dataclass(frozen=True)
class TaskScore:
    """A task's score under one model.

    Attributes:
        interval: over items with a value; None if there are none.
        missing: items without a value.
        lowest, highest: the mean with all of them scored worst, or best.
        outcomes: number of items for each outcome.
    """

    metric: str
    interval: Interval | None
    n: int
    missing: int
    lowest: float
    highest: float
    outcomes: Mapping[str, int]


def read_scores(results: Sequence[ItemResult], metric: str) -> Scores:
    """Return the values of a metric.

    Raises:
        DataError: there are no results, two have the same item, no item has the metric, or a value is not finite.
    """
    if not results:
        raise DataError("there are no results", expected="at least one item")
    items = tuple(r.item for r in results)
    if len(set(items)) < len(items):
        twice, count = Counter(items).most_common(1)[0]
        raise DataError(f"item {shorten(twice)!r} has {count} results", expected="one result per item")
    values = np.array([float(r.scores.get(metric, np.nan)) for r in results])
    named = sorted({name for r in results for name in r.scores})
    if named and metric not in named:
        raise DataError(f"no item has the metric {metric!r}", expected=one_of(metric, named))
    for result, value in zip(results, values, strict=True):
        if metric in result.scores and not np.isfinite(value):
            raise DataError(
                f"item {shorten(result.item)!r}: {metric} is {value}",
                expected="a finite number, or no value and the outcome 'error' or 'missing'",
            )
    return Scores(items, values, tuple(r.cluster for r in results), tuple(r.group for r in results))


def task_score(
    results: Sequence[ItemResult],
    metric: str,
    *,
    level: float = 0.95,
    worst: float = 0.0,
    best: float = 1.0,
) -> TaskScore:
    """Return the mean of a metric with its interval and its bounds for missing items.

    worst, best: the range of the metric.

    Raises:
        DataError: as `read_scores`.
    """
    scores = read_scores(results, metric)
    has = np.isfinite(scores.values)
    missing = int((~has).sum())
    found = [c for c, ok in zip(scores.clusters, has, strict=True) if ok]
    interval = mean_interval(scores.values[has], found, level=level) if has.any() else None
    lowest, highest = (float(np.where(has, scores.values, x).mean()) for x in (worst, best))
    outcomes = dict(Counter(str(r.outcome) for r in results))
    return TaskScore(metric, interval, len(results), missing, lowest, highest, outcomes)

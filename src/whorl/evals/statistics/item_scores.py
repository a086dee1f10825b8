"""Scores of one metric from item results; missing items stay countable.

An item without a value of the metric (outcome "missing" or "error") is NaN and never a zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whorl.errors import DataError, one_of, shorten
from whorl.evals.results import ItemResult


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

"""Figures of a task from the results of its items: mean, interval, bounds, chance.

    mean = sum_i w_i x_i / sum_i w_i                      w_i = 1, or bytes, characters or tokens of the item
    u_i  = mean + w_i (x_i - mean) / mean(w)              linearization: the mean of u is the mean, and its clustered
                                                          standard error is that of the ratio (delta method)

Intervals are those of `statistics.intervals`: Wilson's for shares, Student's t otherwise, with clusters. A perplexity is
exp of its mean and of both ends of the interval. Equal scores of all items, within a bounded range, have Wilson's interval.

An item without a score (no response, or a metric that failed) is left out of the mean, never a silent zero. `bounds` are
the mean with all such items at the metric's least and at its greatest value.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from whorl.evals.kinds.kind import Kind, Metric
from whorl.evals.results import OUTCOMES, ItemResult, TaskMeasure
from whorl.evals.statistics.distributions import normal_quantile
from whorl.evals.statistics.intervals import Interval, mean_interval, wilson


def task_measures(kind: Kind, results: Sequence[ItemResult]) -> list[TaskMeasure]:
    """Return the figures of all metrics that some item has, the chosen ones first, and the kind's further ones."""
    chosen = kind.chosen_metrics()
    chance = kind.chance(kind.task.items)
    scored = {name for result in results for name in result.scores}
    more = [name for name in kind.metrics if name not in chosen and name in scored]
    found = [measure(name, kind.metrics[name], results, chance.get(name)) for name in (*chosen, *more)]
    return [*found, *kind.more_measures(results)]


def group_measures(kind: Kind, results: Sequence[ItemResult]) -> dict[str, TaskMeasure]:
    """Return group -> figure of the first metric; empty if items have no groups."""
    name = kind.chosen_metrics()[0]
    groups: dict[str, list[ItemResult]] = {}
    for result in results:
        groups.setdefault(result.group, []).append(result)
    if set(groups) <= {""}:
        return {}
    return {group: measure(name, kind.metrics[name], some) for group, some in sorted(groups.items())}


def measure(
    name: str, metric: Metric, results: Sequence[ItemResult], chance: float | None = None
) -> TaskMeasure:
    """Return the figure of one metric; NaN if no item has it."""
    has = [r for r in results if name in r.scores and math.isfinite(r.scores[name])]
    weights = np.array([r.weights.get(name, 1.0) for r in has], np.float64)
    uniform = bool((weights == 1).all())
    empty = TaskMeasure(
        name, math.nan, math.nan, math.nan, 0, metric.about, metric.unit, metric.higher_is_better, chance,
        _bounds([r.scores[name] for r in has], _n_missing(name, results), metric) if uniform else None,
    )  # fmt: skip
    if not has or not weights.sum():
        return empty
    values = np.array([r.scores[name] for r in has], np.float64)
    if not uniform:
        mean = float((weights * values).sum() / weights.sum())
        values = mean + weights * (values - mean) / weights.mean()
    interval = mean_interval(values, [r.cluster for r in has])
    low, high = interval.low, interval.high
    if math.isinf(interval.se):
        low = high = math.nan
    elif interval.method == "t":
        low, high = _limited(low, metric), _limited(high, metric)
        if not interval.se and uniform:
            low, high = _without_variation(interval, metric)
    shown = _exp if metric.transform == "exp" else float
    method = (
        f"{interval.method}, {interval.clusters} clusters"
        if interval.clusters < interval.n
        else interval.method
    )
    return replace(
        empty, value=shown(interval.mean), low=shown(low), high=shown(high), n=interval.n, standard_error=interval.se,
        method=method,
    )  # fmt: skip


def _n_missing(name: str, results: Sequence[ItemResult]) -> int:
    """Return the number of items without a response or verdict; an item may lack a metric for other reasons."""
    return sum(
        1
        for r in results
        if r.outcome in ("missing", "error") and not math.isfinite(r.scores.get(name, math.nan))
    )


def _bounds(values: Sequence[float], n_missing: int, metric: Metric) -> tuple[float, float] | None:
    """Return the mean with missing items at the metric's least and at its greatest value."""
    if not n_missing or metric.low is None or metric.high is None:
        return None
    total, n = sum(values), len(values) + n_missing
    return (total + n_missing * metric.low) / n, (total + n_missing * metric.high) / n


def outcome_counts(results: Sequence[ItemResult]) -> dict[str, int]:
    """Return outcome -> number of items, for those that occur."""
    counts = Counter(result.outcome for result in results)
    return {name: counts[name] for name in OUTCOMES if counts[name]}


def _without_variation(interval: Interval, metric: Metric) -> tuple[float, float]:
    """Return the interval of equal scores: Wilson's, over the range of the metric; as it is if the range is unbounded.

    The variance of scores in a range is largest for the two ends alone, so the interval is no shorter than the true one.
    """
    if metric.low is None or metric.high is None:
        return interval.low, interval.high
    span = metric.high - metric.low
    share = (interval.mean - metric.low) / span
    ends = wilson(share, interval.clusters, normal_quantile(interval.level))
    return metric.low + span * ends[0], metric.low + span * ends[1]


def _limited(value: float, metric: Metric) -> float:
    """Return the end of an interval, within the range of the metric."""
    value = value if metric.low is None else max(value, metric.low)
    return value if metric.high is None else min(value, metric.high)


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf

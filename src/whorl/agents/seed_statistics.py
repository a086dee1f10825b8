"""Statistics over seeds: interquartile mean, performance profile, probability of improvement, each with an interval.

The mean of a few runs depends on outliers; the median ignores most runs. The interquartile mean is the mean of the
middle half. Intervals hold 95 % of a bootstrap that resamples runs within each task (Agarwal et al. 2021,
arXiv:2108.13264). One run per task has no interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

N_BOOTSTRAP = 2000
TAILS = (0.025, 0.975)  # quantiles at the ends of an interval

Array = NDArray[np.float64]


@dataclass(frozen=True)
class SeedSummary:
    """A statistic of runs and the ends of its 95 % bootstrap interval; of one run they are None."""

    mean: float
    low: float | None
    high: float | None

    def __format__(self, spec: str) -> str:
        spec = spec or (".1f" if abs(self.mean) >= 10 else ".2f")
        interval = "" if self.low is None else f" ({self.low:{spec}} to {self.high:{spec}})"
        return f"{self.mean:{spec}}{interval}"

    def __str__(self) -> str:
        return format(self)

    def to_json(self) -> list[float | None]:
        """Return [mean, low, high]."""
        return [self.mean, self.low, self.high]


@dataclass(frozen=True)
class SummaryCurve:
    """A statistic at common points x [P], and the ends of its intervals; of one run they are None."""

    x: Array
    mean: Array
    low: Array | None
    high: Array | None


def interquartile_mean(scores: Array) -> Array:
    """Return the mean of the middle half of scores [..., n]. Values on the edge are weighted by the fraction inside."""
    n = scores.shape[-1]
    index = np.arange(n)
    inside = np.clip(np.minimum(index + 1, 0.75 * n) - np.maximum(index, 0.25 * n), 0, 1)
    means: Array = (np.sort(scores, axis=-1) * inside).sum(axis=-1) / inside.sum()
    return means


def summarize_seeds(
    tasks: Sequence[Sequence[float]], rng: np.random.Generator, n_bootstrap: int = N_BOOTSTRAP
) -> SeedSummary:
    """Return the interquartile mean over all runs of all tasks.

    Args:
        tasks: the scores of each task's runs.
        n_bootstrap: number of bootstrap samples.

    Raises:
        ValueError: a task has no runs.
    """
    runs = [np.asarray(task, np.float64) for task in tasks]
    if not runs or any(len(task) == 0 for task in runs):
        raise ValueError("a task has no runs")
    return _summary(lambda each: interquartile_mean(np.concatenate(each, axis=-1)), runs, rng, n_bootstrap)


def interquartile_curve(
    curves: Sequence[tuple[Sequence[float], Sequence[float]]], rng: np.random.Generator, n_points: int = 100
) -> SummaryCurve:
    """Return the interquartile mean of curves (x, y), one per seed, interpolated at the x that all of them cover.

    Raises:
        ValueError: no x is covered by all curves.
    """
    low, high = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    if low > high:
        raise ValueError("the curves have no x in common")
    at = np.linspace(low, high, n_points)
    runs = np.stack([np.interp(at, x, y) for x, y in curves], axis=1)  # [points, runs]
    drawn = rng.integers(0, len(curves), (N_BOOTSTRAP // 4, len(curves)))
    return _curve(at, interquartile_mean(runs), interquartile_mean(runs[:, drawn]).T, len(curves))


def performance_profile(
    tasks: Sequence[Sequence[float]], thresholds: Array, rng: np.random.Generator
) -> SummaryCurve:
    """Return the share of runs that score above each threshold, averaged over the tasks (section 4.3)."""
    runs = [np.asarray(task, np.float64) for task in tasks]

    def share(each: Sequence[Array]) -> Array:
        above = [(scores[..., None] > thresholds).mean(axis=-2) for scores in each]
        return np.asarray(np.mean(above, axis=0))

    n_runs = min(map(len, runs))
    return _curve(thresholds, share(runs), share(_resampled(runs, rng, N_BOOTSTRAP // 4)), n_runs)


def probability_of_improvement(
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]], rng: np.random.Generator
) -> SeedSummary:
    """Return the probability that a run of `first` beats one of `second` on the same task; a tie counts half (section 4.4).

    Args:
        first, second: the scores of each task's runs, with the tasks in the same order.
    """
    runs = [np.asarray(task, np.float64) for task in (*first, *second)]

    def better(each: Sequence[Array]) -> Array:
        pairs = zip(each[: len(first)], each[len(first) :], strict=True)
        signs = [np.sign(x[..., :, None] - y[..., None, :]).mean(axis=(-2, -1)) for x, y in pairs]
        return np.asarray(0.5 + 0.5 * np.mean(signs, axis=0))

    return _summary(better, runs, rng, N_BOOTSTRAP)


def _resampled(runs: Sequence[Array], rng: np.random.Generator, n: int) -> list[Array]:
    """Return bootstrap samples [n, runs] of each task."""
    return [task[rng.integers(0, len(task), (n, len(task)))] for task in runs]


def _summary(
    statistic: Callable[[Sequence[Array]], Array], runs: Sequence[Array], rng: np.random.Generator, n: int
) -> SeedSummary:
    mean = float(statistic(runs))
    if min(map(len, runs)) < 2:
        return SeedSummary(mean, None, None)
    low, high = np.quantile(statistic(_resampled(runs, rng, n)), TAILS)
    return SeedSummary(mean, float(low), float(high))


def _curve(x: Array, mean: Array, samples: Array, n_runs: int) -> SummaryCurve:
    """Return a curve from bootstrap samples [n, points]."""
    low, high = np.quantile(samples, TAILS, axis=0) if n_runs > 1 else (None, None)
    return SummaryCurve(x, mean, low, high)

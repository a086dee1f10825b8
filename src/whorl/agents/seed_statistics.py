"""Statistics over seeds: the interquartile mean with a confidence interval.

The mean of a few runs depends on outliers; the median ignores most runs. The interquartile mean is the mean of the
middle half. Its interval comes from a bootstrap that resamples runs within each task (Agarwal et al. 2021,
arXiv:2108.13264).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class SeedSummary:
    """The interquartile mean of runs and its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.1f} ({self.low:.1f} to {self.high:.1f})"


def interquartile_mean(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean of the middle half of scores [..., n]. Values on the edge are weighted by the fraction inside."""
    n = scores.shape[-1]
    index = np.arange(n)
    inside = np.clip(np.minimum(index + 1, 0.75 * n) - np.maximum(index, 0.25 * n), 0, 1)
    means: NDArray[np.float64] = (np.sort(scores, axis=-1) * inside).sum(axis=-1) / inside.sum()
    return means


def summarize_seeds(
    tasks: Sequence[Sequence[float]], rng: np.random.Generator, n_bootstrap: int = 2000
) -> SeedSummary:
    """Return the interquartile mean over all runs of all tasks, and its interval.

    Args:
        tasks: the scores of each task's runs.
        n_bootstrap: number of bootstrap samples.

    Raises:
        ValueError: a task has no runs.
    """
    runs = [np.asarray(task, np.float64) for task in tasks]
    if not runs or any(len(task) == 0 for task in runs):
        raise ValueError("a task has no runs")
    mean = float(interquartile_mean(np.concatenate(runs)))
    resampled = [
        task[rng.integers(0, len(task), (n_bootstrap, len(task)))] for task in runs
    ]  # resampled within each task
    means = interquartile_mean(np.concatenate(resampled, axis=1))
    low, high = np.quantile(means, [0.025, 0.975])
    return SeedSummary(mean, float(low), float(high))

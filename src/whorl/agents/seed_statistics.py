"""What several seeds say together: the inter-quartile mean, with an interval.

The mean of a handful of runs is one lucky or unlucky run; the median throws most of them away. The inter-quartile
mean is the mean of the middle half, and its interval comes from drawing runs anew with replacement, within each
task where there are several (stratified bootstrap; Agarwal et al. 2021, arXiv:2108.13264).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class SeedSummary:
    """The inter-quartile mean of runs, and the interval that holds 95 % of what drawing them anew gives."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.1f} ({self.low:.1f} to {self.high:.1f})"


def interquartile_mean(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """scores: [..., n] -> [...]: the mean of the middle half; on its edge, by the share that lies inside."""
    n = scores.shape[-1]
    place = np.arange(n)
    inside = np.clip(np.minimum(place + 1, 0.75 * n) - np.maximum(place, 0.25 * n), 0, 1)
    found: NDArray[np.float64] = (np.sort(scores, axis=-1) * inside).sum(axis=-1) / inside.sum()
    return found


def summarize_seeds(
    tasks: Sequence[Sequence[float]], rng: np.random.Generator, n_bootstrap: int = 2000
) -> SeedSummary:
    """tasks: for each task the score of each run. All runs of all tasks together make the mean.

    Raises:
        ValueError: there is no run.
    """
    runs = [np.asarray(task, np.float64) for task in tasks]
    if not runs or any(len(task) == 0 for task in runs):
        raise ValueError("there are no runs to summarise")
    whole = float(interquartile_mean(np.concatenate(runs)))
    again = [task[rng.integers(0, len(task), (n_bootstrap, len(task)))] for task in runs]  # within each task
    means = interquartile_mean(np.concatenate(again, axis=1))
    low, high = np.quantile(means, [0.025, 0.975])
    return SeedSummary(whole, float(low), float(high))

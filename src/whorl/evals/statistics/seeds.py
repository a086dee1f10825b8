"""Items and sampling seeds as separate sources of variance.

Scores x_ij of item i under seed j, I items and J seeds, without interaction replicates (two-way random effects):

    within       sum_ij (x_ij - x_i. - x_.j + x_..)^2 / ((I - 1)(J - 1))     sampling noise of one answer
    between      sum_i (x_i. - x_..)^2 / (I - 1) - within / J                 spread of the items' expected scores
    seed         sum_j (x_.j - x_..)^2 / (J - 1) - within / I                 shift shared by all items of a seed

Estimates below 0 are set to 0. "seed" is 0 for independent sampling. It is not if a seed also selects examples, an
order, or a trained model.

    new items and new samples        between / I + within / (I J) + seed / J      the task's population of items
    same items and new samples                     within / (I J) + seed / J      a rerun of this benchmark

More samples reduce the second and third term only, so items are worth more than seeds (Miller 2024, arXiv:2411.00640,
section 3). Samples of one item are never counted as items.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import ArrayLike

from whorl.errors import DataError


@dataclass(frozen=True)
class VarianceComponents:
    """Variance of scores between items, within items over samples, and between seeds.

    Attributes:
        mean: over all items and seeds.
        se: standard error for new items and new samples.
        se_rerun: standard error for the same items and new samples.
        se_one_sample: as `se`, had each item one sample.
    """

    mean: float
    between: float
    within: float
    seed: float
    items: int
    seeds: int

    @property
    def se(self) -> float:
        return sqrt(self.between / self.items + self.se_rerun**2)

    @property
    def se_rerun(self) -> float:
        return sqrt(self.within / (self.items * self.seeds) + self.seed / self.seeds)

    @property
    def se_one_sample(self) -> float:
        return sqrt((self.between + self.within) / self.items + self.seed)


def variance_components(scores: ArrayLike) -> VarianceComponents:
    """Return the variance components of scores [items, seeds].

    Raises:
        DataError: fewer than two items or seeds, or a score is not finite.
    """
    x = np.asarray(scores, np.float64)
    if x.ndim != 2 or min(x.shape) < 2:
        raise DataError(f"scores of shape {list(x.shape)}", expected="[items, seeds], at least two of both")
    if not np.isfinite(x).all():
        row, column = (int(k[0]) for k in np.nonzero(~np.isfinite(x)))
        raise DataError(
            f"the score of item {row} under seed {column} is {x[row, column]}",
            expected="a number for each item and seed",
            do="leave the item out for all seeds",
        )
    items, seeds = x.shape
    by_item, by_seed, mean = x.mean(1), x.mean(0), float(x.mean())
    residuals = x - by_item[:, None] - by_seed[None, :] + mean
    within = float((residuals**2).sum()) / ((items - 1) * (seeds - 1))
    between = max(0.0, float(by_item.var(ddof=1)) - within / seeds)
    seed = max(0.0, float(by_seed.var(ddof=1)) - within / items)
    return VarianceComponents(mean, between, within, seed, items, seeds)

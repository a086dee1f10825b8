"""Which two models meet next: uniformly, or where a vote reduces the uncertainty most.

    information of pair a     sqrt(v_a / n_a) - sqrt(v_a / (n_a + 1))      Chiang et al. 2024, arXiv:2403.04132, section 5
    probability               (1 - f) information_a / sum + f / P,         P pairs
    weight of a vote          1 / (P probability_a), at most 1 / f

n_a is the number of the pair's votes, and v_a the variance of one score: that of the scores 0 (or 1/2, for ties) and 1 at
the smoothed mean. A pair without votes counts as one with a vote. Where the Bradley-Terry model does not hold exactly,
for example where preferences are not transitive, the ratings depend on how often each pair meets. With the weights they
are those of uniform sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from whorl.errors import ConfigError
from whorl.evals.arena.battles import Battles
from whorl.evals.arena.options import Sampling

FLOOR = 0.2  # share of pairs drawn uniformly; bounds the weights by 5
PRIOR_VOTES = 1.0  # votes at 1/2 in the mean of a pair


@dataclass(frozen=True)
class DrawnPair:
    """Two models in random order, and the weight of their vote."""

    left: str
    right: str
    weight: float


def pair_probabilities(
    battles: Battles, sampling: Sampling = "uniform", floor: float = FLOOR
) -> NDArray[np.float64]:
    """Return [P] probabilities of the pairs (0, 1), (0, 2), ..., (1, 2), ... of the models.

    Raises:
        ConfigError: there are fewer than two models, no such sampling, or the floor is not in (0, 1].
    """
    pairs = list(combinations(range(len(battles.models)), 2))
    if not pairs:
        raise ConfigError(f"{len(battles.models)} models", expected="at least two")
    if sampling not in ("uniform", "information") or not 0 < floor <= 1:
        raise ConfigError(
            f"sampling {sampling!r} with a floor of {floor}",
            expected="uniform or information; a floor in (0, 1]",
        )
    uniform = np.full(len(pairs), 1 / len(pairs))
    if sampling == "uniform":
        return uniform
    m = len(battles.models)
    low, high = np.minimum(battles.first, battles.second), np.maximum(battles.first, battles.second)
    score = np.where(battles.first < battles.second, battles.score, 1 - battles.score)
    counts, sums, squares = (
        np.bincount(low * m + high, battles.count * value, minlength=m * m)
        for value in (np.ones(len(score)), score, score**2)
    )
    index = np.array([a * m + b for a, b in pairs])
    n, total, square = counts[index], sums[index], squares[index]
    mean = (total + PRIOR_VOTES / 2) / (n + PRIOR_VOTES)
    # The prior's vote is half a win and half a loss.
    variance = np.maximum((square + PRIOR_VOTES / 2) / (n + PRIOR_VOTES) - mean**2, 0.0)
    n = np.maximum(n, 1.0)
    gain = np.sqrt(variance / n) - np.sqrt(variance / (n + 1))
    share = gain / gain.sum() if gain.sum() > 0 else uniform
    return np.asarray((1 - floor) * share + floor * uniform)


def draw_pair(
    battles: Battles, rng: np.random.Generator, sampling: Sampling = "uniform", floor: float = FLOOR
) -> DrawnPair:
    """Return the next pair with sides drawn. Raises ConfigError: as `pair_probabilities`."""
    probabilities = pair_probabilities(battles, sampling, floor)
    pairs = list(combinations(battles.models, 2))
    k = int(rng.choice(len(pairs), p=probabilities))
    left, right = pairs[k] if rng.random() < 0.5 else pairs[k][::-1]
    return DrawnPair(left, right, float(1 / (len(pairs) * probabilities[k])))

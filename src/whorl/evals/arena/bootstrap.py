"""Bootstrap of Bradley-Terry ratings: votes, or voters with all their votes, are drawn again with replacement.

    votes of a row       multinomial over the rows
    voters               multinomial over the voters; a row has the count of its voter

A draw may leave a model without a win, so that its estimate is infinite. Each draw therefore has a small penalty. The
intervals are percentiles, so an extreme draw widens them and does not spoil them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whorl.errors import ConfigError
from whorl.evals.arena.battles import Battles, group_rows
from whorl.evals.arena.bradley_terry import solve
from whorl.evals.statistics.distributions import check_level

DRAW_PENALTY = 1e-3  # weight of a thousandth of a vote
CHUNK_VALUES = 1 << 21  # weights of draws in memory at once


@dataclass(frozen=True)
class Bootstrap:
    """Estimates [B, M + C] of B draws."""

    models: tuple[str, ...]
    draws: NDArray[np.float64]

    def interval(self, level: float = 0.95) -> NDArray[np.float64]:
        """Return [M + C, 2] percentile intervals of ratings and effects, in log odds."""
        tail = (1 - check_level(level)) / 2
        return np.quantile(self.draws, [tail, 1 - tail], axis=0).T

    def first_shares(self) -> NDArray[np.float64]:
        """Return [M] shares of draws in which a model has the highest rating; equal ratings share."""
        ratings = self.draws[:, : len(self.models)]
        top = ratings == ratings.max(1, keepdims=True)
        return np.asarray((top / top.sum(1, keepdims=True)).mean(0))


def bootstrap(battles: Battles, rng: np.random.Generator, draws: int = 1000) -> Bootstrap:
    """Return the ratings of `draws` samples of the votes.

    Raises:
        ConfigError: draws is not positive.
    """
    if draws < 1:
        raise ConfigError(f"the number of draws is {draws}", expected="at least 1, such as 1000")
    voters = None if battles.voter is None else _votes_by_voter(battles)
    if voters is not None and not battles.names:
        battles, index = group_rows(battles)
        grouped = np.zeros((len(voters), len(battles.first)))
        np.add.at(grouped.T, index, voters.T)  # a view
        voters = grouped
    rows = len(battles.first)
    chunk = max(1, CHUNK_VALUES // max(1, rows))
    found = []
    for start in range(0, draws, chunk):
        n = min(chunk, draws - start)
        if voters is None:
            counts = rng.multinomial(battles.n_votes, battles.count / battles.count.sum(), n).astype(
                np.float64
            )
        else:
            counts = rng.multinomial(len(voters), np.full(len(voters), 1 / len(voters)), n) @ voters
        found.append(solve(battles, counts * battles.weight, DRAW_PENALTY))
    estimates = np.concatenate(found)
    return Bootstrap(battles.models, estimates[np.isfinite(estimates).all(1)])


def _votes_by_voter(battles: Battles) -> NDArray[np.float64]:
    """Return [voters, R] numbers of votes."""
    assert battles.voter is not None
    found = np.zeros((int(battles.voter.max()) + 1, len(battles.first)))
    found[battles.voter, np.arange(len(battles.first))] = battles.count
    return found

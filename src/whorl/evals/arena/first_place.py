"""The fewest votes that would change first place, if they were removed or reversed.

The influence of one vote on the lead t_a - t_b is (e_a - e_b)' H^-1 x w (y - p) / (1 - h), one Newton step with leverage
h. For each challenger, the votes of largest influence are removed (or their choice reversed) in portions. The ratings are
fitted again after each portion. The last portion is made smaller until the exact number is found. The result is a set of
votes that does change first place. For two models no smaller one does. For more it is an upper bound, close to the smallest.
Huang et al. 2025, arXiv:2508.11847, rank by the first step only and do not fit again in between.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from whorl.errors import DataError
from whorl.evals.arena.battles import Battles
from whorl.evals.arena.bradley_terry import solve

PENALTY = 1e-3  # removing votes may leave a model without a win
PORTIONS = 8  # at least so many refits between the start and the change

Change = Literal["remove", "reverse"]


@dataclass(frozen=True)
class FirstPlaceChange:
    """A set of votes that changes first place.

    Attributes:
        leader, challenger: models.
        votes, share: number of votes, and their share of all.
    """

    leader: str
    challenger: str
    votes: int
    share: float
    change: Change


def fewest_votes(battles: Battles, change: Change = "remove") -> FirstPlaceChange | None:
    """Return the smallest set found; None if removing or reversing every useful vote keeps the leader first.

    Raises:
        DataError: the battles have covariates, or there are no votes.
    """
    if battles.covariates.shape[1] or not battles.n_votes:
        raise DataError("first place needs votes without covariates", expected="at least one vote")
    if battles.voter is not None:
        battles = replace(battles, voter=None)
    if change == "reverse":
        battles = _with_reversed_rows(battles)
    ratings = _ratings(battles, battles.count)
    order = np.argsort(-ratings, kind="stable")
    leader = int(order[0])
    best: tuple[int, int] | None = None
    for challenger in (int(k) for k in order[1:]):
        limit = best[0] if best else battles.n_votes
        found = _votes_to_overtake(battles, leader, challenger, limit, change)
        if found is not None and (best is None or found < best[0]):
            best = found, challenger
    if best is None:
        return None
    votes, challenger = best
    names = battles.models
    return FirstPlaceChange(names[leader], names[challenger], votes, votes / battles.n_votes, change)


def _votes_to_overtake(
    battles: Battles, leader: int, challenger: int, limit: int, change: Change
) -> int | None:
    """Return the votes after which the challenger is at least level, or None if more than `limit` are needed."""
    counts, used = battles.count.copy(), 0
    tied_allowed = 1e-9
    while True:
        ratings = _ratings(battles, counts)
        lead = float(ratings[leader] - ratings[challenger])
        if lead <= tied_allowed:
            return used
        effect = _influence(battles, counts, ratings, leader, challenger, change)
        rows = np.argsort(-effect, kind="stable")
        rows = rows[(counts[rows] > 0) & (effect[rows] > 0)]
        if not len(rows):
            return None
        portion = _votes_for(lead / PORTIONS, effect[rows], counts[rows])
        while True:
            tried = _changed(counts, rows, portion, change)
            after = _ratings(battles, tried)
            if portion == 1 or after[leader] - after[challenger] > tied_allowed:
                break
            portion = max(1, portion // 2)  # it is passed within this portion
        counts, used = tried, used + portion
        if used > limit:
            return None


def _influence(
    battles: Battles,
    counts: NDArray[np.float64],
    ratings: NDArray[np.float64],
    leader: int,
    challenger: int,
    change: Change,
) -> NDArray[np.float64]:
    """Return [R] decrease of the lead by one vote of each row."""
    x, w = battles.design(), battles.weight
    p = 1 / (1 + np.exp(-(x @ ratings)))
    curvature = w * p * (1 - p)
    hessian = (x * (counts * curvature)[:, None]).T @ x
    hessian += PENALTY * np.eye(len(ratings)) + counts.sum() / len(ratings) ** 2
    inverse = np.linalg.inv(hessian)
    toward = x @ (inverse[leader] - inverse[challenger])
    if change == "reverse":
        return np.asarray(toward * w * (2 * battles.score - 1))
    leverage = curvature * np.einsum("rk,kl,rl->r", x, inverse, x)
    return np.asarray(toward * w * (battles.score - p) / (1 - np.minimum(leverage, 0.99)))


def _votes_for(lead: float, effect: NDArray[np.float64], counts: NDArray[np.float64]) -> int:
    """Return the number of votes, in the order of the rows, whose influences add up to at most `lead`; at least 1."""
    total = np.cumsum(effect * counts)
    whole = int(np.searchsorted(total, lead, side="right"))
    n = counts[:whole].sum()
    if whole < len(counts):
        n += (lead - (total[whole - 1] if whole else 0.0)) // effect[whole]
    return max(1, int(n))


def _changed(
    counts: NDArray[np.float64], rows: NDArray[np.intp], n: int, change: Change
) -> NDArray[np.float64]:
    """Return the counts without the first n votes of `rows`, or with these votes reversed."""
    before = np.cumsum(counts[rows]) - counts[rows]
    taken = np.clip(n - before, 0.0, counts[rows])
    found = counts.copy()
    found[rows] -= taken
    if change == "reverse":  # rows and their reversals are in two halves
        np.add.at(found, (rows + len(counts) // 2) % len(counts), taken)
    return found


def _with_reversed_rows(battles: Battles) -> Battles:
    """Return battles with an empty row for the reversal of each row."""
    return replace(
        battles,
        first=np.tile(battles.first, 2), second=np.tile(battles.second, 2), weight=np.tile(battles.weight, 2),
        score=np.concatenate([battles.score, 1 - battles.score]),
        count=np.concatenate([battles.count, np.zeros(len(battles.count))]),
        covariates=np.tile(battles.covariates, (2, 1)),
    )  # fmt: skip


def _ratings(battles: Battles, counts: NDArray[np.float64]) -> NDArray[np.float64]:
    return solve(battles, (counts * battles.weight)[None, :], PENALTY)[0, : len(battles.models)]

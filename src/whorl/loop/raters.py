"""Votes of many raters to one label per item, with raters weighted by how often they agree with the others.

    P(vote v | truth t) = sigma(k_r v t + b c)        v, t: +1 or -1; c: +1 for a vote for the left answer, -1 for the right
    log odds of t = 1 of an item = sum over its votes of log P(v | 1) - log P(v | -1)

k_r is the log odds of the rater's agreement with the other votes on the same items, shrunk towards the mean of all raters.
b is the favour of the left position: it explains the share of votes for the left answer.

This is the two-class model of Dawid and Skene 1979, doi:10.2307/2346806, with one accuracy per rater, and a few rounds of
its EM. The rater's own vote is left out: otherwise a rater confirms an item that has no other votes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import expit, log_expit, logit

PRIOR, PRIOR_VOTES = (
    0.75,
    4.0,
)  # agreement of a rater before any evidence, and how many votes that belief is worth
ROUNDS = 4


class RaterVote(NamedTuple):
    """rater, item: names. value: +1 or -1. side: of the answer that +1 stands for: +1 left, -1 right, 0 not shown so."""

    rater: str
    item: str
    value: int
    side: int = 0


@dataclass(frozen=True)
class RaterLabels:
    """Labels of items and figures of raters.

    Attributes:
        log_odds: item -> log odds that +1 is right. agreement: rater -> probability of a vote as the others'.
        votes: rater -> number. left: share of the votes between two positions that went to the left one; None without any.
    """

    log_odds: dict[str, float]
    agreement: dict[str, float]
    votes: dict[str, int]
    left: float | None


def rate(votes: Sequence[RaterVote]) -> RaterLabels:
    """Return the label of each item, and the agreement of each rater (see the top of this file)."""
    if not votes:
        return RaterLabels({}, {}, {}, None)
    raters, r = np.unique([vote.rater for vote in votes], return_inverse=True)
    items, i = np.unique([vote.item for vote in votes], return_inverse=True)
    v = np.array([vote.value for vote in votes], np.float64)
    c = v * [vote.side for vote in votes]
    left = float((c[c != 0] > 0).mean()) if c.any() else None
    shared = (np.bincount(i)[i] > 1).astype(np.float64)  # votes on items that others rated, too
    agreement, favour = np.full(len(raters), PRIOR), 0.0
    for _ in range(ROUNDS):
        k = logit(agreement)[r]
        if left is not None:
            favour = _favour(float(np.clip(left, 0.02, 0.98)), k[c != 0])
        evidence = log_expit(k * v + favour * c) - log_expit(-k * v + favour * c)
        log_odds = np.bincount(i, evidence)
        agree = expit(v * (log_odds[i] - evidence)) * shared
        usual = (agree.sum() + PRIOR * PRIOR_VOTES) / (shared.sum() + PRIOR_VOTES)
        seen = np.bincount(r, shared)
        agreement = (np.bincount(r, agree) + usual * PRIOR_VOTES) / (seen + PRIOR_VOTES)
        agreement = np.clip(agreement, 0.5, 0.98)
    counts = np.bincount(r)
    names = [str(name) for name in raters]
    return RaterLabels(
        {str(item): float(x) for item, x in zip(items, log_odds, strict=True)},
        dict(zip(names, agreement.tolist(), strict=True)), dict(zip(names, counts.tolist(), strict=True)), left,
    )  # fmt: skip


def _favour(left: float, k: NDArray[np.float64]) -> float:
    """Return b for which raters of these k choose the left answer in a share `left`, if it is the better one in a half."""
    return float(brentq(lambda b: (expit(k + b) + expit(-k + b)).mean() / 2 - left, -8.0, 8.0))

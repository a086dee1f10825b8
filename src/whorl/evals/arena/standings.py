"""The results of an arena: ratings with two intervals, ranks, the outcomes of all pairs, and the margin of first place.

    points      1000 + 400 / ln 10 * t                                  mean 1000; 400 points are odds of 10 to 1
    sandwich    t +- quantile * se, from the covariance of `bradley_terry.py`
    bootstrap   percentiles of ratings of votes drawn again
    ranks       1 + models that are better for certain, to M - models that are worse for certain: the differences of all
                pairs, with p-values corrected by Holm

Until every model has scored against the rest, no finite rating without a prior exists. Votes that are all ties have no
variation, so the sandwich would state no uncertainty. The standings are then provisional: ratings with a normal prior of
standard deviation 1 in log odds, and its posterior's intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from whorl.errors import DataError
from whorl.evals.arena.battles import Battles, Vote, read_votes
from whorl.evals.arena.bootstrap import bootstrap
from whorl.evals.arena.bradley_terry import ELO, Ratings, fit, unrated
from whorl.evals.arena.first_place import FirstPlaceChange, fewest_votes
from whorl.evals.statistics.distributions import normal_quantile, t_quantile, t_two_sided
from whorl.evals.statistics.intervals import wilson
from whorl.evals.statistics.power import holm

PRIOR = 1.0  # penalty of provisional ratings
DRAWS = 1000
LEVEL = 0.95
MIN_VOTERS = 20  # clusters, below which their covariance is unreliable

_Tallies = dict[tuple[str, str], tuple[int, int, int, int]]  # (a, b) -> wins, losses, ties, both bad of a


@dataclass(frozen=True)
class Standing:
    """One model, best first. Ratings in points; bootstrap bounds are None if the standings are provisional."""

    model: str
    points: float
    low: float
    high: float
    bootstrap_low: float | None
    bootstrap_high: float | None
    rank_low: int
    rank_high: int
    first_share: float | None
    votes: int
    wins: int
    losses: int
    ties: int
    both_bad: int


@dataclass(frozen=True)
class Meeting:
    """Model `a` against `b`: the votes, and the expected score of `a` by the ratings with its interval."""

    a: str
    b: str
    wins: int
    losses: int
    ties: int
    both_bad: int
    expected: float
    low: float
    high: float
    p_value: float


@dataclass(frozen=True)
class Effect:
    """Points that a covariate adds per standard deviation, with its interval."""

    name: str
    points: float
    low: float
    high: float


@dataclass(frozen=True)
class Standings:
    """Results of all votes.

    Attributes:
        meetings: each pair once, with p-values corrected by Holm.
        effects: of covariates, such as length.
        remove, reverse: the fewest votes that would change first place; None if there are none.
        left_share, left_low, left_high: share of decided votes for the left side; 1/2 without position bias.
        provisional: why the ratings have a prior; "" if they do not.
        text: sentences.
    """

    rows: tuple[Standing, ...]
    meetings: tuple[Meeting, ...]
    effects: tuple[Effect, ...]
    votes: int
    remove: FirstPlaceChange | None
    reverse: FirstPlaceChange | None
    left_share: float
    left_low: float
    left_high: float
    level: float
    provisional: str
    text: str


def standings(
    votes: Sequence[Vote],
    models: Sequence[str],
    *,
    length: bool = False,
    by_voter: bool | None = None,
    draws: int = DRAWS,
) -> Standings:
    """Return the results of the votes between the models.

    Args:
        length: ratings at equal length; the effect of length is estimated with them.
        by_voter: votes of one voter are correlated; None: if there are `MIN_VOTERS` voters or more.
        draws: of the bootstrap; 0 leaves it out.

    Raises:
        DataError: as `read_votes`; there are fewer than two models, or no votes.
    """
    used = [v for v in votes if v.left in models and v.right in models]
    if by_voter is None:
        by_voter = len({v.voter for v in used if v.voter}) >= MIN_VOTERS
    battles = read_votes(used, models, length=length, by_voter=by_voter)
    apart = unrated(battles)
    provisional = ""
    ratings, quantile = _fit(battles, bool(apart))
    if apart:
        provisional = "no finite rating: " + ", ".join(battles.models[k] for k in apart)
    elif equal := _without_variation(ratings):
        provisional = "no votes but ties: " + ", ".join(equal)
        ratings, quantile = _fit(battles, True)
    se = np.sqrt(np.maximum(np.diag(ratings.covariance), 0.0))
    boot = None
    if draws and not provisional:
        boot = bootstrap(battles, np.random.default_rng(0), draws)
    tallies = _tallies(used)
    meetings, better = _meetings(tallies, ratings, quantile)
    points, half = ratings.points, ELO * quantile * se
    sampled = None if boot is None else 1000 + ELO * boot.interval(LEVEL)
    first = None if boot is None else boot.first_shares()
    rows = []
    for k in (int(i) for i in np.argsort(-points, kind="stable")):
        name = battles.models[k]
        counts = _counts(tallies, name)
        rows.append(Standing(
            name, float(points[k]), float(points[k] - half[k]), float(points[k] + half[k]),
            None if sampled is None else float(sampled[k, 0]), None if sampled is None else float(sampled[k, 1]),
            1 + int(better[:, k].sum()), len(battles.models) - int(better[k].sum()),
            None if first is None else float(first[k]), sum(counts), *counts,
        ))  # fmt: skip
    m = len(battles.models)
    effects = tuple(
        Effect(name, ELO * float(e), ELO * float(e - quantile * s), ELO * float(e + quantile * s))
        for name, e, s in zip(ratings.names, ratings.effects, se[m:], strict=True)
    )
    plain = battles if not battles.names else read_votes(votes, models)
    left, left_low, left_high = _left_share(used)
    found = Standings(
        tuple(rows), meetings, effects, len(used), fewest_votes(plain, "remove"), fewest_votes(plain, "reverse"),
        left, left_low, left_high, LEVEL, provisional, "",
    )  # fmt: skip
    return replace(found, text=describe(found))


def describe(found: Standings) -> str:
    """Return sentences: the first model, whether that is certain, and what would change it."""
    if not found.rows:
        raise DataError("there are no standings", expected="at least two models")
    best = found.rows[0]
    certain = [
        r.model for r in found.rows[1:] if r.rank_low > best.rank_low and _beats(found, best.model, r.model)
    ]
    open_ = [r.model for r in found.rows[1:] if r.model not in certain]
    text = f"{best.model} is first with {best.points:.0f} points ({best.low:.0f} to {best.high:.0f}), {found.votes} votes."
    if found.provisional:
        return f"Provisional, with a prior: {found.provisional}. {text}"
    if certain:
        text += f" Better than {', '.join(certain)}."
    if open_:
        text += f" Not distinguishable from {', '.join(open_)}."
    for change, verb in ((found.remove, "removed"), (found.reverse, "reversed")):
        if change is not None and not change.votes:
            text += f" {change.challenger} has as many points, so first place is shared."
            break
        if change is not None:
            votes = "1 vote" if change.votes == 1 else f"{change.votes:,} votes"
            text += f" {votes} {verb} ({change.share:.1%}) would put {change.challenger} first."
    if not found.left_low <= 0.5 <= found.left_high:
        text += f" Position bias: the left answer won {found.left_share:.0%} of decided votes."
    return text


def _without_variation(ratings: Ratings) -> list[str]:
    """Return the models of pairs with a standard error of 0: all votes agree with the ratings exactly, as ties do."""
    exact = ratings.difference_se() < 1e-9
    np.fill_diagonal(exact, False)
    return [ratings.models[k] for k in np.flatnonzero(exact.any(1))]


def _fit(battles: Battles, provisional: bool) -> tuple[Ratings, float]:
    if not provisional:
        ratings = fit(battles)
        return ratings, t_quantile(LEVEL, ratings.df)
    ratings = fit(battles, PRIOR)
    return replace(ratings, covariance=ratings.inverse_hessian), normal_quantile(LEVEL)


def _meetings(
    tallies: _Tallies, ratings: Ratings, quantile: float
) -> tuple[tuple[Meeting, ...], NDArray[np.bool_]]:
    """Return the pairs, and [M, M] whether the row's model is better than the column's for certain."""
    names, m = ratings.models, len(ratings.models)
    pairs = list(combinations(range(m), 2))
    se = ratings.difference_se()
    gaps = np.array([ratings.ratings[a] - ratings.ratings[b] for a, b in pairs])
    errors = np.array([se[a, b] for a, b in pairs])
    with np.errstate(divide="ignore", invalid="ignore"):
        z = np.where(errors > 0, gaps / errors, 0.0)
    adjusted = holm([t_two_sided(float(value), ratings.df) for value in z])
    better, found = np.zeros((m, m), bool), []
    for (a, b), gap, error, p in zip(pairs, gaps, errors, adjusted, strict=True):
        if p <= 1 - LEVEL:
            better[(a, b) if gap > 0 else (b, a)] = True
        low, high = gap - quantile * error, gap + quantile * error
        expected, least, most = (float(1 / (1 + np.exp(-value))) for value in (gap, low, high))
        counts = tallies.get((names[a], names[b]), (0, 0, 0, 0))
        found.append(Meeting(names[a], names[b], *counts, expected, least, most, float(p)))
    return tuple(found), better


def _tallies(votes: Sequence[Vote]) -> _Tallies:
    """Return the votes of each pair, in both orders."""
    found: dict[tuple[str, str], list[int]] = {}
    columns = {"left": (0, 1), "right": (1, 0), "tie": (2, 2), "both bad": (3, 3)}
    for vote in votes:
        for key, column in zip(
            ((vote.left, vote.right), (vote.right, vote.left)), columns[vote.choice], strict=True
        ):
            found.setdefault(key, [0, 0, 0, 0])[column] += 1
    return {key: (n[0], n[1], n[2], n[3]) for key, n in found.items()}


def _counts(tallies: _Tallies, model: str) -> tuple[int, int, int, int]:
    each = np.array([n for (a, _), n in tallies.items() if a == model]).reshape(-1, 4).sum(0)
    return int(each[0]), int(each[1]), int(each[2]), int(each[3])


def _beats(found: Standings, a: str, b: str) -> bool:
    meeting = next(m for m in found.meetings if {m.a, m.b} == {a, b})
    return meeting.p_value <= 1 - found.level and (meeting.expected > 0.5) == (meeting.a == a)


def _left_share(votes: Sequence[Vote]) -> tuple[float, float, float]:
    left = sum(v.choice == "left" for v in votes)
    n = left + sum(v.choice == "right" for v in votes)
    if not n:
        return 0.5, 0.0, 1.0
    return left / n, *wilson(left / n, n, normal_quantile(LEVEL))

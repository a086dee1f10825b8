"""Bradley-Terry ratings with ties and covariates, and their sandwich covariance.

    P(i beats j) = s(t_i - t_j + x . b),   s(z) = 1 / (1 + e^-z)                                Bradley and Terry 1952
    maximise  sum_r c_r w_r (y_r log p_r + (1 - y_r) log(1 - p_r)) - penalty / 2 (|t|^2 + |b|^2)
    covariance  H^-1 (sum_g e_g e_g') H^-1,   e_g = sum over votes r of g of w_r (y_r - p_r) / (1 - h_r) x_r    White 1982

A tie is half a win of each, y = 1/2. The scores stay unbiased as long as the expected score, ties counted half, is
s(t_i - t_j). This is a logistic regression without intercept in which a tie is two rows of half the weight. Ratings sum
to 0. The sandwich also holds where the model is wrong: more ties than it expects, or weights of the pairs. If votes of one
voter are correlated, g is the voter. h_r is the leverage of a vote, as in HC3. It makes intervals of few votes wide enough.

The estimate is finite only if every model has scored against the rest, directly or through others (Ford 1957): the graph
of points is strongly connected. Newton's method solves several weightings of the same rows at once, for the bootstrap.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import numpy as np
from numpy.typing import NDArray

from whorl.errors import DataError, shorten
from whorl.evals.arena.battles import Battles

ELO = 400 / log(10)  # points of one unit of t
CENTER = 1000.0  # mean rating in points
STEPS = 100
TOLERANCE = 1e-10  # of the Newton step, in units of t
BOUND = 30.0  # beyond it an estimate counts as infinite
CHUNK_ROWS = 2048  # rows whose outer products are in memory at once


@dataclass(frozen=True)
class Ratings:
    """Ratings of M models and effects of C covariates.

    Attributes:
        ratings: [M] in units of log odds, sum 0.
        effects: [C] of the covariates. names: of them.
        covariance: [M + C, M + C] sandwich.
        inverse_hessian: [M + C, M + C], the covariance if the model holds and all weights are 1.
        votes, df: votes, and degrees of freedom of the intervals.
        penalty: 0 for the maximum of the likelihood.
    """

    models: tuple[str, ...]
    ratings: NDArray[np.float64]
    effects: NDArray[np.float64]
    names: tuple[str, ...]
    covariance: NDArray[np.float64]
    inverse_hessian: NDArray[np.float64]
    votes: int
    df: float
    penalty: float

    @property
    def points(self) -> NDArray[np.float64]:
        """Return [M] ratings in points with mean 1000: 400 points are odds of 10 to 1."""
        return CENTER + ELO * self.ratings

    def difference_se(self) -> NDArray[np.float64]:
        """Return [M, M] standard errors of the differences of ratings."""
        m = len(self.models)
        v = self.covariance[:m, :m]
        d = np.diag(v)
        return np.asarray(np.sqrt(np.maximum(0.0, d[:, None] + d[None, :] - 2 * v)))


def fit(battles: Battles, penalty: float = 0.0) -> Ratings:
    """Return the ratings that maximise the (penalised) likelihood.

    Raises:
        DataError: there are fewer than two models, or no votes; without a penalty, an estimate is infinite.
    """
    n_models, n_votes = len(battles.models), battles.n_votes
    if n_models < 2 or not n_votes:
        raise DataError(f"{n_votes} votes for {n_models} models", expected="at least two models and a vote")
    if penalty <= 0:
        check_estimable(battles)
    total = (battles.count * battles.weight)[None, :]
    solved = solve(battles, total, penalty)[0]
    if not np.isfinite(solved).all():
        raise DataError(
            "the estimate is infinite: a covariate separates the votes",
            expected="votes for the longer and for the shorter answer",
            do="collect more votes, or leave the covariate out",
        )
    inverse = np.linalg.inv(_hessian(battles, total, solved[None, :], penalty)[0])
    covariance, df = _sandwich(battles, solved, inverse)
    inverse[:n_models, :n_models] -= inverse[
        :n_models, :n_models
    ].mean()  # the part of the sum of the ratings
    return Ratings(
        battles.models, solved[:n_models], solved[n_models:], battles.names, covariance, inverse, n_votes, df, penalty
    )  # fmt: skip


def solve(battles: Battles, totals: NDArray[np.float64], penalty: float = 0.0) -> NDArray[np.float64]:
    """Return [B, M + C] estimates for B weightings of the rows, totals [B, R]; NaN where one is infinite."""
    x = battles.design()
    n_models = len(battles.models)
    beta = np.zeros((len(totals), x.shape[1]))
    best = _objective(x, battles.score, totals, beta, penalty)
    active = np.arange(len(totals))
    for _ in range(STEPS):
        here, some = beta[active], totals[active]
        p = _sigmoid(here @ x.T)
        gradient = (some * (battles.score - p)) @ x - penalty * here
        step = np.linalg.solve(_hessian(battles, some, here, penalty), gradient[:, :, None])[:, :, 0]
        size = np.ones(len(active))
        for _ in range(40):  # halve steps that do not increase the objective
            tried = here + size[:, None] * step
            value = _objective(x, battles.score, some, tried, penalty)
            worse = value < best[active] - 1e-9 * (1 + np.abs(best[active]))
            if not worse.any():
                break
            size[worse] /= 2
        beta[active], best[active] = tried, value
        moved = np.abs(size[:, None] * step).max(1) > TOLERANCE
        active = active[moved & (np.abs(tried).max(1) < BOUND)]
        if not len(active):
            break
    beta[:, :n_models] -= beta[:, :n_models].mean(1, keepdims=True)
    beta[np.abs(beta).max(1) >= BOUND] = np.nan
    return beta


def check_estimable(battles: Battles) -> None:
    """Raise DataError if the estimate without a penalty is infinite, with the models that cannot be rated."""
    apart = unrated(battles)
    if apart:
        names = ", ".join(shorten(battles.models[k]) for k in apart[:5])
        raise DataError(
            f"no finite ratings: {names} won all or lost all votes against the others, or had none",
            expected="every model with a win or tie and a loss or tie, connected with all others",
            do="collect more votes, or rate with a penalty",
        )


def unrated(battles: Battles) -> list[int]:
    """Return the numbers of the models outside of the largest strongly connected part of the graph of points."""
    m = len(battles.models)
    reach = np.eye(m, dtype=bool)
    has = battles.count > 0
    won, lost = has & (battles.score > 0), has & (battles.score < 1)
    reach[battles.first[won], battles.second[won]] = True
    reach[battles.second[lost], battles.first[lost]] = True
    for k in range(m):  # Warshall's closure
        reach |= reach[:, k : k + 1] & reach[k : k + 1, :]
    mutual = reach & reach.T
    largest = mutual[int(mutual.sum(1).argmax())]
    return [int(k) for k in np.flatnonzero(~largest)]


def _sandwich(
    battles: Battles, beta: NDArray[np.float64], inverse: NDArray[np.float64]
) -> tuple[NDArray[np.float64], float]:
    """Return the covariance and its degrees of freedom."""
    x, w = battles.design(), battles.weight
    n, k = battles.n_votes, len(battles.models) - 1 + battles.covariates.shape[1]
    p = _sigmoid(x @ beta)
    leverage = w * p * (1 - p) * np.einsum("rk,kl,rl->r", x, inverse, x)
    scores = (w * (battles.score - p) / (1 - np.minimum(leverage, 0.9)))[:, None] * x
    if battles.voter is None:
        meat, df = (scores * battles.count[:, None]).T @ scores, float(n - k)
    else:
        groups = int(battles.voter.max()) + 1
        sums = np.zeros((groups, x.shape[1]))
        np.add.at(sums, battles.voter, scores * battles.count[:, None])
        meat, df = groups / max(1, groups - 1) * (sums.T @ sums), float(groups - 1)
    return inverse @ meat @ inverse, max(df, 1.0)


def _hessian(
    battles: Battles, totals: NDArray[np.float64], beta: NDArray[np.float64], penalty: float
) -> NDArray[np.float64]:
    """Return [B, K, K] negative second derivatives; the sum of the ratings, which no vote fixes, gets a curvature."""
    x, m = battles.design(), len(battles.models)
    k = x.shape[1]
    found = np.zeros((len(totals), k * k))
    for start in range(0, len(x), CHUNK_ROWS):
        part = x[start : start + CHUNK_ROWS]
        p = _sigmoid(beta @ part.T)
        products = (part[:, :, None] * part[:, None, :]).reshape(len(part), k * k)
        found += (totals[:, start : start + CHUNK_ROWS] * p * (1 - p)) @ products
    found = found.reshape(-1, k, k) + penalty * np.eye(k)
    found[:, :m, :m] += totals.sum(1)[:, None, None] / m**2 + 1e-12
    return found


def _objective(
    x: NDArray[np.float64],
    score: NDArray[np.float64],
    totals: NDArray[np.float64],
    beta: NDArray[np.float64],
    penalty: float,
) -> NDArray[np.float64]:
    z = beta @ x.T
    likelihood = (totals * (score * z - np.logaddexp(0, z))).sum(1)
    return np.asarray(likelihood - penalty / 2 * (beta**2).sum(1))


def _sigmoid(z: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(0.5 * (1 + np.tanh(z / 2)))

"""Ratings of the arena: coverage of their intervals, and equality with logistic regression.

    python bench/evals/arena.py --save
    python bench/evals/arena.py --quick     # arenas with repeating voters, and with the covariate

Arenas of 6 models and 1,000 votes with 20 % to 30 % ties; share of 95 % intervals that cover the true rating. The
intervals of the Hessian, which take a tie for a whole vote and votes for independent, are the baseline. The arenas are
drawn with independent votes, with 200 voters who repeat themselves in half of their votes, with the covariate of length,
and with pairs by information.
"""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))
from _run import claim, parse, sized

from whorl.evals.arena.battles import Battles, group_rows
from whorl.evals.arena.bootstrap import bootstrap
from whorl.evals.arena.bradley_terry import Ratings, fit, unrated
from whorl.evals.arena.pair_sampling import pair_probabilities
from whorl.evals.statistics.distributions import t_quantile

MODELS, VOTES, DRAWS = 6, 1000, 300
NAMES = tuple("abcdef")
Rng = np.random.Generator


def battles(
    rng: Rng,
    n: int,
    truth: NDArray[np.float64],
    *,
    length: float = 0.0,
    voters: int = 0,
    pairs: NDArray[np.float64] | None = None,
) -> Battles:
    """Return n votes whose expected score is the Bradley-Terry probability.

    length: effect of a standard deviation of length. voters: the votes of one are correlated. pairs: [P]
    probabilities.
    """
    all_pairs = np.array(list(combinations(range(MODELS), 2)))
    drawn = rng.choice(len(all_pairs), n, p=pairs)
    voter = None
    if voters:  # each compares one pair
        voter = np.arange(n) % voters
        drawn = rng.choice(len(all_pairs), voters)[voter]
    first, second = all_pairs[drawn].T
    weight = np.ones(n) if pairs is None else 1 / (len(all_pairs) * pairs[drawn])
    gap = truth[first] - truth[second]
    covariates = np.zeros((n, 0))
    if length:
        covariates = rng.normal(size=(n, 1))
        gap = gap + length * covariates[:, 0]
    score = 1 / (1 + np.exp(-gap))
    u = rng.random(n)
    if voters:
        # Half of the votes repeat the voter's preference for the pair. The probability over voters stays the score.
        u = np.where(rng.random(n) < 0.5, rng.random((voters, len(all_pairs)))[voter, drawn], u)
    tie = 0.3 * 2 * np.minimum(score, 1 - score)
    outcome = np.where(u < score - tie / 2, 1.0, np.where(u < score + tie / 2, 0.5, 0.0))
    found = Battles(
        NAMES, first, second, outcome, weight, np.ones(n), covariates, ("length",) * (length != 0), voter
    )
    return found if voters or length else group_rows(found)[0]


def covered(center: NDArray[np.float64], half: NDArray[np.float64], truth: NDArray[np.float64]) -> float:
    return float((np.abs(center - truth) <= half).mean())


def coverage(rng: Rng, arenas: int, kind: str) -> dict[str, float]:
    """Return the shares of intervals that cover: ratings, their differences, bootstrap, Hessian."""
    shares: dict[str, list[float]] = {"sandwich": [], "differences": [], "bootstrap": [], "Hessian": []}
    upper = np.triu_indices(MODELS, 1)
    while len(shares["sandwich"]) < arenas:
        truth = rng.normal(size=MODELS)
        truth -= truth.mean()
        kwargs: dict[str, object] = {}
        if kind == "length":
            kwargs["length"] = 0.5
        if kind == "voters":
            kwargs["voters"] = 200
        if kind == "information":
            pilot = battles(rng, 200, truth)
            kwargs["pairs"] = pair_probabilities(pilot, "information")
        drawn = battles(rng, VOTES, truth, **kwargs)  # type: ignore[arg-type]
        if unrated(drawn):
            continue
        r: Ratings = fit(drawn)
        q = t_quantile(0.95, r.df)
        variances = np.diag(r.covariance)[:MODELS]
        shares["sandwich"].append(covered(r.ratings, q * np.sqrt(variances), truth))
        gaps = (r.ratings[:, None] - r.ratings)[upper]
        shares["differences"].append(
            covered(gaps, q * r.difference_se()[upper], (truth[:, None] - truth)[upper])
        )
        shares["Hessian"].append(covered(r.ratings, q * np.sqrt(np.diag(r.inverse_hessian)[:MODELS]), truth))
        if kind in ("independent", "voters") and len(shares["bootstrap"]) < arenas:
            low, high = bootstrap(drawn, rng, DRAWS).interval()[:MODELS].T
            shares["bootstrap"].append(float(((low <= truth) & (truth <= high)).mean()))
    return {name: float(np.mean(each)) for name, each in shares.items() if each}


def peer_gap(rng: Rng, arenas: int) -> float:
    """Return the largest difference of ratings and effects from LogisticRegression of scikit-learn."""
    from sklearn.linear_model import LogisticRegression

    worst = 0.0
    for k in range(arenas):
        truth, penalty = rng.normal(size=MODELS), (0.0, 0.5)[k % 2]
        drawn = battles(rng, VOTES, truth, length=0.5 * (k % 4 > 1))
        r, x = fit(drawn, penalty), drawn.design()
        # The ratings sum to 0; without a penalty only the others are free.
        basis = np.eye(x.shape[1]) if penalty else np.delete(np.eye(x.shape[1]), 0, 1)
        y = np.repeat([1.0, 0.0], len(x))
        weight = np.concatenate([drawn.count * drawn.score, drawn.count * (1 - drawn.score)])
        model = LogisticRegression(
            C=1 / penalty if penalty else np.inf, fit_intercept=False, tol=1e-12, max_iter=10_000,
            solver="newton-cholesky",
        )  # fmt: skip
        used = weight > 0
        model.fit((np.concatenate([x, x]) @ basis)[used], y[used], sample_weight=weight[used])
        theirs = basis @ model.coef_[0]
        theirs[:MODELS] -= theirs[:MODELS].mean()
        worst = max(worst, float(np.abs(np.concatenate([r.ratings, r.effects]) - theirs).max()))
    return worst


def main() -> int:
    """Print a line of JSON for each claim."""
    args = parse(__doc__, lambda p: p.add_argument("--seed", type=int, default=7), quick={"quick": True})
    runs = sized(1000, 20)
    for number, kind in enumerate(("independent", "voters", "length", "information")):
        if args.quick and not args.smoke and kind not in ("voters", "length"):
            continue
        shares = coverage(np.random.default_rng([args.seed, number]), runs, kind)
        peer = shares.pop("Hessian")
        for name, share in shares.items():
            claim(
                f"95 % intervals of ratings in {runs} simulated arenas, {kind}, {name}", ours=share, peer=peer,
                unit="share", ratio=abs(share - 0.95), bar=0.02, ok=abs(share - 0.95) <= 0.02, quick=args.quick,
                peer_name="intervals of the Hessian", variant=f"coverage {kind} {name}",
            )  # fmt: skip
    gap = peer_gap(np.random.default_rng(args.seed), sized(40, 4))
    claim(
        "Bradley-Terry against logistic regression", ours=gap, peer=0.0, unit="largest difference", ratio=gap,
        bar=1e-6, ok=gap <= 1e-6, peer_name="LogisticRegression", variant="Bradley-Terry", quick=args.quick,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Error rates of the statistics: coverage of arena ratings, false and found differences, pass@k, Bradley-Terry.

    python bench/evals/error_rates.py --save

Ratings: arenas of 6 models and 1,000 votes with 20 % to 30 % ties; share of 95 % intervals that cover the true rating. The
intervals of the Hessian, which take a tie for a whole vote and votes for independent, are the baseline. The arenas are
drawn with independent votes, with 200 voters who repeat themselves in half of their votes, with the covariate of length,
and with pairs by information.

Comparisons: two models on the same items, compared at 95 %. Scores of items of one cluster are correlated.
Power: the true difference is the one that `detectable_difference` states for 80 %.
"""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))
from _run import claim, parse, sized

from whorl.evals.arena.battles import Battles, collapse
from whorl.evals.arena.bootstrap import bootstrap
from whorl.evals.arena.bradley_terry import Ratings, fit, unrated
from whorl.evals.arena.pair_sampling import pair_probabilities
from whorl.evals.results import ItemResult
from whorl.evals.statistics.comparison import compare
from whorl.evals.statistics.distributions import t_quantile
from whorl.evals.statistics.pass_at_k import pass_at_k
from whorl.evals.statistics.power import detectable_difference

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
        # Half of the votes repeat the voter's opinion of the pair. The probability over voters stays the score.
        u = np.where(rng.random(n) < 0.5, rng.random((voters, len(all_pairs)))[voter, drawn], u)
    tie = 0.3 * 2 * np.minimum(score, 1 - score)
    outcome = np.where(u < score - tie / 2, 1.0, np.where(u < score + tie / 2, 0.5, 0.0))
    found = Battles(
        NAMES, first, second, outcome, weight, np.ones(n), covariates, ("length",) * (length != 0), voter
    )
    return found if voters or length else collapse(found)


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


def item_scores(
    rng: Rng, difference: float, clusters: int, size: int, binary: bool
) -> tuple[list[ItemResult], list[ItemResult]]:
    """Return results of two models on clusters of `size` items; the first is better by `difference`."""
    n = clusters * size
    name = np.repeat(np.arange(clusters), size)
    item, shared = rng.normal(size=n), rng.normal(size=(3, clusters))[:, name]
    latent = [0.7 * item + 0.5 * shared[0] + 0.6 * shared[k] + rng.normal(size=n) for k in (1, 2)]
    both = [(x > 0).astype(float) if binary else x for x in latent]
    both[0] = both[0] + difference
    made = []
    for one in both:
        rows = enumerate(zip(one, name, strict=True))
        made.append(
            [
                ItemResult(str(i), {"m": float(x)}, "right", cluster=f"c{g}" if size > 1 else "")
                for i, (x, g) in rows
            ]
        )
    return made[0], made[1]


def false_findings(
    rng: Rng, runs: int, clusters: int, size: int, binary: bool, by_cluster: bool = True
) -> float:
    """Return the share of comparisons of equal models with the verdict better or worse."""
    found = 0
    for _ in range(runs):
        a, b = item_scores(rng, 0.0, clusters, size, binary)
        if not by_cluster:
            a, b = ([ItemResult(r.item, r.scores, r.outcome) for r in each] for each in (a, b))
        found += compare(a, b, "m").verdict in ("better", "worse")
    return found / runs


def power(rng: Rng, runs: int, clusters: int, size: int) -> float:
    """Return the share of comparisons that find a difference which 80 % should."""
    own, shared = 2.0, 2 * 0.36  # variance of an item's difference: of its own, and of its cluster
    sd = float(np.sqrt(own + shared))
    effect = (own + size * shared) / (own + shared)
    # Degrees of freedom are those of the clusters, so the quantiles are taken for so many independent items.
    difference = detectable_difference(sd * np.sqrt(effect / size), clusters)
    return float(
        np.mean(
            [
                compare(*item_scores(rng, difference, clusters, size, False), "m").verdict == "better"
                for _ in range(runs)
            ]
        )
    )


def pass_gap() -> float:
    """Return the largest difference of pass@k from the mean over all subsets, for up to 10 samples."""
    worst = 0.0
    for n in range(1, 11):
        for correct in range(n + 1):
            row = np.arange(n) < correct
            for k in range(1, n + 1):
                subsets = np.mean([row[list(s)].any() for s in combinations(range(n), k)])
                worst = max(worst, abs(float(pass_at_k(row[None, :], k)[0]) - float(subsets)))
    return worst


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


def claim_share(
    what: str, variant: str, ours: float, peer: float, low: float, high: float, peer_name: str
) -> None:
    middle = (low + high) / 2
    print(f"{what:<90} {ours:7.2%}  {peer_name} {peer:.2%}")
    claim(
        what, ours=ours, peer=peer, unit="share", ratio=abs(ours - middle), bar=round(high - middle, 4),
        ok=low <= ours <= high, peer_name=peer_name, variant=variant,
    )  # fmt: skip


def claim_gap(what: str, variant: str, gap: float, bar: float, peer_name: str) -> None:
    print(f"{what:<90} {gap:.1e}")
    claim(
        what, ours=gap, peer=0.0, unit="largest difference", ratio=gap, bar=bar, ok=gap <= bar, peer_name=peer_name,
        variant=variant,
    )  # fmt: skip


def main() -> int:
    """Print a line of JSON for each claim."""
    args = parse(__doc__, lambda p: p.add_argument("--seed", type=int, default=7))
    runs = sized(1000, 20)
    for number, kind in enumerate(("independent", "voters", "length", "information")):
        shares = coverage(np.random.default_rng([args.seed, number]), runs, kind)
        peer = shares.pop("Hessian")
        for name, share in shares.items():
            what = f"95 % intervals of ratings in {runs} simulated arenas, {kind}, {name}"
            claim_share(what, f"coverage {kind} {name}", share, peer, 0.93, 0.97, "intervals of the Hessian")
    for number, (clusters, size, binary) in enumerate(
        ((300, 1, False), (300, 1, True), (60, 5, False), (60, 5, True))
    ):
        seed = [args.seed, 10 + number]
        share = false_findings(np.random.default_rng(seed), runs, clusters, size, binary)
        naive = false_findings(np.random.default_rng(seed), runs, clusters, size, binary, by_cluster=False)
        score = "scores of 0 and 1" if binary else "real scores"
        what = f"equal models called different, {clusters} clusters of {size}, {score}"
        claim_share(
            what,
            f"false {clusters}x{size}{' binary' * binary}",
            share,
            naive,
            0.035,
            0.065,
            "without clusters",
        )
    for number, (clusters, size) in enumerate(((200, 1), (60, 5))):
        share = power(np.random.default_rng([args.seed, 20 + number]), runs, clusters, size)
        what = f"difference planted at 80 % power found, {clusters} clusters of {size}"
        claim_share(what, f"power {clusters}x{size}", share, 0.8, 0.77, 0.83, "planned")
    claim_gap(
        "pass@k against the mean over all subsets, up to 10 samples",
        "pass@k",
        pass_gap(),
        1e-12,
        "all subsets",
    )
    gap = peer_gap(np.random.default_rng(args.seed), sized(40, 4))
    claim_gap("Bradley-Terry against logistic regression", "Bradley-Terry", gap, 1e-6, "LogisticRegression")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Error rates of comparisons: equal models called different, planted differences found, and pass@k.

    python bench/evals/error_rates.py --save
    python bench/evals/error_rates.py --quick     # half of the cases, with equal numbers of comparisons

Comparisons: two models on the same items, compared at 95 %. Scores of items of one cluster are correlated.
Power: the true difference is the one that `detectable_difference` states for 80 %.
"""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from _run import parse, sized
from _shares import claim_gap, claim_share

from whorl.evals.results import ItemResult
from whorl.evals.statistics.comparison import compare
from whorl.evals.statistics.pass_at_k import pass_at_k
from whorl.evals.statistics.power import detectable_difference

Rng = np.random.Generator


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
    own, shared = 2.0, 2 * 0.36  # variances of an item's difference: its part, and the cluster's
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


def main() -> int:
    """Print a line of JSON for each claim."""
    args = parse(__doc__, lambda p: p.add_argument("--seed", type=int, default=7), quick={"quick": True})
    runs, some = sized(1000, 20), args.quick and not args.smoke
    for number, (clusters, size, binary) in enumerate(
        ((300, 1, False), (300, 1, True), (60, 5, False), (60, 5, True))
    ):
        if some and binary != (size == 1):
            continue
        seed = [args.seed, 10 + number]
        share = false_findings(np.random.default_rng(seed), runs, clusters, size, binary)
        naive = share  # of independent items
        if size > 1:
            naive = false_findings(
                np.random.default_rng(seed), runs, clusters, size, binary, by_cluster=False
            )
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
            args.quick,
        )
    for number, (clusters, size) in enumerate(((200, 1), (60, 5))):
        if some and size == 1:
            continue
        share = power(np.random.default_rng([args.seed, 20 + number]), runs, clusters, size)
        what = f"difference planted at 80 % power found, {clusters} clusters of {size}"
        claim_share(what, f"power {clusters}x{size}", share, 0.8, 0.77, 0.83, "planned", args.quick)
    claim_gap(
        "pass@k against the mean over all subsets, up to 10 samples",
        "pass@k",
        pass_gap(),
        1e-12,
        "all subsets",
        args.quick,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

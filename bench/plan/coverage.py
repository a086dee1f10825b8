"""Coverage of the 90 % intervals of a law: synthetic studies with noise, at ten times their compute.

    python bench/plan/coverage.py              # 200 studies, about two minutes
    python bench/plan/coverage.py --studies 20

Each study has 30 runs (6 sizes x 5 amounts of data) of the law of arXiv:2404.10102, whose losses have 0.5 % noise. The
claim: the interval of the best size at ten times the FLOPs of the largest run has the true one in 85 to 95 % of them.
The script also fits the runs without noise; their constants must be right to 1e-6.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse

from whorl.plan.laws.fits import fit_law
from whorl.plan.laws.law import MORE, ScalingLaw
from whorl.plan.laws.points import Points
from whorl.plan.laws.surface import fit_surface

TRUE = ScalingLaw(1.8172, 482.01, 0.3478, 2085.43, 0.3658)
NOISE = 0.005


def main() -> None:
    a = parse(
        __doc__, lambda parser: parser.add_argument("--studies", type=int, default=200), smoke={"studies": 4}
    )
    n, d = map(np.ravel, np.meshgrid(np.geomspace(1e6, 3e7, 6), np.geomspace(2e7, 1e9, 5)))
    clean = Points(n, d, 6 * n * d, TRUE.loss(n, d), tuple(map(str, range(len(n)))))
    error = float(abs(fit_surface(clean) / np.array(TRUE.constants) - 1).max())
    flops, rng, intervals = MORE * float(clean.flops.max()), np.random.default_rng(0), []
    for study in range(a.studies):
        loss = clean.loss * np.exp(NOISE * rng.standard_normal(len(n)))
        points = Points(n, d, clean.flops, loss, clean.names)
        intervals.append(fit_law(points, seed=study).law.optimum(flops).parameters_interval)
    best = TRUE.optimum(flops).parameters
    covered = sum(low <= best <= high for low, high in intervals) / len(intervals)
    widths = sorted(high / low for low, high in intervals)
    claim(
        f"90 % intervals of the best size at {MORE:g} x the compute, over studies with {NOISE:.1%} noise", ours=covered,
        peer=0.9, peer_name="nominal", unit="coverage", ratio=covered, bar=0.85,
        ok=0.85 <= covered <= 0.95 and error <= 1e-6, quick=a.studies < 200,
        samples=[{"width": widths[len(widths) // 2], "worst error of a constant without noise": error}],
    )  # fmt: skip


if __name__ == "__main__":
    main()

"""Runs of a known scaling law."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from whorl.plan.laws.law import ScalingLaw
from whorl.plan.laws.points import Points

PUBLISHED = (1.8172, 482.01, 0.3478, 2085.43, 0.3658)  # E, A, alpha, B, beta of arXiv:2404.10102
TRUE = ScalingLaw(*PUBLISHED)


def grid(sizes: int = 6, amounts: int = 5, noise: float = 0.0, seed: int = 0) -> Points:
    n, d = map(np.ravel, np.meshgrid(np.geomspace(1e6, 3e7, sizes), np.geomspace(2e7, 1e9, amounts)))
    drawn = np.exp(noise * np.random.default_rng(seed).standard_normal(len(n)))
    return Points(n, d, 6 * n * d, TRUE.loss(n, d) * drawn, tuple(f"run {i}" for i in range(len(n))))


def write(path: Path, points: Points, **columns: Any) -> Path:
    heads = ["parameters", "tokens", "loss", *columns]
    rows = zip(points.parameters, points.data, points.loss, *columns.values(), strict=True)
    path.write_text("\n".join([",".join(heads), *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path

"""Simulated votes between four models of known ratings."""

from __future__ import annotations

import numpy as np

from whorl.evals.arena.battles import Vote

TRUTH = np.array([-1.0, -0.2, 0.3, 0.9])


def votes(rng: np.random.Generator, n: int, *, length: float = 0.0, ties: float = 0.3) -> list[Vote]:
    """Return n votes between models m0 to m3. length: effect of the relative difference of lengths."""
    found = []
    for i in range(n):
        a, b = (int(k) for k in rng.permutation(len(TRUTH))[:2])
        la, lb = (int(k) for k in rng.integers(10, 500, 2))
        score = 1 / (1 + np.exp(-(TRUTH[a] - TRUTH[b] + length * (la - lb) / (la + lb))))
        tie, u = ties * 2 * min(score, 1 - score), rng.random()
        choice = "left" if u < score - tie / 2 else "tie" if u < score + tie / 2 else "right"
        found.append(Vote(str(i), f"m{a}", f"m{b}", choice, left_length=la, right_length=lb))  # type: ignore[arg-type]
    return found

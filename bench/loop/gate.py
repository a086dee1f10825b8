"""The gate of a promotion on simulated votes: how often equal models pass, and how soon a better one does.

    python bench/loop/gate.py [--runs 1000] [--votes 1000]

A run is a sequence of blind votes, and the test is read after each of them. With equal models a vote is a fair coin, and a
pass at any vote is a false promotion: at most 5 % of the runs. A challenger that wins 60 % of the votes has to pass within
the votes. The peer is a test for a fixed number of votes, also read after each of them (one-sided exact binomial test,
p <= 0.05), as on a page that shows a p-value.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binom

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse

from whorl.loop.gate import ALPHA, GRID, win_rate_interval

BAR_EQUAL, BAR_BETTER, WIN_RATE = 0.05, 0.95, 0.6


def passes(wins: np.ndarray, votes: np.ndarray) -> np.ndarray:
    """Return the number of votes at which each run passes, 0 for never. wins: [runs, votes], cumulative."""
    grid = np.log(2 * GRID)[:, None], np.log(2 * (1 - GRID))[:, None]
    found = []
    for own in wins:
        logs = own * grid[0] + (votes - own) * grid[1]
        over = np.logaddexp.reduce(logs, 0) - np.log(len(GRID)) >= -np.log(ALPHA)
        found.append(int(votes[over.argmax()]) if over.any() else 0)
    return np.array(found)


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--runs", type=int, default=1000)
        parser.add_argument("--votes", type=int, default=1000)

    a = parse(__doc__, arguments, smoke={"runs": 50})
    rng, votes = np.random.default_rng(0), np.arange(1, a.votes + 1)
    figures: dict[str, Any] = {}
    for name, rate in (("equal", 0.5), ("better", WIN_RATE)):
        wins = (rng.random((a.runs, a.votes)) < rate).cumsum(1)
        found = passes(wins, votes)
        repeated = (binom.sf(wins - 1, votes, 0.5) <= ALPHA).any(1)
        bounds = [
            win_rate_interval(int(w), int(n - w))
            for w, n in zip(wins[:, -1], votes[-1:].repeat(a.runs), strict=True)
        ]
        inside = np.mean([low <= rate <= high for low, high in bounds])
        median = float(np.median(found[found > 0])) if found.any() else 0.0
        figures[name] = {
            "promoted": float((found > 0).mean()), "median votes": median,
            "promoted by a repeated binomial test": float(repeated.mean()), "interval holds": float(inside),
        }  # fmt: skip
        print(name, figures[name], flush=True)
    equal, better = figures["equal"], figures["better"]
    claim(
        f"equal models promoted within {a.votes:,} votes, {a.runs:,} runs", ours=equal["promoted"],
        peer=equal["promoted by a repeated binomial test"], peer_name="binomial test after each vote", unit="share of runs",
        ratio=equal["promoted"], bar=BAR_EQUAL, ok=equal["promoted"] <= BAR_EQUAL and better["promoted"] >= BAR_BETTER,
        samples=[figures],
    )  # fmt: skip


if __name__ == "__main__":
    main()

"""IMPALA with 2 free-running actors on CartPole-v1: does it solve it, and how old are the weights that acted?

    .venv/bin/python bench/agents_impala.py            # 5 seeds

Solved: a greedy evaluation of 20 episodes of 475 or more at the end of training, or on the way to it (looked at
every 10,000 steps).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from _claim import claim

from whorl.agents.config import preset
from whorl.agents.networks import ActorCritic
from whorl.agents.train import Progress, Stop, evaluate, train

BAR = 475.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200_000)
    a = parser.parse_args()
    rows = []
    for seed in range(a.seeds):
        config = preset("impala", "CartPole-v1", steps=a.steps, seed=seed)
        lags, solved = [], {}

        def observe(progress: Progress, networks: ActorCritic) -> None:
            lags.append(progress.metrics["lag_mean"])  # noqa: B023
            if progress.steps % 10_000 < config.record_steps:  # noqa: B023
                found = float(np.mean(evaluate(networks, "CartPole-v1", 20, 10_000 + seed)))  # noqa: B023
                solved["best"] = max(found, solved.get("best", 0.0))  # noqa: B023
                if found >= BAR:
                    solved.update(steps=progress.steps, seconds=progress.seconds)  # noqa: B023
                    raise Stop

        networks = train(config, observe)
        final = float(np.mean(evaluate(networks, "CartPole-v1", 20, 10_000 + seed)))
        rows.append({**solved, "final": final, "lag": round(float(np.mean(lags)), 2), "lag_max": max(lags)})
        print(f"seed {seed}: {rows[-1]}", flush=True)
    n = sum("steps" in row or row["final"] >= BAR for row in rows)
    claim(
        "IMPALA with 2 free-running actors solves CartPole-v1", ours=n, peer=len(rows), unit="seeds", ratio=n / len(rows),
        bar=1.0, ok=n == len(rows), samples=rows,
    )  # fmt: skip


if __name__ == "__main__":
    main()

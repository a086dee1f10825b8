"""IMPALA with 2 free-running actors on CartPole-v1: does it solve it, and how old are the weights that acted?

    .venv/bin/python bench/agents/impala.py            # 5 seeds

Solved: a greedy evaluation of 20 episodes of 475 or more at the end of training. When it was first reached on the way
(looked at every 10,000 steps) is told too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim

from whorl.agents.config import make_config
from whorl.agents.networks import ActorCritic
from whorl.agents.train import TrainingProgress, evaluate, train

BAR, LOOK = 475.0, 10_000


def one(seed: int, steps: int) -> dict[str, float]:
    """One run: where it was solved, the last evaluation, and how many versions behind the weights that acted were."""
    config = make_config("impala", "CartPole-v1", steps=steps, seed=seed)
    lags: list[float] = []
    solved: dict[str, float] = {}

    def observe(progress: TrainingProgress, networks: ActorCritic) -> None:
        lags.append(progress.metrics["lag_mean"])
        if progress.steps % LOOK < config.rollout_steps:
            found = float(np.mean(evaluate(networks, "CartPole-v1", 20, 10_000 + seed)))
            if found >= BAR and "steps" not in solved:
                solved.update(steps=progress.steps, seconds=round(progress.seconds, 2))

    networks = train(config, observe)
    final = float(np.mean(evaluate(networks, "CartPole-v1", 20, 10_000 + seed)))
    return {**solved, "final": final, "lag": round(float(np.mean(lags)), 2), "lag_max": max(lags)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200_000)
    a = parser.parse_args()
    rows = []
    for seed in range(a.seeds):
        rows.append(one(seed, a.steps))
        print(f"seed {seed}: {rows[-1]}", flush=True)
    n = sum(row["final"] >= BAR for row in rows)
    claim(
        "IMPALA with 2 free-running actors solves CartPole-v1", ours=n, peer=len(rows), unit="seeds", ratio=n / len(rows),
        bar=1.0, ok=n == len(rows), samples=rows,
    )  # fmt: skip


if __name__ == "__main__":
    main()

"""IMPALA with 2 asynchronous actors on CartPole-v1: the number of solved seeds, and the policy lag.

    python bench/agents/impala.py            # 5 seeds
    python bench/agents/impala.py --quick    # 2 seeds

A seed is solved if a greedy evaluation of 20 episodes at the end of training has a mean return of at least 475. The output
also contains the first of the evaluations during training (every 10,000 steps) that reached it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse

from whorl.agents.config import make_config
from whorl.agents.networks import ActorCritic
from whorl.agents.train import TrainingProgress, evaluate, train

BAR, EVALUATE_EVERY = 475.0, 10_000


def train_seed(seed: int, steps: int) -> dict[str, float]:
    """One run: the step at which it was solved, the final evaluation, and the policy lag in versions."""
    config = make_config("impala", "CartPole-v1", steps=steps, seed=seed)
    lags: list[float] = []
    solved: dict[str, float] = {}

    def observe(progress: TrainingProgress, networks: ActorCritic) -> None:
        lags.append(progress.metrics["policy_lag/mean"])
        if progress.steps % EVALUATE_EVERY < config.rollout_steps:
            found = float(np.mean(evaluate(networks, "CartPole-v1", 20, 10_000 + seed)))
            if found >= BAR and "steps" not in solved:
                solved.update(steps=progress.steps, seconds=round(progress.seconds, 2))

    networks = train(config, observe)
    final = float(np.mean(evaluate(networks, "CartPole-v1", 20, 10_000 + seed)))
    return {**solved, "final": final, "lag": round(float(np.mean(lags)), 2), "lag_max": max(lags)}


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=5)
        parser.add_argument("--steps", type=int, default=200_000)

    args = parse(__doc__, arguments, smoke={"seeds": 1, "steps": 600}, quick={"seeds": 2})
    rows = []
    for seed in range(args.seeds):
        rows.append(train_seed(seed, args.steps))
        print(f"seed {seed}: {rows[-1]}", flush=True)
    n = sum(row["final"] >= BAR for row in rows)
    claim(
        "IMPALA with 2 asynchronous actors solves CartPole-v1", ours=n, peer=len(rows), peer_name="all seeds",
        unit="seeds", ratio=n / len(rows),
        bar=1.0, ok=n == len(rows), samples=rows, quick=args.quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()

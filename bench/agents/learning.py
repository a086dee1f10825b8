"""Greedy returns of 100 episodes after fixed numbers of steps: interquartile mean of the seeds with its interval.

python bench/agents/learning.py                    # five seeds each; about an hour on 2 cores
python bench/agents/learning.py --only sac-Pendulum-v1 --seeds 3
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse

from whorl.agents.methods.registration import make_config
from whorl.agents.seed_statistics import summarize_seeds
from whorl.agents.task import evaluate, train

# method, environment, steps, least return
BARS = [
    ("sac", "Pendulum-v1", 10_000, -170.0), ("td3", "Pendulum-v1", 20_000, -170.0),
    ("ddpg", "Pendulum-v1", 20_000, -170.0), ("dqn", "CartPole-v1", 50_000, 475.0),
    ("dqn", "Acrobot-v1", 100_000, -85.0), ("a3c", "CartPole-v1", 200_000, 475.0),
    ("reinforce", "CartPole-v1", 400_000, 475.0), ("trpo", "CartPole-v1", 100_000, 475.0),
]  # fmt: skip


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=5)
        parser.add_argument("--only", default="", help="METHOD-ENVIRONMENT")
        parser.add_argument("--scale", type=float, default=1.0, help="factor on the steps")

    args = parse(__doc__, arguments, smoke={"seeds": 1, "scale": 0.06})
    torch.set_num_threads(1)
    for method, environment, steps, bar in BARS:
        variant = f"{method}-{environment}"
        if args.only not in ("", variant):
            continue
        scores, began = [], time.perf_counter()
        for seed in range(args.seeds):
            config = make_config(method, environment, steps=round(steps * args.scale), seed=seed)
            networks = train(config)
            scores.append(float(np.mean(evaluate(config, networks, 100, 10_000 + seed))))
        found = summarize_seeds([scores], np.random.default_rng(0))
        seconds = (time.perf_counter() - began) / args.seeds
        print(f"{variant}: {found} after {steps:,} steps, {seconds:.0f} s per seed", flush=True)
        claim(
            f"greedy return of {method} on {environment} after {steps:,} steps", ours=found.mean, peer=bar, unit="return",
            ratio=found.mean / bar, bar=bar, ok=found.mean >= bar, variant=variant, samples=scores,
        )  # fmt: skip


if __name__ == "__main__":
    main()

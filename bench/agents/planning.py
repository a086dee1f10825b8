"""MPC on Pendulum-v1: on true dynamics against learned policies, and the steps that a learned model needs against SAC.

python bench/agents/planning.py                        # five seeds; about an hour and a half on 2 cores
python bench/agents/planning.py --only true            # an hour: three methods are trained for five seeds
python bench/agents/planning.py --only learned --seeds 2

true      greedy returns of 100 episodes: the planner, and SAC, TD3 and DDPG after as many steps as in `learning.py`
learned   greedy returns of 10 episodes every 500 steps: MPC on a learned model, and SAC
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse

from whorl.agents.methods.method import MethodConfig
from whorl.agents.methods.registration import make_config
from whorl.agents.seed_statistics import SeedSummary, summarize_seeds
from whorl.agents.task import TrainingProgress, evaluate, open_method, train

LEARNED = {"sac": 10_000, "td3": 20_000, "ddpg": 20_000}
STEPS, EVERY, BAR = 3_000, 500, -250.0
ENVIRONMENT = "Pendulum-v1"


def summary(scores: list[float]) -> SeedSummary:
    return summarize_seeds([scores], np.random.default_rng(0))


def mean_return(config: MethodConfig, networks: Any, episodes: int) -> float:
    """The mean greedy return. Episodes of a seed begin in the same states for all methods."""
    return float(np.mean(evaluate(config, networks, episodes, 10_000 + config.seed)))


def curve(method: str, seed: int, steps: int, episodes: int, **changes: Any) -> list[float]:
    """Return the greedy return after every 500 steps."""
    config, found = make_config(method, ENVIRONMENT, steps=steps, seed=seed, **changes), list[float]()

    def observe(progress: TrainingProgress, networks: Any) -> None:
        if progress.steps % EVERY < config.rollout_steps:
            found.append(mean_return(config, networks, episodes))

    train(config, observe)
    return found


def first_above(returns: list[float]) -> int:
    """Return the steps after which the return is -250 or more for the first time; one interval after the end without."""
    return EVERY * (1 + next((n for n, x in enumerate(returns) if x >= BAR), len(returns)))


def bench_true(seeds: int, scale: float, episodes: int) -> None:
    scores: dict[str, list[float]] = {"mpc": [], **{name: [] for name in LEARNED}}
    for seed in range(seeds):
        config = make_config("mpc", ENVIRONMENT, seed=seed, dynamics="true")
        scores["mpc"].append(mean_return(config, open_method(config)[1], episodes))
        for name, steps in LEARNED.items():
            config = make_config(name, ENVIRONMENT, seed=seed, steps=max(1_100, round(steps * scale)))
            scores[name].append(mean_return(config, train(config), episodes))
        print(f"seed {seed}: " + ", ".join(f"{name} {x[-1]:.1f}" for name, x in scores.items()), flush=True)
    means = {name: summary(each).mean for name, each in scores.items()}
    ours, best = means.pop("mpc"), max(means, key=lambda name: means[name])
    claim(
        f"greedy return on {ENVIRONMENT} of MPC on true dynamics", ours=ours, peer=means[best], peer_name=best,
        unit="return", ratio=ours - means[best], bar=0.0, ok=ours >= means[best], variant="true", samples=[scores],
    )  # fmt: skip


def bench_learned(seeds: int, scale: float, episodes: int) -> None:
    steps = max(EVERY, round(STEPS * scale))
    curves: dict[str, list[list[float]]] = {"mpc": [], "sac": []}
    for seed in range(seeds):
        for name, each in curves.items():
            each.append(curve(name, seed, steps, episodes))
            print(f"seed {seed}, {name}: " + ", ".join(f"{x:.0f}" for x in each[-1]), flush=True)
    ends = {name: summary([each[-1] for each in found]).mean for name, found in curves.items()}
    needed = {
        name: summary([float(first_above(each)) for each in found]).mean for name, found in curves.items()
    }
    claim(
        f"greedy return on {ENVIRONMENT} of MPC on a learned model, {steps:,} steps", ours=ends["mpc"], peer=ends["sac"],
        peer_name="sac", unit="return", ratio=ends["mpc"] - BAR, bar=0.0, ok=ends["mpc"] >= BAR, variant="learned",
        samples=[curves],
    )  # fmt: skip
    claim(
        f"steps until a greedy return of {BAR:g} on {ENVIRONMENT}", ours=needed["mpc"], peer=needed["sac"], peer_name="sac",
        unit="steps", ratio=needed["sac"] / needed["mpc"], bar=1.0, ok=needed["mpc"] < needed["sac"], variant="steps",
        samples=[needed],
    )  # fmt: skip


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=5)
        parser.add_argument("--only", choices=("", "true", "learned"), default="")
        parser.add_argument("--scale", type=float, default=1.0, help="factor on the steps")
        parser.add_argument("--episodes", type=int, default=100, help="of `true`; a tenth of `learned`")

    args = parse(__doc__, arguments, smoke={"seeds": 1, "scale": 0.05, "episodes": 10})
    torch.set_num_threads(1)
    if args.only != "learned":
        bench_true(args.seeds, args.scale, args.episodes)
    if args.only != "true":
        bench_learned(args.seeds, args.scale, max(1, args.episodes // 10))


if __name__ == "__main__":
    main()

"""SAC on HalfCheetah-v5 against Stable-Baselines3: greedy returns after equal steps and updates, seed by seed.

    python -m pip install stable-baselines3 'gymnasium[mujoco]'
    python bench/agents/half_cheetah.py                       # three seeds each, an hour on 2 cores
    python bench/agents/half_cheetah.py --updates-per-step 1

Both sides: one environment, two hidden layers of 256, minibatches of 256, learning rate 3e-4, 10,000 random steps, and an
update of policy and critics for every fourth step. A return is the mean of 10 greedy episodes. Each run has one core.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, smoke

from whorl.agents.methods.registration import make_config
from whorl.agents.seed_statistics import summarize_seeds
from whorl.agents.task import evaluate, train

ENVIRONMENT, EPISODES, BATCH, RATE, ROLLOUT = "HalfCheetah-v5", 10, 256, 3e-4, 8


def ours(steps: int, starts: int, updates_per_step: float, seed: int) -> tuple[float, float]:
    """Return the mean greedy return and the seconds of training."""
    torch.set_num_threads(1)
    config = make_config(
        "sac", ENVIRONMENT, steps=steps, seed=seed, hidden=(256, 256), batch_size=BATCH, learning_rate=RATE, n_envs=1,
        n_steps=ROLLOUT, learning_starts=starts, capacity=max(steps, 64), updates_per_step=updates_per_step,
        exploration={"random_steps": starts},
    )  # fmt: skip
    began = time.perf_counter()
    networks = train(config)
    seconds = time.perf_counter() - began
    return float(np.mean(evaluate(config, networks, EPISODES, 10_000 + seed))), seconds


def theirs(steps: int, starts: int, updates_per_step: float, seed: int) -> tuple[float, float]:
    import gymnasium
    from stable_baselines3 import SAC
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.monitor import Monitor

    torch.set_num_threads(1)
    model = SAC(
        "MlpPolicy", ENVIRONMENT, seed=seed, device="cpu", learning_rate=RATE, batch_size=BATCH, learning_starts=starts,
        buffer_size=steps, train_freq=ROLLOUT, gradient_steps=max(1, round(ROLLOUT * updates_per_step)),
    )  # fmt: skip
    began = time.perf_counter()
    model.learn(steps)
    seconds = time.perf_counter() - began
    environment = Monitor(gymnasium.make(ENVIRONMENT))
    environment.reset(seed=10_000 + seed)
    return float(
        np.mean(evaluate_policy(model, environment, EPISODES, return_episode_rewards=True)[0])
    ), seconds


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=3)
        parser.add_argument("--steps", type=int, default=300_000)
        parser.add_argument("--starts", type=int, default=10_000, help="random steps before the first update")
        parser.add_argument("--updates-per-step", type=float, default=0.25)

    args = parse(__doc__, arguments, smoke={"seeds": 1, "steps": 200, "starts": 100})
    missing = [name for name in ("mujoco", "stable_baselines3") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"skipped: needs {' and '.join(missing)} (pip install stable-baselines3 'gymnasium[mujoco]')")
        sys.exit(77)
    scores: dict[str, list[float]] = {"ours": [], "Stable-Baselines3": []}
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        runs = [
            (name, seed, pool.submit(run, args.steps, args.starts, args.updates_per_step, seed))
            for seed in range(args.seeds)
            for name, run in zip(scores, (ours, theirs), strict=True)
        ]
        for name, seed, run in runs:
            score, seconds = run.result()
            scores[name].append(score)
            print(f"{name}, seed {seed}: return {score:.0f}, {seconds:.0f} s", flush=True)
    for name, values in scores.items():
        print(f"{name}: {summarize_seeds([values], np.random.default_rng(0))}")
    mine, peer = (float(np.mean(values)) for values in scores.values())
    claim(
        f"mean greedy return of SAC on {ENVIRONMENT} after {args.steps:,} steps", ours=mine, peer=peer, unit="return",
        ratio=mine / peer, bar=1.0, ok=not smoke() and mine >= peer, peer_name="Stable-Baselines3", samples=[scores],
    )  # fmt: skip


if __name__ == "__main__":
    main()

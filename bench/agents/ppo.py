"""PPO on CartPole-v1 against Stable-Baselines3 with the tuned preset of its zoo: steps and seconds to two bars.

    python -m pip install stable-baselines3
    python bench/agents/ppo.py              # 5 seeds each, in turn
    python bench/agents/ppo.py --quick      # 2 seeds

The greedy bar is a greedy evaluation (20 episodes, after every 1,024 steps) of at least 475. The training bar is a mean of
475 over the last 100 returns during training. Time is training time: evaluations for the greedy bar are not counted, on
either side. Both plan for 100,000 steps, over which learning rate and clip range fall to 0 (ours: epochs too).
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, smoke

from whorl.agents.methods.registration import make_config
from whorl.agents.networks import ActorCritic
from whorl.agents.task import TrainingProgress, evaluate, train
from whorl.train.learner.loop import StopTraining

BAR, EVALUATE_EVERY, MAX_STEPS = 475.0, 1024, 100_000


def run_ours(seed: int, max_steps: int) -> dict[str, tuple[int, float]]:
    marks: dict[str, tuple[int, float]] = {}
    evaluation_seconds = 0.0

    def observe(progress: TrainingProgress, networks: ActorCritic) -> None:
        nonlocal evaluation_seconds
        seconds = progress.seconds - evaluation_seconds
        if "greedy" not in marks and progress.steps % EVALUATE_EVERY == 0:
            began = time.perf_counter()
            if np.mean(evaluate(networks, "CartPole-v1", 20, 10_000 + seed)) >= BAR:
                marks["greedy"] = (progress.steps, seconds)
            evaluation_seconds += time.perf_counter() - began
        if "training" not in marks and len(progress.returns) == 100 and progress.mean_return >= BAR:
            marks["training"] = (progress.steps, seconds)
        if len(marks) == 2:
            raise StopTraining

    train(make_config("ppo", "CartPole-v1", steps=max_steps, seed=seed), observe)
    return marks


def run_peer(seed: int, max_steps: int) -> dict[str, tuple[int, float]]:
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    marks: dict[str, tuple[int, float]] = {}

    class BarCallback(BaseCallback):
        evaluation_seconds, began = 0.0, 0.0

        def _on_training_start(self) -> None:
            self.began = time.perf_counter()

        def _on_step(self) -> bool:
            steps, seconds = self.num_timesteps, time.perf_counter() - self.began - self.evaluation_seconds
            if "greedy" not in marks and steps % EVALUATE_EVERY == 0:
                before = time.perf_counter()
                mean, _ = evaluate_policy(self.model, evaluation, 20, deterministic=True)
                if mean >= BAR:
                    marks["greedy"] = (steps, seconds)
                self.evaluation_seconds += time.perf_counter() - before
            buffer = self.model.ep_info_buffer
            if "training" not in marks and len(buffer) == 100 and np.mean([e["r"] for e in buffer]) >= BAR:
                marks["training"] = (steps, seconds)
            return len(marks) < 2

    evaluation = make_vec_env("CartPole-v1", 4, seed=10_000 + seed)
    model = PPO(
        "MlpPolicy", make_vec_env("CartPole-v1", 8, seed=seed), n_steps=32, batch_size=256, gae_lambda=0.8, gamma=0.98,
        n_epochs=20, ent_coef=0.0, learning_rate=lambda left: left * 1e-3, clip_range=lambda left: left * 0.2, seed=seed,
        device="cpu",
    )  # fmt: skip
    model.learn(max_steps, callback=BarCallback())
    return marks


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=5)
        parser.add_argument("--max-steps", type=int, default=MAX_STEPS)
        parser.add_argument("--quick", action="store_true")

    args = parse(__doc__, arguments, smoke={"seeds": 1, "max_steps": 2048})
    has_peer = importlib.util.find_spec("stable_baselines3") is not None
    if not has_peer and not smoke():
        print("skipped: needs stable_baselines3 (pip install stable-baselines3)")
        sys.exit(77)
    torch.set_num_threads(1)
    never = (args.max_steps, float("inf"))
    rows: list[dict[str, Any]] = []
    train(make_config("ppo", "CartPole-v1", steps=1024))  # imports and caches are not counted
    for seed in range(2 if args.quick else args.seeds):
        peer = run_peer(seed, args.max_steps) if has_peer else {}
        rows.append({"ours": run_ours(seed, args.max_steps), "peer": peer})
        print(f"seed {seed}: ours {rows[-1]['ours']}, Stable-Baselines3 {rows[-1]['peer']}", flush=True)
    for mark, bar in (("greedy", 3.0), ("training", 5.0)):
        middle = {
            side: [float(np.median([row[side].get(mark, never)[i] for row in rows])) for i in range(2)]
            for side in ("ours", "peer")
        }
        solved = sum(mark in row["ours"] for row in rows)
        ours = middle["ours"][1]
        ratio = middle["peer"][1] / ours if math.isfinite(ours) else 0.0
        claim(
            f"PPO to the {mark} bar on CartPole-v1, {solved} of {len(rows)} seeds: seconds of Stable-Baselines3 over ours",
            ours=round(middle["ours"][1], 2), peer=round(middle["peer"][1], 2), unit="s", ratio=ratio, bar=bar,
            ok=has_peer and ratio >= bar and solved == len(rows) and middle["ours"][0] <= middle["peer"][0],
            quick=args.quick, peer_name="Stable-Baselines3", variant="" if mark == "training" else mark,
            samples=[{"steps": [middle["ours"][0], middle["peer"][0]]}, *rows],
        )  # fmt: skip


if __name__ == "__main__":
    main()

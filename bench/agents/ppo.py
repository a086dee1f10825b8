"""PPO on CartPole-v1 against Stable-Baselines3's with its zoo's tuned preset: steps and seconds to two bars.

    .venv/bin/python -m pip install stable-baselines3
    .venv/bin/python bench/agents/ppo.py              # 5 seeds each, in turn
    .venv/bin/python bench/agents/ppo.py --quick      # 2 seeds

Bars: a greedy evaluation (20 episodes) of 475 or more, looked at after every 1,024 steps; and the
mean of the last 100 returns while training at 475. Time is training time: looks at the first bar are not counted,
for either side. Both plan for 100,000 steps, over which rate and clip fall to 0 (ours: passes too).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim

from whorl.agents.config import make_config
from whorl.agents.networks import ActorCritic
from whorl.agents.train import StopTraining, TrainingProgress, evaluate, train

BAR, LOOK, MOST = 475.0, 1024, 100_000


def ours(seed: int) -> dict[str, tuple[int, float]]:
    marks: dict[str, tuple[int, float]] = {}
    looked = 0.0

    def observe(progress: TrainingProgress, networks: ActorCritic) -> None:
        nonlocal looked
        seconds = progress.seconds - looked
        if "greedy" not in marks and progress.steps % LOOK == 0:
            began = time.perf_counter()
            if np.mean(evaluate(networks, "CartPole-v1", 20, 10_000 + seed)) >= BAR:
                marks["greedy"] = (progress.steps, seconds)
            looked += time.perf_counter() - began
        if "training" not in marks and len(progress.returns) == 100 and progress.mean_return >= BAR:
            marks["training"] = (progress.steps, seconds)
        if len(marks) == 2:
            raise StopTraining

    train(make_config("ppo", "CartPole-v1", steps=MOST, seed=seed), observe)
    return marks


def theirs(seed: int) -> dict[str, tuple[int, float]]:
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    marks: dict[str, tuple[int, float]] = {}

    class Watch(BaseCallback):
        looked, began = 0.0, 0.0

        def _on_training_start(self) -> None:
            self.began = time.perf_counter()

        def _on_step(self) -> bool:
            steps, seconds = self.num_timesteps, time.perf_counter() - self.began - self.looked
            if "greedy" not in marks and steps % LOOK == 0:
                before = time.perf_counter()
                mean, _ = evaluate_policy(self.model, evaluation, 20, deterministic=True)
                if mean >= BAR:
                    marks["greedy"] = (steps, seconds)
                self.looked += time.perf_counter() - before
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
    model.learn(MOST, callback=Watch())
    return marks


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    a = parser.parse_args()
    torch.set_num_threads(1)
    never = (MOST, float("inf"))
    rows: list[dict[str, Any]] = []
    train(make_config("ppo", "CartPole-v1", steps=1024))  # what is loaded once is not counted
    for seed in range(2 if a.quick else a.seeds):
        rows.append({"ours": ours(seed), "theirs": theirs(seed)})
        print(f"seed {seed}: ours {rows[-1]['ours']}, Stable-Baselines3 {rows[-1]['theirs']}", flush=True)
    for mark, bar in (("greedy", 3.0), ("training", 5.0)):
        middle = {
            side: [float(np.median([row[side].get(mark, never)[i] for row in rows])) for i in range(2)]
            for side in ("ours", "theirs")
        }
        solved = sum(mark in row["ours"] for row in rows)
        ratio = middle["theirs"][1] / middle["ours"][1]
        claim(
            f"PPO to the {mark} bar on CartPole-v1, {solved} of {len(rows)} seeds: seconds of Stable-Baselines3 over ours",
            ours=round(middle["ours"][1], 2), peer=round(middle["theirs"][1], 2), unit="s", ratio=ratio, bar=bar,
            ok=ratio >= bar and solved == len(rows) and middle["ours"][0] <= middle["theirs"][0], quick=a.quick,
            samples=[{"steps": [middle["ours"][0], middle["theirs"][0]]}, *rows],
        )  # fmt: skip


if __name__ == "__main__":
    main()

"""PPO on CartPole-v1 against Stable-Baselines3, SBX and rejax: steps and seconds to two bars.

    python -m pip install stable-baselines3 sbx-rl rejax
    python bench/agents/ppo.py              # 5 seeds each, in turn
    python bench/agents/ppo.py --quick      # 2 seeds

The greedy bar is a greedy evaluation (20 episodes, after every 1,024 steps) of at least 475. The training bar is a mean of
475 over the last 100 returns during training. Time is training time: evaluations for the greedy bar and compilation are not
counted, on any side. Stable-Baselines3 and SBX run at the tuned preset of the former's zoo. They and ours plan for 100,000
steps, over which learning rate and clip range fall to 0 (ours: epochs too). rejax runs at its own preset for CartPole. It
evaluates 128 episodes of sampled actions after every 1,000 steps, has no training bar, and is timed without evaluations.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import sys
import time
from collections.abc import Callable
from functools import partial
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
Marks = dict[str, tuple[int, float]]  # environment steps and seconds by bar


def run_ours(seed: int, max_steps: int) -> Marks:
    config = make_config("ppo", "CartPole-v1", steps=max_steps, seed=seed)
    marks: Marks = {}
    evaluation_seconds = 0.0

    def observe(progress: TrainingProgress, networks: ActorCritic) -> None:
        nonlocal evaluation_seconds
        seconds = progress.seconds - evaluation_seconds
        if "greedy" not in marks and progress.steps % EVALUATE_EVERY == 0:
            began = time.perf_counter()
            if np.mean(evaluate(config, networks, 20, 10_000 + seed)) >= BAR:
                marks["greedy"] = (progress.steps, seconds)
            evaluation_seconds += time.perf_counter() - began
        if "training" not in marks and len(progress.returns) == 100 and progress.mean_return >= BAR:
            marks["training"] = (progress.steps, seconds)
        if len(marks) == 2:
            raise StopTraining

    train(config, observe)
    return marks


def run_sb3(module: str, seed: int, max_steps: int) -> Marks:
    """Run Stable-Baselines3, or SBX, which has the same interface."""
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    marks: Marks = {}

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
    model = importlib.import_module(module).PPO(
        "MlpPolicy", make_vec_env("CartPole-v1", 8, seed=seed), n_steps=32, batch_size=256, gae_lambda=0.8, gamma=0.98,
        n_epochs=20, ent_coef=0.0, learning_rate=lambda left: left * 1e-3, clip_range=lambda left: left * 0.2, seed=seed,
        device="cpu",
    )  # fmt: skip
    model.learn(max_steps, callback=BarCallback())
    return marks


def run_rejax(seed: int, max_steps: int) -> Marks:
    import jax
    import rejax

    def fit(evaluate_every: int) -> tuple[Any, float]:
        algorithm = rejax.PPO.create(
            env="CartPole-v1", agent_kwargs={"activation": "tanh"}, num_envs=5, num_steps=100, num_epochs=5,
            num_minibatches=5, learning_rate=0.00075, max_grad_norm=0.5, total_timesteps=max_steps, gamma=0.99,
            eval_freq=evaluate_every, gae_lambda=0.95, clip_eps=0.2, ent_coef=0.01, vf_coef=0.5,
            skip_initial_evaluation=True,
        )  # fmt: skip
        compiled = jax.jit(algorithm.train).lower(jax.random.PRNGKey(seed)).compile()
        began = time.perf_counter()
        found = jax.block_until_ready(compiled(jax.random.PRNGKey(seed)))
        return found, time.perf_counter() - began

    (_, (_, returns)), _ = fit(1000)
    over = np.flatnonzero(np.asarray(returns).mean(axis=1) >= BAR)
    if not len(over):
        return {}
    steps = 1000 * (int(over[0]) + 1)
    return {"greedy": (steps, fit(max_steps)[1] * steps / max_steps)}


PEERS: dict[str, tuple[str, float, Callable[[int, int], Marks]]] = {  # module, bar of the ratio of seconds
    "Stable-Baselines3": ("stable_baselines3", 10.0, partial(run_sb3, "stable_baselines3")),
    "SBX": ("sbx", 1.0, partial(run_sb3, "sbx")),
    "rejax": ("rejax", 1.0, run_rejax),
}


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=5)
        parser.add_argument("--max-steps", type=int, default=MAX_STEPS)
        parser.add_argument("--quick", action="store_true")

    args = parse(__doc__, arguments, smoke={"seeds": 1, "max_steps": 2048})
    peers = {} if smoke() else {n: p for n, p in PEERS.items() if importlib.util.find_spec(p[0])}
    if not peers and not smoke():
        print("skipped: needs a peer (pip install stable-baselines3 sbx-rl rejax)")
        sys.exit(77)
    torch.set_num_threads(1)
    never = (args.max_steps, float("inf"))
    rows: list[dict[str, Marks]] = []
    train(make_config("ppo", "CartPole-v1", steps=1024))  # imports and caches are not counted
    if "SBX" in peers:
        run_sb3("sbx", 0, 1024)  # compiles
    for seed in range(2 if args.quick else args.seeds):
        row = {name: run(seed, args.max_steps) for name, (_, _, run) in peers.items()}
        rows.append({"ours": run_ours(seed, args.max_steps), **row})
        print(f"seed {seed}: {rows[-1]}", flush=True)
    for mark in ("greedy", "training"):
        middle = {
            side: [float(np.median([row[side].get(mark, never)[i] for row in rows])) for i in range(2)] for side in rows[0]
        }  # fmt: skip
        steps, ours = middle.pop("ours")
        solved = sum(mark in row["ours"] for row in rows)
        for name, (_, bar, _) in PEERS.items():
            if name == "rejax" and mark == "training":
                continue
            peer_steps, seconds = middle.get(name, (0, 0.0))  # 0: not installed
            variants = {
                "Stable-Baselines3": "" if mark == "training" else mark,
                "SBX": f"{mark}-sbx",
                "rejax": "rejax",
            }
            ratio = seconds / ours if math.isfinite(ours) else 0.0
            claim(
                f"PPO to the {mark} bar on CartPole-v1, {solved} of {len(rows)} seeds: seconds of {name} over ours",
                ours=round(ours, 2), peer=round(seconds, 2), unit="s", ratio=ratio, bar=bar,
                ok=ratio >= bar and solved == len(rows), quick=args.quick, peer_name=name,
                variant=variants[name], samples=[{"steps": [steps, peer_steps]}, *rows],
            )  # fmt: skip


if __name__ == "__main__":
    main()

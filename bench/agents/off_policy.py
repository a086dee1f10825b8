"""Updates per second of DQN and SAC against Stable-Baselines3 and SBX, and a draw from a million steps.

    python -m pip install stable-baselines3 sbx-rl
    python bench/agents/off_policy.py            # the settings of every library: equal widths and batch, one update per step

Time is that of training, acting included, after a first run that compiles. Two threads on each side.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, smoke

from whorl.agents.environments.environment import Spaces, step_fields
from whorl.agents.methods.registration import make_config
from whorl.agents.task import train
from whorl.slots.replay import TransitionStore

SETTINGS: dict[str, dict[str, Any]] = {
    "dqn": {"environment": "CartPole-v1", "hidden": (256, 256), "batch": 64},
    "sac": {"environment": "Pendulum-v1", "hidden": (256, 256), "batch": 256},
}
STARTS = 500


def ours(method: str, updates: int) -> float:
    settings = SETTINGS[method]
    config = make_config(
        method, settings["environment"], hidden=settings["hidden"], batch_size=settings["batch"], steps=STARTS + updates,
        learning_starts=STARTS, n_envs=1 if method == "sac" else 4, n_steps=8, updates_per_step=1.0,
    )  # fmt: skip
    marks: list[tuple[int, float]] = []
    train(config, lambda progress, _: marks.append((progress.steps, time.perf_counter())))
    timed = [mark for mark in marks if mark[0] > STARTS + config.rollout_steps]
    return (timed[-1][0] - timed[0][0]) / (timed[-1][1] - timed[0][1])


def peer(module: str) -> Callable[[str, int], float]:
    def run(method: str, updates: int) -> float:
        library = __import__(module)
        settings = SETTINGS[method]
        kind = getattr(library, method.upper())
        keywords: dict[str, Any] = {
            "batch_size": settings["batch"],
            "learning_starts": STARTS,
            "train_freq": 1,
        }
        if module == "stable_baselines3":
            keywords["device"] = "cpu"
        policy = {"net_arch": list(settings["hidden"])}
        model = kind("MlpPolicy", settings["environment"], policy_kwargs=policy, gradient_steps=1, **keywords)
        model.learn(STARTS + 200)  # compiles
        began = time.perf_counter()
        model.learn(updates, reset_num_timesteps=False)
        return updates / (time.perf_counter() - began)

    return run


def draws_per_second(n: int) -> float:
    """Return draws of 256 from a full store of a million steps of Pendulum."""
    store = TransitionStore(n, 1, step_fields(Spaces((3,), action_low=(-2.0,), action_high=(2.0,))))
    store.drawable[:-1] = True
    store.heads += n
    store.added += n
    return per_second(lambda rng: store.draw(256, rng, discount=0.99))


def peer_draws_per_second(n: int) -> float:
    from gymnasium.spaces import Box
    from stable_baselines3.common.buffers import ReplayBuffer

    buffer = ReplayBuffer(n, Box(-1, 1, (3,)), Box(-2, 2, (1,)), device="cpu")
    buffer.full = True
    return per_second(lambda rng: buffer.sample(256))


def per_second(draw: Callable[[np.random.Generator], Any]) -> float:
    rng, best = np.random.default_rng(0), 0.0
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(200):
            draw(rng)
        best = max(best, 200 / (time.perf_counter() - began))
    return best


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--updates", type=int, default=3000)
        parser.add_argument("--rows", type=int, default=1_000_000)

    args = parse(__doc__, arguments, smoke={"updates": 60, "rows": 10_000})
    peers = {name: peer(name) for name in ("stable_baselines3", "sbx") if importlib.util.find_spec(name)}
    if not peers and not smoke():
        print("skipped: needs stable_baselines3 and sbx-rl (pip install stable-baselines3 sbx-rl)")
        sys.exit(77)
    torch.set_num_threads(2)
    for method in SETTINGS:
        rates = {
            "ours": ours(method, args.updates),
            **{n: run(method, args.updates) for n, run in peers.items()},
        }
        print(method, {name: round(rate) for name, rate in rates.items()}, flush=True)
        for name, bar in (("stable_baselines3", 3.0), ("sbx", 1.0)):
            ratio = rates["ours"] / rates[name] if name in rates else 0.0
            claim(
                f"updates per second of {method} over {name}'s", ours=rates["ours"], peer=rates.get(name, 0.0), unit="1/s",
                ratio=ratio, bar=bar, ok=ratio >= bar, peer_name=name, variant=method,
            )  # fmt: skip
    mine = draws_per_second(args.rows)
    theirs = peer_draws_per_second(args.rows) if "stable_baselines3" in peers else 0.0
    claim(
        "draws of 256 from a million steps per second over Stable-Baselines3's uniform buffer", ours=mine, peer=theirs,
        unit="1/s", ratio=mine / theirs if theirs else 0.0, bar=1.0, ok=bool(theirs) and mine >= theirs,
        peer_name="stable_baselines3", variant="draw",
    )  # fmt: skip


if __name__ == "__main__":
    main()

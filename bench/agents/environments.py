"""Environment steps per second of 1,024 copies: CartPole against gymnasium's numpy version, and the other problems.

    python bench/agents/environments.py

Random actions, one thread. Both sides run in turn in one process; the figure is the middle of five rounds. The other classic
problems have no vectorized version in gymnasium. For them the script prints the rate of gymnasium's sequential vector.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import gymnasium
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized

from whorl.agents import TENSOR_ENVIRONMENTS, make_env
from whorl.agents.search.game import GAMES

N, STEPS, ROUNDS = 1024, sized(400, 20), sized(5, 1)


def rate(step: Callable[[int], object], steps: int = STEPS) -> float:
    """Steps per second, summed over all copies."""
    for i in range(20):
        step(i)
    began = time.perf_counter()
    for i in range(steps):
        step(i)
    return N * steps / (time.perf_counter() - began)


def main() -> None:
    parse(__doc__)
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    ours, actions = {}, {}
    for name in TENSOR_ENVIRONMENTS:
        if name in GAMES:  # random actions are not always legal
            continue
        ours[name] = make_env(name, N)
        ours[name].reset(0)
        n = ours[name].spaces.n_actions
        drawn = rng.integers(0, n, (50, N)) if n else rng.uniform(-2, 2, (50, N, 1)).astype(np.float32)
        actions[name] = drawn
    vector = gymnasium.make_vec("CartPole-v1", N, vectorization_mode="vector_entry_point")
    vector.reset(seed=0)
    pairs, pole_actions = [], torch.from_numpy(actions["CartPole-v1"])
    for _ in range(ROUNDS):
        tensor_rate = rate(lambda i: ours["CartPole-v1"].step(pole_actions[i % 50]))
        numpy_rate = rate(lambda i: vector.step(actions["CartPole-v1"][i % 50]))
        pairs.append((tensor_rate, numpy_rate))
    others = {}
    for name in ours:
        tensors = torch.from_numpy(actions[name])
        others[name] = rate(lambda i, name=name, tensors=tensors: ours[name].step(tensors[i % 50]))
        print(f"{name:16} {others[name] / 1e6:6.2f} M steps/s", flush=True)
    sequential = gymnasium.make_vec("Acrobot-v1", 64, vectorization_mode="sync")
    sequential.reset(seed=0)
    sequential_rate = rate(lambda i: sequential.step(actions["Acrobot-v1"][i % 50][:64]), 20) * 64 / N
    print(f"gymnasium's Acrobot-v1, sequential: {sequential_rate / 1e6:.3f} M steps/s")
    best = sorted(pairs, key=lambda p: p[0] / p[1])[ROUNDS // 2]
    claim(
        "stepping 1,024 CartPoles against gymnasium's numpy vector", ours=round(best[0]), peer=round(best[1]),
        peer_name="gymnasium CartPole-v1, numpy",
        unit="steps/s", ratio=best[0] / best[1], bar=1.0, ok=best[0] >= best[1], samples=[{"pairs": [[round(a),
        round(b)] for a, b in pairs], "others": {k: round(v) for k, v in others.items()}}],
    )  # fmt: skip


if __name__ == "__main__":
    main()

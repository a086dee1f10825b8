"""Deep methods against the exact solutions of grids, without the noise of evaluation episodes.

    python bench/agents/oracle.py              # three seeds each
    python bench/agents/oracle.py --only cpo

The value of the network's greedy policy at the start comes from a linear solve; the bar is 98 % of the optimum. Double DQN
is compared with DQN by the mean of max Q - V* over all states. CPO's stochastic policy is compared with the constrained
optimum of a linear program, and its cost with the limit; PPO has no limit.
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

from whorl.agents.environments.registration import make_tables
from whorl.agents.environments.tables import Tables
from whorl.agents.methods.registration import make_config
from whorl.agents.tabular import constrained_optimum, evaluate_policy, expected_total, policy_iteration
from whorl.agents.task import open_method, train

GRIDS, DISCOUNT, LIMIT = ("FrozenLake-v1", "CostlyGrid-v0", "DeepSea6-v0"), 0.99, 1.0
REPLAY = {"hidden": (64,), "batch_size": 64, "updates_per_step": 0.25, "n_envs": 8, "steps": 40_000}
METHODS: dict[str, dict[str, Any]] = {
    "dqn": {**REPLAY, "exploration": {"kind": "epsilon", "fraction": 0.5}},
    "ppo": {"steps": 200_000, "entropy_coef": 0.01},
    "sac": {**REPLAY, "target_entropy": 0.1},
}


def trained(method: str, environment: str, seed: int, **changes: Any) -> tuple[Any, Any]:
    config = make_config(method, environment, seed=seed, discount=DISCOUNT, **changes)
    return open_method(config)[0], train(config)


def start_value(tables: Tables, method: Any, networks: Any) -> float:
    """Return the exact discounted value of the greedy policy at the start."""
    with torch.no_grad():
        actions = method.greedy_action(networks, torch.eye(len(tables.reward))).numpy()
    return float(tables.initial @ evaluate_policy(tables, tables.policy(actions), DISCOUNT))


def overestimation(tables: Tables, networks: Any) -> float:
    exact = policy_iteration(tables, DISCOUNT).values
    with torch.no_grad():
        values = networks.values(networks.q, torch.eye(len(exact)))[0].amax(1).numpy()
    seen = ~tables.terminal
    return float((values - exact)[seen].mean())


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=3)
        parser.add_argument("--only", default="", help="dqn, ppo, sac or cpo")
        parser.add_argument("--scale", type=float, default=1.0, help="factor on the steps")

    args = parse(__doc__, arguments, smoke={"seeds": 1, "scale": 0.03})
    torch.set_num_threads(1)
    excess: dict[bool, list[float]] = {True: [], False: []}
    for name, settings in METHODS.items():
        if args.only not in ("", name):
            continue
        for grid in GRIDS:
            tables = make_tables(grid)
            best = float(tables.initial @ policy_iteration(tables, DISCOUNT).values)
            changes = {**settings, "steps": round(settings["steps"] * args.scale)}
            runs = [trained(name, grid, seed, **changes) for seed in range(args.seeds)]
            values = [start_value(tables, *run) for run in runs]
            print(f"{name} on {grid}: {values}, optimum {best:.4f}", flush=True)
            if name == "dqn":
                excess[True] += [overestimation(tables, networks) for _, networks in runs]
                single = [trained(name, grid, seed, **changes, double=False)[1] for seed in range(args.seeds)]
                excess[False] += [overestimation(tables, networks) for networks in single]
            share = float(np.median(values)) / best
            claim(
                f"{name} on {grid}: value of the greedy policy over the optimum", ours=float(np.median(values)), peer=best,
                unit="value", ratio=share, bar=0.98, ok=share >= 0.98, variant=f"{name}-{grid}", samples=values,
                peer_name="exact solution",
            )  # fmt: skip
    if excess[True]:
        double, single = (float(np.mean(excess[kind])) for kind in (True, False))
        claim(
            "mean of max Q - V* over states: double DQN and DQN", ours=double, peer=single, unit="value",
            ratio=double / single, bar=1.0, ok=double < single, variant="overestimation",
            samples=[excess[True], excess[False]], peer_name="DQN",
        )  # fmt: skip
    if args.only in ("", "cpo"):
        constrained(args.seeds, args.scale)


def constrained(seeds: int, scale: float) -> None:
    """Claim that CPO keeps its limit near the constrained optimum, and that PPO does not."""
    tables = make_tables("CostlyGrid-v0")
    assert tables.cost is not None
    best = expected_total(tables, constrained_optimum(tables, 1.0, LIMIT), tables.reward)
    found: dict[str, list[tuple[float, float]]] = {"cpo": [], "ppo": []}
    for name in found:
        for seed in range(seeds):
            changes = {"cost_limit": LIMIT} if name == "cpo" else {}
            config = make_config(name, "CostlyGrid-v0", seed=seed, steps=round(200_000 * scale), **changes)
            networks = train(config)
            with torch.no_grad():
                policy = networks.policy(torch.eye(len(tables.reward))).softmax(-1).double().numpy()
            found[name].append(
                tuple(expected_total(tables, policy, each) for each in (tables.reward, tables.cost))
            )  # type: ignore[arg-type]
        print(
            f"{name} on CostlyGrid-v0: return and cost {found[name]}, constrained optimum {best:.4f}",
            flush=True,
        )
    ours, cost = (float(np.median(values)) for values in zip(*found["cpo"], strict=True))
    claim(
        "CPO on CostlyGrid-v0: return over the constrained optimum, at a cost of at most 1.05", ours=ours, peer=best,
        unit="return", ratio=ours / best, bar=0.95, ok=ours >= 0.95 * best and cost <= 1.05 * LIMIT, variant="cpo",
        samples=[found["cpo"], found["ppo"]], peer_name="linear program",
    )  # fmt: skip


if __name__ == "__main__":
    main()

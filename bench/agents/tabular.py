"""Tabular methods against exact solutions: both iterations against a linear solve, and learned tables of CliffWalking.

    python bench/agents/tabular.py

The first claim is the greatest difference between the values of an iteration and a linear solve for its greedy policy, over
six environments. The others are the exact expected returns of greedy policies: Q-learning finds the shortest path (-13), and
SARSA a safe one (-17) at the step size 0.5 of Sutton & Barto 2018, example 6.6.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized, smoke

from whorl.agents.environments.registration import make_tables
from whorl.agents.seed_statistics import summarize_seeds
from whorl.agents.tabular import (
    ITERATIONS,
    LearningConfig,
    evaluate_policy,
    expected_total,
    greedy,
    learn,
)

NAMES = ("FrozenLake-v1", "FrozenLake8x8-v1", "CliffWalking-v1", "CostlyGrid-v0", "DeepSea-v0", "Taxi-v4")
DISCOUNT, BAR = 0.99, 1e-10


def main() -> None:
    parse(__doc__)
    worst, samples = 0.0, []
    for name in NAMES:
        tables = make_tables(name)
        for method, solve in ITERATIONS.items():
            solution = solve(tables, DISCOUNT)
            policy = tables.policy(greedy(solution.action_values))
            exact = evaluate_policy(tables, policy, DISCOUNT)
            worst = max(worst, float(np.abs(solution.values - exact).max()))
            start = float(tables.initial @ solution.values)
            total = expected_total(tables, policy, tables.reward)
            samples.append([name, method, solution.iterations, start, total])
            print(
                f"{name:16} {method:16} {solution.iterations:4} iterations, value {start:9.4f}, return {total:9.4f}"
            )
    claim(
        "policy and value iteration: greatest difference from a linear solve", ours=worst, peer=BAR, unit="",
        ratio=worst / BAR, bar=1.0, ok=worst < BAR, samples=samples, peer_name="bar",
    )  # fmt: skip
    tables = make_tables("CliffWalking-v1")
    for method, step_size, expected in (
        ("q-learning", 0.1, -13.0),
        ("sarsa", 0.1, -15.0),
        ("sarsa", 0.5, -17.0),
    ):
        config = LearningConfig(DISCOUNT, episodes=sized(500, 20), step_size=step_size)
        found = learn("CliffWalking-v1", tables, method, config, 5)
        returns = [expected_total(tables, tables.policy(greedy(q)), tables.reward) for q in found]
        middle = summarize_seeds([returns], np.random.default_rng(0)).mean
        print(f"{method}, step size {step_size}: {middle} {returns}")
        claim(
            f"{method} with step size {step_size} on CliffWalking-v1, 500 episodes: return of the greedy policy",
            ours=middle, peer=expected, unit="", ratio=middle / expected, bar=1.0,
            ok=not smoke() and middle == expected, samples=returns, variant=f"{method}-{step_size}", peer_name="bar",
        )  # fmt: skip


if __name__ == "__main__":
    main()

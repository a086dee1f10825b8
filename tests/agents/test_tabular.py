"""Exact solutions against a linear solve and closed forms; learned tables against exact ones."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from whorl.agents.environments.grids import GridWorld
from whorl.agents.environments.registration import TENSOR_ENVIRONMENTS, make_tables
from whorl.agents.environments.tables import Array, Tables
from whorl.agents.tabular import (
    ITERATIONS,
    NEXT_VALUES,
    LearningConfig,
    action_values_of,
    constrained_optimum,
    evaluate_policy,
    expected_total,
    greedy,
    learn,
    policy_iteration,
)
from whorl.errors import ConfigError

FINITE = ["FrozenLake-v1", "FrozenLake8x8-v1", "CliffWalking-v1", "CostlyGrid-v0", "DeepSea10-v0", "Taxi-v4"]


@pytest.mark.parametrize("method", ITERATIONS)
@pytest.mark.parametrize("name", FINITE)
def test_iterations_equal_a_linear_solve(name: str, method: str) -> None:
    if name == "Taxi-v4":
        pytest.importorskip("gymnasium")
    tables = make_tables(name)
    solution = ITERATIONS[method](tables, 0.99)
    best = evaluate_policy(tables, tables.policy(greedy(solution.action_values)), 0.99)
    assert np.abs(solution.values - best).max() < 1e-10
    q = action_values_of(tables, best, 0.99)
    assert np.abs(q - solution.action_values).max() < 1e-10
    assert np.abs(q.max(axis=1) - best).max() < 1e-10  # Bellman's equation: no other policy is better


def test_known_start_values() -> None:
    lake, cliff, sea = map(make_tables, ("FrozenLake-v1", "CliffWalking-v1", "DeepSea10-v0"))
    assert lake.initial @ policy_iteration(lake, 0.99).values == pytest.approx(0.5420, abs=5e-5)
    for solve in ITERATIONS.values():
        assert cliff.initial @ solve(cliff, 1.0).values == pytest.approx(-13)
    expected = 0.99**9 - 0.001 * (1 - 0.99**10) / (1 - 0.99)
    assert sea.initial @ policy_iteration(sea, 0.99).values == pytest.approx(expected, abs=1e-6)


def test_return_within_time_limit_matches_its_chain() -> None:
    """Two states: stay with probability 0.9 for reward 1, otherwise end."""
    transition = np.zeros((2, 1, 2))
    transition[0, 0], transition[1, 0, 1] = (0.9, 0.1), 1
    reward = np.array([[1.0], [0.0]])
    tables = Tables(transition, reward, np.array([False, True]), np.array([1.0, 0.0]))
    policy = np.ones((2, 1))
    assert expected_total(tables, policy, reward) == pytest.approx(10)
    limited = replace(tables, max_episode_steps=3)
    assert expected_total(limited, policy, reward) == pytest.approx(1 + 0.9 + 0.81)
    assert evaluate_policy(tables, policy, 0.5)[0] == pytest.approx(1 / (1 - 0.45))


def test_endless_policy_without_discount_is_refused() -> None:
    transition, reward = np.ones((1, 1, 1)), np.ones((1, 1))
    endless = Tables(transition, reward, np.array([False]), np.array([1.0]))
    with pytest.raises(ConfigError, match="never ends an episode"):
        policy_iteration(endless, 1.0)
    assert policy_iteration(endless, 0.5).values == pytest.approx([2.0])


def discounted_cost(tables: Tables, policy: Array) -> float:
    assert tables.cost is not None
    return float(tables.initial @ evaluate_policy(replace(tables, reward=tables.cost), policy, 0.99))


def test_constrained_optimum_keeps_its_budget() -> None:
    tables = make_tables("CostlyGrid-v0")
    free = policy_iteration(tables, 0.99)
    best, values = float(tables.initial @ free.values), []
    for budget in (0.5, 1.0, 2.0):
        policy = constrained_optimum(tables, 0.99, budget)
        assert np.allclose(policy.sum(axis=1), 1)
        assert discounted_cost(tables, policy) == pytest.approx(budget, abs=1e-6)  # the constraint is active
        values.append(float(tables.initial @ evaluate_policy(tables, policy, 0.99)))
    assert values == sorted(values) and values[-1] < best - 0.05
    assert 2 * values[1] > values[0] + values[2] / 3  # between them
    loose = constrained_optimum(tables, 0.99, 100.0)
    assert tables.initial @ evaluate_policy(tables, loose, 0.99) == pytest.approx(best, abs=1e-7)


def test_constrained_optimum_equals_best_lagrangian() -> None:
    """By duality: the lowest maximum of reward - weight * (cost - budget) over weights."""
    tables, budget = make_tables("CostlyGrid-v0"), 1.0
    assert tables.cost is not None

    def dual(weight: float) -> float:
        penalized = replace(tables, reward=tables.reward - weight * tables.cost)
        return float(tables.initial @ policy_iteration(penalized, 0.99).values) + weight * budget

    policy = constrained_optimum(tables, 0.99, budget)
    value = float(tables.initial @ evaluate_policy(tables, policy, 0.99))
    assert min(map(dual, np.linspace(0, 0.3, 301))) == pytest.approx(value, abs=1e-3)


def test_impossible_budgets_are_refused() -> None:
    with pytest.raises(ConfigError, match="has none"):
        constrained_optimum(make_tables("FrozenLake-v1"), 0.99, 1.0)
    tables = make_tables("CostlyGrid-v0")
    assert tables.cost is not None
    dear = replace(tables, cost=tables.cost + 1)  # 5 steps at least, or 4 costs on top
    with pytest.raises(ConfigError, match=r"at most 3(.|\n)*a budget of at least 9\."):
        constrained_optimum(dear, 0.99, 3.0)


def soft_optimum(tables: Tables, discount: float, epsilon: float) -> Array:
    """Return the action values [S, A] of the best epsilon-greedy policy, by value iteration."""
    q = np.zeros_like(tables.reward)
    for _ in range(1000):
        q = action_values_of(tables, (1 - epsilon) * q.max(axis=1) + epsilon * q.mean(axis=1), discount)
    return q


@pytest.mark.parametrize(
    ("method", "expected"), [("q-learning", -13), ("sarsa", -15), ("expected-sarsa", -15)]
)
def test_cliff_walking_paths(method: str, expected: float) -> None:
    """Q-learning learns the shortest path, SARSA the best path of an acting policy with random steps."""
    tables = make_tables("CliffWalking-v1")
    q = learn("CliffWalking-v1", tables, method, LearningConfig(episodes=600), 3)
    returns = [expected_total(tables, tables.policy(greedy(each)), tables.reward) for each in q]
    assert sorted(returns)[1] == expected
    optimum = policy_iteration(tables, 0.99).action_values
    if method != "q-learning":
        optimum = soft_optimum(tables, 0.99, 0.1)
    assert expected_total(tables, tables.policy(greedy(optimum)), tables.reward) == expected


@pytest.mark.parametrize("method", NEXT_VALUES)
def test_learned_values_match_exact_ones(method: str) -> None:
    """With a uniform acting policy, Q-learning learns the best values, the other methods those of the policy."""
    tables = make_tables("DeepSea4-v0")
    config = LearningConfig(episodes=800, epsilon=1.0)
    q = learn("DeepSea4-v0", tables, method, config, 4)
    policies = [tables.policy(greedy(each)) for each in q]
    assert [expected_total(tables, p, tables.reward) for p in policies] == pytest.approx([0.99] * 4)
    exact = (
        policy_iteration(tables, 0.99).action_values
        if method == "q-learning"
        else soft_optimum(tables, 0.99, 1.0)
    )
    start = int(tables.initial.argmax())
    assert q[:, start].mean(axis=0) == pytest.approx(exact[start], abs=0.05)
    assert np.array_equal(q, learn("DeepSea4-v0", tables, method, config, 4))


class Cell(GridWorld):
    """One cell that no action leaves, at a cost of 1 per step."""

    default_rows = ("S",)
    default_max_episode_steps = 3
    cell_rewards: ClassVar[dict[str, float]] = {"S": -1.0}


@pytest.mark.parametrize("method", NEXT_VALUES)
def test_truncation_keeps_the_value_of_the_rest(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values approach -1 / (1 - 0.5), and not the -1.75 of episodes that end after 3 steps."""
    monkeypatch.setitem(TENSOR_ENVIRONMENTS, "Cell-v0", Cell)
    q = learn("Cell-v0", make_tables("Cell-v0"), method, LearningConfig(0.5, episodes=300), 2)
    assert q.max(axis=2) == pytest.approx(-2, abs=0.02)

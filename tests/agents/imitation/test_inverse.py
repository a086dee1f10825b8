"""Maximum-entropy inverse RL: the soft policy, the gradient, and what a recovered reward is worth."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.demonstrations import LakeExpert, demonstrations_for

from whorl.agents.environments.registration import make_tables
from whorl.agents.environments.tables import Tables
from whorl.agents.imitation.demonstrations import record_demonstrations
from whorl.agents.imitation.inverse import (
    expected_visits,
    recorded_visits,
    recovered,
    reward_table,
    soft_policy,
    total_variation,
)
from whorl.agents.methods.registration import make_config
from whorl.agents.tabular import expected_total, greedy, policy_iteration
from whorl.agents.task import AgentTask, open_method, train
from whorl.agents.visits import gini, lorenz
from whorl.errors import ConfigError


def entropy_value(tables: Tables, policy: np.ndarray, reward: np.ndarray, discount: float) -> np.ndarray:
    """Return the values [S] of rewards and entropies of a policy, by a linear solve; an end has uniform choices forever."""
    end = math.log(reward.shape[1]) / (1 - discount)
    chain = np.einsum("sa,sat->st", policy, tables.transition)
    each = (policy * (reward - np.log(policy))).sum(1) + discount * chain @ np.where(
        tables.terminal, end, 0.0
    )
    values = np.linalg.solve(np.eye(len(chain)) - discount * chain * ~tables.terminal, each)
    return np.asarray(values[~tables.terminal])


def test_soft_policy_has_the_most_reward_and_entropy() -> None:
    rng, tables, discount = np.random.default_rng(0), make_tables("FrozenLake-v1"), 0.9
    reward = reward_table(tables, rng.normal(size=16))
    policy, values = soft_policy(tables, reward, discount)
    best = entropy_value(tables, policy, reward, discount)
    assert best == pytest.approx(values[~tables.terminal], abs=1e-4)
    for _ in range(5):
        other = policy * np.exp(0.1 * rng.normal(size=policy.shape))
        assert (entropy_value(tables, other / other.sum(1, keepdims=True), reward, discount) < best).all()


def test_expected_visits_are_those_of_episodes() -> None:
    expert = LakeExpert()
    torch.manual_seed(0)
    found = recorded_visits(record_demonstrations("DryLake-v0", expert, 2_000, 0), 0.99)
    exact = expected_visits(expert.tables, expert.policy, 0.99)
    assert total_variation(found, exact) < 0.02 and found.sum() == pytest.approx(exact.sum(), rel=0.02)


def test_loss_has_the_gradient_of_the_likelihood() -> None:
    """Finite differences of the expected log-likelihood of the expert's path, where no step is random."""
    config = make_config("max-entropy-irl", "DryLake-v0", sparsity=0.0, discount=0.9)
    task = AgentTask(config, demonstrations_for(config, episodes=5))
    with torch.no_grad():
        task.networks.reward[0].weight.copy_(torch.linspace(-0.3, 0.4, 16)[None])
    (part,) = next(iter(task.method.minibatches(task.networks, {}, 0)))
    task.method.loss(task.networks, part).total.backward()  # type: ignore[attr-defined, no-untyped-call]
    tables, steps = task.method.tables, task.method.demonstrations.steps  # type: ignore[attr-defined]
    weights = 0.9 ** np.concatenate([np.arange(n) for n in task.method.demonstrations.lengths])
    states, actions = steps["observation"].argmax(1).numpy(), steps["action"].numpy()

    def likelihood(rewards: np.ndarray) -> float:
        policy, _ = soft_policy(tables, reward_table(tables, rewards), 0.9)
        return float((weights * np.log(policy[states, actions])).sum() / 5)

    given = task.networks.reward[0].weight.detach()[0].double().numpy() + task.networks.reward[0].bias.item()
    gradient = task.networks.reward[0].weight.grad[0].numpy()
    for state in (1, 10, 14, 15):
        step = 1e-3 * np.eye(16)[state]
        slope = (likelihood(given + step) - likelihood(given - step)) / 2e-3
        assert -gradient[state] == pytest.approx(slope, abs=2e-3)


@pytest.mark.parametrize("settings", [{}, {"hidden": (32,), "learning_rate": 0.01}])
def test_recovered_reward_keeps_its_meaning_on_other_floors(settings: dict[str, object]) -> None:
    torch.manual_seed(0)
    config = make_config("max-entropy-irl", "DryLake-v0", steps=4_800, **settings)
    demonstrations = demonstrations_for(config, episodes=300)
    networks = train(config, demonstrations=demonstrations)
    found = recovered(config, networks, demonstrations)
    assert found is not None and found["total_variation"] < 0.05
    assert found["true reward"] == pytest.approx(np.eye(16)[15], abs=1e-9)
    assert np.argmax(found["recovered reward"]) == 15
    for environment in ("FrozenLake-v1", "DiagonalLake-v0"):
        tables = make_tables(environment)
        learned = replace(tables, reward=reward_table(tables, np.array(found["recovered reward"])))
        kept, optimum = (
            expected_total(
                tables, tables.policy(greedy(policy_iteration(t, 0.99).action_values)), tables.reward
            )
            for t in (learned, tables)
        )
        assert kept > 0.95 * optimum


def test_gini_and_lorenz_of_visits() -> None:
    assert gini([2, 2, 2, 2]) == pytest.approx(0) and gini([0, 0, 0, 5]) == pytest.approx(0.75)
    assert lorenz([3, 1, 0]) == pytest.approx([0, 0, 0.25, 1])
    values = np.random.default_rng(0).exponential(size=200)
    pairs = np.abs(values[:, None] - values).mean() / (
        2 * values.mean()
    )  # the definition by mean differences
    assert gini(values) == pytest.approx(pairs)


def test_environment_without_tables_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"CartPole-v1, which has no table(.*\n)*.*use gail"):
        open_method(make_config("max-entropy-irl", "CartPole-v1"))

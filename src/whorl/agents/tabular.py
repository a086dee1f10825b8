"""Solve a finite environment: exactly from its tables, or from steps in it by a table of action values.

policy iteration   v = r + discount P v by a linear solve, then the greedy policy, until it is stable (Howard 1960)
value iteration    q = r + discount P max q, until the bound of its error is below 1e-11 (Bellman 1957)

Methods that learn from steps differ in the target that q(s, a) moves to (Sutton & Barto 2018, chapters 5 and 6):

monte-carlo        the return from the first visit of (s, a) in the episode to its end
sarsa              r + discount q(s', a'), with the next action a' of the acting policy
expected-sarsa     r + discount E q(s', a')
q-learning         r + discount max q(s', .)

A truncated episode is not an end: its last target includes the value of the last state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from whorl.agents.environments.registration import make_env
from whorl.agents.environments.tables import Array, Tables
from whorl.errors import ConfigError

MAX_STEPS = 10_000  # of an episode without a time limit, in expected returns
MAX_LEARNING_STEPS = 200  # the same, while learning: Monte Carlo learns nothing before an end
MAX_SWEEPS = 1_000_000
TOLERANCE = 1e-11
TIE = 1e-9  # actions whose values differ less count as equal


@dataclass(frozen=True)
class Solution:
    """Action values [S, A] of the best policy, and the number of iterations."""

    action_values: Array
    iterations: int

    @property
    def values(self) -> Array:
        """[S] values of the states."""
        return np.asarray(self.action_values.max(axis=1))


def greedy(action_values: Array) -> NDArray[np.int64]:
    """Return the best action of each state [S], of equal ones the first."""
    best = action_values >= action_values.max(axis=1, keepdims=True) - TIE
    return np.asarray(best.argmax(axis=1))


def action_values_of(tables: Tables, values: Array, discount: float) -> Array:
    """Return r + discount P v, [S, A]."""
    return np.asarray(tables.reward + discount * (tables.continuing @ values))


def evaluate_policy(tables: Tables, policy: Array, discount: float) -> Array:
    """Return the values [S] of a policy [S, A], by a linear solve.

    Raises:
        ConfigError: the discount is 1, and the policy may never end an episode.
    """
    chain = np.einsum("sa,sat->st", policy, tables.continuing)
    try:
        return np.linalg.solve(np.eye(len(chain)) - discount * chain, (policy * tables.reward).sum(axis=1))
    except np.linalg.LinAlgError as error:
        what = (
            f"discount {discount}: from some states a policy never ends an episode: its values are infinite"
        )
        raise ConfigError(what, expected="a discount below 1") from error


def policy_iteration(tables: Tables, discount: float) -> Solution:
    """Return the exact solution. The first policy is uniform, which reaches every end that can be reached."""
    policy = np.full(tables.reward.shape, 1 / tables.reward.shape[1])
    for iteration in range(1, MAX_SWEEPS):
        q = action_values_of(tables, evaluate_policy(tables, policy, discount), discount)
        better = q.max(axis=1) > (policy * q).sum(axis=1) + TIE
        if not better.any():
            return Solution(q, iteration)
        policy = np.where(better[:, None], tables.policy(greedy(q)), policy)
    raise AssertionError("policy iteration visits no policy twice")


def value_iteration(tables: Tables, discount: float) -> Solution:
    """Return the solution within 1e-11.

    Raises:
        ConfigError: the discount is 1, and values have no limit.
    """
    q = np.zeros_like(tables.reward)
    bound = TOLERANCE * (1 - discount) / discount if 0 < discount < 1 else 0.0
    for iteration in range(1, MAX_SWEEPS):
        last, q = q, action_values_of(tables, q.max(axis=1), discount)
        rounding = 2 * np.finfo(np.float64).eps * np.abs(q).max()
        if np.abs(q - last).max() <= max(bound, rounding):
            return Solution(q, iteration)
    what = f"discount {discount}: value iteration has not converged after {MAX_SWEEPS:,} sweeps"
    raise ConfigError(what, expected="a discount below 1")


def expected_total(tables: Tables, policy: Array, amount: Array) -> float:
    """Return the expected undiscounted sum of `amount` [S, A] (rewards, or costs) in an episode, with its time limit."""
    chain = np.einsum("sa,sat->st", policy, tables.continuing)
    each, state, total = (policy * amount).sum(axis=1), tables.initial, 0.0
    for _ in range(tables.max_episode_steps or MAX_STEPS):
        total += float(state @ each)
        state = state @ chain
        if state.sum() < 1e-12:
            break
    return total


def constrained_optimum(tables: Tables, discount: float, budget: float) -> Array:
    """Return the policy [S, A] of the highest value whose expected discounted cost is at most `budget`.

    A linear program over discounted visits x(s, a): maximize sum x r, with sum_a x(s', a) = initial(s') + discount sum x P,
    sum x c <= budget and x >= 0 (Altman 1999, chapter 3). The best policy may be random.

    Raises:
        ConfigError: the environment has no costs, or no policy keeps the budget.
    """
    from scipy.optimize import linprog

    if tables.cost is None:
        raise ConfigError("a budget limits costs, and the environment has none", expected="CostlyGrid-v0")
    n_states, n_actions = tables.reward.shape
    flow = np.repeat(np.eye(n_states), n_actions, axis=1)
    flow -= discount * tables.continuing.reshape(-1, n_states).T
    cost = np.where(tables.terminal[:, None], 0.0, tables.cost)
    limits = {"A_ub": cost.reshape(1, -1), "b_ub": [budget], "A_eq": flow, "b_eq": tables.initial}
    found = linprog(-tables.reward.ravel(), **limits)
    if found.status != 0:
        least = -policy_iteration(replace(tables, reward=-cost), discount).values @ tables.initial
        what = f"no policy has an expected cost of at most {budget}"
        raise ConfigError(what, expected=f"a budget of at least {least:.4g}")
    visits = found.x.reshape(n_states, n_actions)
    total = visits.sum(axis=1, keepdims=True)
    uniform = np.full_like(visits, 1 / n_actions)
    return np.asarray(np.where(total > 1e-12, visits / np.maximum(total, 1e-12), uniform))


# Learning from steps. q: [K, A] values of the state of each of K copies; policy: [K, A] the acting policy's probabilities.


NEXT_VALUES: dict[
    str, Callable[[Array, Array, NDArray[np.int64]], Array]
] = {  # (q, policy, next action) -> [K]
    "monte-carlo": lambda q, policy, action: (policy * q).sum(
        axis=1
    ),  # of a truncated episode's last state alone
    "sarsa": lambda q, policy, action: q[np.arange(len(q)), action],
    "expected-sarsa": lambda q, policy, action: (policy * q).sum(axis=1),
    "q-learning": lambda q, policy, action: q.max(axis=1),
}
ITERATIONS = {"policy-iteration": policy_iteration, "value-iteration": value_iteration}


@dataclass(frozen=True)
class LearningConfig:
    """Settings of a method that learns from steps; the acting policy is epsilon-greedy."""

    discount: float = 0.99
    episodes: int = 2_000
    step_size: float = 0.1
    epsilon: float = 0.1


def learn(
    environment: str, tables: Tables, method: str, config: LearningConfig, seeds: int, *, seed: int = 0
) -> Array:
    """Return the action values [K, S, A] that K independent runs learn, one copy of the environment each."""
    envs = make_env(environment, seeds, max_episode_steps=tables.max_episode_steps or MAX_LEARNING_STEPS)
    rng, copies, next_value = np.random.default_rng(seed), np.arange(seeds), NEXT_VALUES[method]
    q, episodes = np.zeros((seeds, *tables.reward.shape)), np.zeros(seeds, np.int64)
    steps: list[list[tuple[Any, ...]]] = [[] for _ in copies]  # of the episode, for Monte Carlo

    def act(state: NDArray[np.int64]) -> tuple[NDArray[np.int64], Array]:
        """Return epsilon-greedy actions [K] and their probabilities [K, A]. Equal actions are equally likely."""
        values = q[copies, state]
        best = values >= values.max(axis=1, keepdims=True)
        uniform = config.epsilon / values.shape[1]
        policy = (1 - config.epsilon) * best / best.sum(axis=1, keepdims=True) + uniform
        return (policy.cumsum(axis=1)[:, :-1] <= rng.random((seeds, 1))).sum(axis=1), policy

    state = envs.reset(seed).argmax(dim=1).numpy()
    action, _ = act(state)
    while (running := episodes < config.episodes).any():
        found = envs.step(torch.from_numpy(action))
        reward, terminated = found.reward.double().numpy(), found.terminated.numpy()
        reached, ended = found.final_observation.argmax(dim=1).numpy(), terminated | found.truncated.numpy()
        following, policy = act(reached)
        rest = config.discount * ~terminated * next_value(q[copies, reached], policy, following)
        if method == "monte-carlo":
            for k in copies[running]:
                steps[k].append((state[k], action[k], reward[k]))
                if ended[k]:
                    _learn_returns(q[k], steps[k], rest[k], config)
                    steps[k] = []
        else:
            error = reward + rest - q[copies, state, action]
            q[copies, state, action] += config.step_size * running * error
        episodes += ended
        state = found.observation.argmax(dim=1).numpy()
        action = np.where(ended, act(state)[0], following) if ended.any() else following
    envs.close()
    return q


def _learn_returns(q: Array, steps: list[tuple[Any, ...]], rest: float, config: LearningConfig) -> None:
    """Move q [S, A] to the returns of the first visits of an episode. rest: discounted value after its last step."""
    returns: dict[tuple[int, int], float] = {}
    total = rest / config.discount if config.discount else 0.0
    for state, action, reward in reversed(steps):
        total = reward + config.discount * total
        returns[state, action] = total  # of the earliest visit, which comes last
    for pair, value in returns.items():
        q[pair] += config.step_size * (value - q[pair])

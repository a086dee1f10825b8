"""Environments of trials: rewards, hidden goals that move, demonstrations, and what an agent may see of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from whorl.agents import make_env
from whorl.agents.environments.trials import HELD_OUT
from whorl.errors import ConfigError


def run(name: str, copies: int, policy: Any) -> tuple[Any, list[Any], list[Any]]:
    """Return the environment, the states before each step of a trial, and the transitions."""
    envs: Any = make_env(name, copies)
    envs.reset(seed=3)
    states, steps = [], []
    for _ in range(envs.spaces.trial_steps):
        states.append(envs.state.clone())
        steps.append(envs.step(policy(envs)))
    return envs, states, steps


def test_bandit_arms_pay_with_their_probabilities() -> None:
    envs, states, steps = run("bandits", 20_000, lambda envs: torch.full((20_000,), 2))
    arm = states[0][2]
    mean = torch.stack([s.reward for s in steps]).mean(0)
    for low in (0.0, 0.25, 0.5, 0.75):
        chosen = (arm >= low) & (arm < low + 0.25)
        assert mean[chosen].mean().item() == pytest.approx(arm[chosen].mean().item(), abs=0.01)
    assert [bool(s.terminated.all()) for s in steps] == [False] * 9 + [True]
    seen = steps[0].observation
    assert seen[:, 2].eq(1).all() and torch.equal(seen[:, 5], steps[0].reward) and seen[:, 6].eq(1).all()
    assert steps[-1].observation.eq(0).all()  # the next trial begins without a memory
    assert not torch.equal(envs.state[:5], states[0][:5])


def test_goal_moves_once_and_returns_fit_the_shortest_path() -> None:
    """The demonstrator walks the distance to the goal, which changes once."""
    _, states, steps = run("GoalGrid-v0", 500, lambda envs: envs.demonstrator(envs.state))
    goals, phases = torch.stack([s[1] for s in states]), torch.stack([s[4] for s in states])
    changes = goals[1:] != goals[:-1]
    assert torch.equal(changes.sum(0), torch.ones(500)) and torch.equal(changes, phases[1:] > phases[:-1])
    at = changes.int().argmax(0) + 1
    assert at.min() >= 42 and at.max() <= 64 + 7  # the episode in which the time comes ends first
    cell, goal = states[0][:2].long()
    distance = (cell // 4 - goal // 4).abs() + (cell % 4 - goal % 4).abs()
    rewards = torch.stack([s.reward for s in steps]).double()
    for copy in range(0, 500, 50):
        d = int(distance[copy])
        assert rewards[:d, copy].sum().item() == pytest.approx(1 - 0.05 * (d - 1), abs=1e-6)
        assert (
            rewards[d, copy] == 0 and steps[d - 1].observation[copy, -1] == 1
        )  # an end, then a step without effect


def test_agent_cannot_see_the_goal() -> None:
    """Two copies with different goals and the same cell have the same observation until the reward differs."""
    one: Any = make_env("GoalGrid3-v0", 1)
    two: Any = make_env("GoalGrid15-v0", 1)
    one.reset(0), two.reset(0)
    one.state[0], two.state[0] = 10.0, 10.0
    for action in (0, 1):
        a, b = (e.step(torch.tensor([action])).observation for e in (one, two))
        assert torch.equal(a, b)


def test_first_episode_of_a_shown_trial_is_the_demonstrator() -> None:
    envs, states, steps = run("GoalGridHeldOut-v0", 200, lambda envs: torch.zeros(200, dtype=torch.int64))
    assert set(envs.goals.tolist()) == set(HELD_OUT)
    first = torch.stack([(s[4] + s[5]) == 0 for s in states])
    rewards, ends = (
        torch.stack([s.reward for s in steps]),
        torch.stack([s.final_observation[:, -1] for s in steps]),
    )
    seen = torch.stack([s.final_observation[:, -2] for s in steps])
    assert not rewards[first].any() and first.sum(0).max() <= 9
    assert (seen * ends * first).amax(0).eq(1).all()  # the agent sees the demonstrator's reward


def test_unknown_goal_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"(?s)goals of GoalGrid are \(16,\).*cells from 0 to 15"):
        make_env("GoalGrid16-v0", 1)

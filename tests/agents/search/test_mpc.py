"""Model predictive control: the planner against known optima, the learned model, and returns on Pendulum."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from whorl.agents.environments.registration import make_env
from whorl.agents.methods.registration import make_config
from whorl.agents.search.mpc import cross_entropy
from whorl.agents.task import AgentTask, evaluate, open_method, train
from whorl.errors import ConfigError

SMALL = {"horizon": 15, "candidates": 32, "elites": 4, "iterations": 3}


def test_cross_entropy_finds_the_maximum_within_bounds() -> None:
    target = torch.tensor([[[0.5], [-0.25]], [[2.0], [0.0]]])  # [B, H, k]; 2 is out of bounds
    draws = torch.randn(12, 64, 2, 1, generator=torch.Generator().manual_seed(0))
    plan = cross_entropy(
        lambda x: -(x - target[:, None]).square().sum((2, 3)), torch.zeros_like(target), draws, 8
    )
    assert torch.allclose(plan, target.clamp(-1, 1), atol=0.02)


def test_true_returns_are_those_of_the_environment() -> None:
    """The plan's return equals the rewards of the same actions in the environment itself."""
    method, _ = open_method(make_config("mpc", "Pendulum-v1", dynamics="true", discount=0.9, **SMALL))
    envs = make_env("Pendulum-v1", 3)
    observation = envs.reset(5)
    plans = torch.rand(3, 1, 15, 1, generator=torch.Generator().manual_seed(1)) * 2 - 1
    wanted = sum(0.9**t * envs.step(2 * plans[:, 0, t]).reward for t in range(15))
    assert torch.allclose(method._true_returns(observation, plans)[:, 0], wanted, rtol=1e-4)


def test_mpc_on_true_dynamics_swings_up() -> None:
    config = make_config("mpc", "Pendulum-v1", dynamics="true", **SMALL)
    assert np.mean(evaluate(config, open_method(config)[1], 4, seed=3)) > -260


def test_learned_model_predicts_steps() -> None:
    plan = {"horizon": 1, "iterations": 1, "exploration": {"random_steps": 600}}
    networks = train(
        make_config(
            "mpc",
            "Pendulum-v1",
            steps=600,
            hidden=(64, 64),
            members=2,
            learning_rate=2e-3,
            updates_per_step=2,
            **plan,
        )
    )
    envs = make_env("Pendulum-v1", 64)
    observation = envs.reset(9)
    action = torch.rand(64, 1, generator=torch.Generator().manual_seed(2)) * 2 - 1
    found = envs.step(2 * action)
    with torch.no_grad():
        change, reward, goes_on = networks(observation.expand(2, -1, -1), action.expand(2, -1, -1))
    error = (change - found.final_observation).abs().mean((0, 1))
    assert (error < torch.tensor([0.03, 0.03, 0.1])).all()  # spins change by 0.6, and angles by up to 0.05
    assert (reward - found.reward).abs().mean() < 0.4 and goes_on.min() > 0.9


@pytest.mark.parametrize(
    ("environment", "settings", "message"),
    [
        ("CartPole-v1", {}, "mpc cannot act in CartPole-v1: its actions are discrete"),
        (
            "MountainCarContinuous-v0",
            {"dynamics": "true"},
            "do not determine a state(.*\n)*.*set dynamics=learned",
        ),
    ],
)
def test_mpc_refuses_what_it_cannot_plan(environment: str, settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AgentTask(make_config("mpc", environment, **settings))

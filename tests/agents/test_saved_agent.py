"""Networks of a stored agent act as they did when they were trained."""

from __future__ import annotations

import pytest
import torch

from whorl.agents.environments.registration import make_env
from whorl.agents.methods.registration import METHODS, make_config, make_method
from whorl.agents.saved_agent import restore_networks
from whorl.agents.task import open_method
from whorl.errors import ConfigError


def environment_of(method: str) -> str:
    """A small environment that the method suits."""
    kind = METHODS[method]
    if kind.needs_trials:
        return "GoalGridDemo-v0"
    if kind.players == 2 or method == "max-entropy-irl":
        return "tictactoe" if kind.players == 2 else "DryLake-v0"
    return (
        "CostlyGrid-v0" if kind.needs_costs else "Pendulum-v1" if kind.actions == "vectors" else "CartPole-v1"
    )


@pytest.mark.parametrize("method", METHODS)
def test_restored_networks_act_alike(method: str) -> None:
    options = {"members": 3} if method == "dqn" else {}  # the random priors of an ensemble are restored, too
    config = make_config(method, environment_of(method), hidden=(8,), seed=1, **options)
    networks = open_method(config)[1]
    with torch.no_grad():
        for p in networks.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(7)))
    saved = {name: p.detach().clone() for name, p in networks.named_parameters()}
    restored = restore_networks(config.model_copy(update={"seed": 2}), saved)
    spaces = (envs := make_env(config.environment, 64)).spaces
    observation = torch.randn(64, *spaces.observation_shape, generator=torch.Generator().manual_seed(0))
    if spaces.players == 2:
        observation = envs.reset(0)
    chosen = [make_method(config, spaces).greedy_action(each, observation) for each in (networks, restored)]
    assert torch.equal(*chosen)


def test_networks_of_another_version_are_named() -> None:
    config = make_config("ppo", "CartPole-v1", hidden=(8,))
    saved = {name: p.detach() for name, p in open_method(config)[1].named_parameters()}
    first, *_ = saved
    for others in ({**saved, "extra": torch.zeros(1)}, {**saved, first: torch.zeros(3)}):
        with pytest.raises(
            ConfigError, match=r"ppo in CartPole-v1: the stored networks have other parameters"
        ):
            restore_networks(config, others)

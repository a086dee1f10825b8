"""Networks of a stored agent act as they did when they were trained."""

from __future__ import annotations

import pytest
import torch

from whorl.agents.environments.registration import make_env
from whorl.agents.methods.registration import METHODS, make_config, make_method
from whorl.agents.saved_agent import restore_networks
from whorl.agents.task import open_method


def environment_of(method: str) -> str:
    """A small environment that the method suits."""
    kind = METHODS[method]
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
    spaces = make_env(config.environment, 1).spaces
    observation = torch.randn(64, *spaces.observation_shape, generator=torch.Generator().manual_seed(0))
    acting = make_method(config, spaces)
    assert torch.equal(
        acting.greedy_action(networks, observation), acting.greedy_action(restored, observation)
    )

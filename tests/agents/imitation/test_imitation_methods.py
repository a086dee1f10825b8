"""Methods that learn from demonstrations: losses against their definitions, and what they learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.demonstrations import balance, demonstrations_for

from whorl.agents.methods.registration import make_config
from whorl.agents.task import AgentTask, evaluate, open_method, train
from whorl.train.learner.learner import Learner


@pytest.mark.parametrize(
    ("method", "bar", "changes"),
    [
        ("clone", 450, {"steps": 4096, "learning_rate": 0.01}),
        ("dagger", 450, {"steps": 2048, "learning_rate": 0.01}),
        ("gail", 250, {"steps": 30_000}),
    ],
)
def test_policy_balances_as_its_expert(method: str, bar: float, changes: dict[str, Any]) -> None:
    config = make_config(method, "CartPole-v1", hidden=(32,), **changes)
    networks = train(config, demonstrations=demonstrations_for(config, episodes=4))
    assert np.mean(evaluate(config, networks, 20, 7)) > bar


def test_clone_has_the_negative_log_likelihood() -> None:
    method, networks = open_method(make_config("clone", "Pendulum-v1", hidden=(8,)))
    with torch.no_grad():
        networks.log_width.fill_(0.3)
    observation, action = torch.randn(6, 3), torch.randn(6, 1)
    loss = method.loss(networks, {"observation": observation, "action": action})  # type: ignore[attr-defined]
    normal = torch.distributions.Normal(networks.policy(observation), networks.log_width.exp())
    assert (
        loss.total.item() == pytest.approx(-normal.log_prob(action).sum().item(), rel=1e-5)
        and loss.count == 6
    )


def test_dagger_labels_visited_states_in_proportion() -> None:
    config = make_config(
        "dagger", "CartPole-v1", hidden=(8,), batch_size=100, updates=1, n_envs=2, n_steps=250
    )
    task = AgentTask(config, demonstrations_for(config))  # 1,000 steps
    rollout = {
        "observation": torch.randn(251, 2, 4), "final_observation": torch.zeros(250, 2, 4), "reward": torch.zeros(250, 2),
        "terminated": torch.zeros(250, 2, dtype=torch.bool), "truncated": torch.zeros(250, 2, dtype=torch.bool),
    }  # fmt: skip
    task.method.store.add(rollout)  # type: ignore[union-attr]
    (part,) = next(iter(task.method.minibatches(task.networks, rollout, 0)))
    assert torch.equal(part["action"], balance(part["observation"]))
    visited = (part["observation"][:, None] == rollout["observation"].flatten(0, 1)).all(-1).any(1)
    assert visited.sum() == round(100 * 500 / 1500)


def test_discriminator_weighs_absorbing_states() -> None:
    """Its optimum has the log of the ratio of visits; an end counts as discount / (1 - discount) further steps."""
    config = make_config("gail", "CartPole-v1", hidden=(4,), discount=0.9, smoothing=0.0)
    method: Any
    method, networks = open_method(config)
    method.demonstrations = demonstrations_for(config)
    part = {name: torch.zeros(4, 4) for name in ("observation", "expert_observation")}
    part |= {name: torch.zeros(4, dtype=torch.int64) for name in ("action", "expert_action")}
    expert, policy = 0.25, 0.5
    method.demonstrations.steps["terminated"] = torch.tensor([True, False, False, False])
    part["terminated"] = torch.tensor([1.0, 1.0, 0.0, 0.0])
    share = [rate * 9 / (1 + rate * 9) for rate in (expert, policy)]
    with torch.no_grad():
        networks.absorbing.fill_(np.log(share[0] / share[1]))
    method.discriminator_loss(networks, part).total.backward()
    assert networks.absorbing.grad.abs() < 1e-6


def test_gail_rewards_an_end_with_its_absorbing_state() -> None:
    config = make_config(
        "gail", "CartPole-v1", hidden=(4,), discount=0.9, minibatches=1, n_envs=1, n_steps=4, gae_lambda=1.0
    )
    method: Any
    method, networks = open_method(config)
    method.demonstrations = demonstrations_for(config)
    ended = torch.tensor([[0], [1], [0], [0]], dtype=torch.bool)
    rollout = {
        "observation": torch.randn(5, 1, 4), "final_observation": torch.randn(4, 1, 4),
        "action": torch.tensor([[0], [1], [1], [0]]), "reward": torch.full((4, 1), 7.0), "terminated": ended,
        "truncated": torch.zeros_like(ended), "behaviour_log_prob": torch.zeros(4, 1),
    }  # fmt: skip
    with torch.no_grad():
        networks.absorbing.fill_(0.5)
        logits = networks.logits(rollout["observation"][:-1, 0], rollout["action"][:, 0])
    (part,) = next(iter(method.minibatches(networks, rollout, 0)))
    assert part["target"][1].item() == pytest.approx(0.1 * logits[1].item() + 0.9 * 0.5, abs=1e-5)
    first = 0.1 * logits[0].item() + 0.9 * part["target"][1].item()
    assert part["target"][0].item() == pytest.approx(first, abs=1e-5)


def test_discriminator_and_policy_have_their_own_updates() -> None:
    config = make_config("gail", "Pendulum-v1", hidden=(8,))
    method, networks = open_method(config)
    policy, discriminator = Learner(networks, method.make_updates(networks)).updates
    own = {n for n in dict(networks.named_parameters()) if n.startswith(("discriminator.", "absorbing"))}
    assert set(discriminator.update.param_optims) == own
    assert set(policy.update.param_optims) == set(dict(networks.named_parameters())) - own

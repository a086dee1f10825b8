"""RL2: the memory of a trial, what it learns, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from whorl.agents.meta.adaptation import returns_by_episode
from whorl.agents.methods.registration import make_config
from whorl.agents.rollout import Actor, rollout_spec
from whorl.agents.task import AgentTask, evaluate, open_method, train
from whorl.errors import ConfigError
from whorl.slots import Board, FIFOReader, SerialProducer, SlotRing


def test_acting_and_learning_see_the_same_memory() -> None:
    """Log-probabilities of the actor, step by step, equal those of the learner, from whole trials."""
    config = make_config("rl2", "bandits", n_envs=6, hidden=(8,))
    method, networks = open_method(config)
    torch.nn.init.normal_(networks.policy[0].weight)
    board, spaces = Board.from_tensors(dict(networks.named_parameters())), method.spaces
    ring = SlotRing(rollout_spec(spaces, 6, 10), 1)
    with FIFOReader(ring, [SerialProducer(ring, Actor(config, 7), seed=1, board=board)]) as reader:
        for _ in range(2):
            rollout = {n: t.clone() for n, t in next(reader).tensors().items()}
            flat = method.flat(networks, rollout)
            features = networks.features(flat["observation"])
            found = networks.log_prob(networks.policy(features), flat["action"])
            assert torch.allclose(found, flat["behaviour_log_prob"], atol=1e-5)
            assert rollout["terminated"].sum(0).eq(1).all() and rollout["terminated"][-1].all()


def test_rewards_rise_over_the_pulls_of_a_trial() -> None:
    """Chance is 5 of 10, and the optimum 6.66."""
    config = make_config("rl2", "bandits", steps=250_000, hidden=(32,), n_envs=500)
    networks = train(config)
    assert np.mean(evaluate(config, networks, 4_000, 1)) > 5.8
    pulls = returns_by_episode(config, networks)
    assert pulls is not None and pulls["pulls"][-1] > pulls["pulls"][0] + 0.1


@pytest.mark.parametrize(
    ("environment", "changes", "message"),
    [
        ("CartPole-v1", {}, "rl2 with n_steps = 10 in CartPole-v1, which has no trials"),
        ("bandits", {"n_steps": 20}, "n_steps = 20 in bandits, which has trials of 10 steps"),
    ],
)
def test_rollouts_without_whole_trials_are_refused(
    environment: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        AgentTask(make_config("rl2", environment, **changes))

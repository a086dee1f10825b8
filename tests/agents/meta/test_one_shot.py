"""One-shot imitation: goals that were never trained are reached after one demonstration, and not without it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support.demonstrations import demonstrations_for

from whorl.agents.environments.registration import make_env
from whorl.agents.environments.trials import HELD_OUT, GoalGrid
from whorl.agents.meta.adaptation import returns_by_episode
from whorl.agents.methods.registration import make_config
from whorl.agents.task import AgentTask, open_method, train
from whorl.errors import ConfigError


class WithoutDemonstration(GoalGrid):
    """Held-out goals, and the same steps of an episode."""

    side, trial_steps, limit, default_goals = 5, 26, 8, HELD_OUT


def test_a_demonstration_suffices_for_a_new_goal() -> None:
    config = make_config("one-shot", "GoalGridDemo-v0", steps=520, n_envs=1, hidden=(32,), learning_rate=6e-3)
    networks = train(config, demonstrations=demonstrations_for(config, 1_000))
    after = returns_by_episode(config, networks, make_env("GoalGridHeldOut-v0", 500))
    blind = returns_by_episode(config, networks, WithoutDemonstration(500))
    assert after is not None and blind is not None
    assert after["goal"][1] > 0.75 and blind["first goal"][0] < 0.2, (after, blind)


def test_only_steps_after_the_demonstration_are_learned() -> None:
    config = make_config("one-shot", "GoalGridDemo-v0", hidden=(8,))
    method, networks = open_method(config)
    demonstrations = demonstrations_for(config, 3)
    assert demonstrations is not None
    part = {
        n: t.unflatten(0, (3, 26)) for n, t in demonstrations.steps.items() if n in ("observation", "action")
    }
    ends = part["observation"][..., -1] > 0
    learned = torch.zeros_like(ends)
    for row, column in ends.nonzero().tolist():
        learned[row, column:] = True
    learned &= ~ends
    found = method.loss(networks, part)
    assert int(found.count) == int(learned.sum())
    changed = {**part, "action": torch.where(learned, part["action"], 3 - part["action"])}
    assert torch.equal(method.loss(networks, changed).total, found.total)


def test_parts_of_trials_are_refused() -> None:
    config = make_config("one-shot", "GoalGridDemo-v0")
    demonstrations = demonstrations_for(config, 3)
    assert demonstrations is not None
    with pytest.raises(
        ConfigError, match=r"(?s)an episode of the demonstrations has 9 steps.*trials of 26 steps"
    ):
        AgentTask(config, replace(demonstrations, lengths=(26, 26, 17, 9)))

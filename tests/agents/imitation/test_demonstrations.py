"""Demonstrations: what is recorded, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support.demonstrations import balance, swing

from whorl.agents.environments.registration import make_env
from whorl.agents.imitation.demonstrations import Demonstrations, record_demonstrations
from whorl.agents.methods.registration import make_config
from whorl.agents.task import AgentTask, run_episodes
from whorl.errors import ConfigError


def episodes_of(found: Demonstrations) -> list[dict[str, torch.Tensor]]:
    parts = [torch.split(t, found.lengths) for t in found.steps.values()]
    return [dict(zip(found.steps, each, strict=True)) for each in zip(*parts, strict=True)]


@pytest.fixture(scope="module")
def pole() -> Demonstrations:
    return record_demonstrations("CartPole-v1", balance, 3, seed=5)


def test_recorded_episodes_are_those_of_the_environment(pole: Demonstrations) -> None:
    envs = make_env("CartPole-v1", 3)
    assert pole.returns == run_episodes(envs, balance, 5, max_steps=1000) == [500.0] * 3
    assert pole.lengths == [500] * 3 and 10 < pole.random_return < 40
    for number, episode in enumerate(episodes_of(pole)):
        assert torch.equal(episode["observation"][1:], episode["final_observation"][:-1])
        assert torch.equal(episode["observation"][0], envs.reset(5)[number])
        assert torch.equal(episode["action"], balance(episode["observation"]))
        assert episode["truncated"].nonzero().tolist() == [[499]] and not episode["terminated"].any()


def test_episodes_of_unequal_length_stay_apart() -> None:
    falling = record_demonstrations(
        "CartPole-v1", lambda o: torch.zeros(len(o), dtype=torch.int64), 4, seed=1
    )
    assert len(set(falling.lengths)) > 1 and len(falling) == sum(falling.lengths)
    for episode, length in zip(episodes_of(falling), falling.lengths, strict=True):
        assert len(episode["reward"]) == length and episode["terminated"].tolist() == [False] * (
            length - 1
        ) + [True]


def test_cut_episodes_are_truncated() -> None:
    found = record_demonstrations("Pendulum-v1", swing, 2, seed=0, max_steps=7)
    assert found.lengths == [7, 7] and found.steps["truncated"].nonzero().flatten().tolist() == [6, 13]
    assert found.steps["action"].abs().max() <= 2


@pytest.mark.parametrize(
    ("method", "environment", "changes", "message"),
    [
        (
            "clone",
            "Acrobot-v1",
            {},
            r"the demonstrations of CartPole-v1 have .*\(4,\) and 2 actions, and Acrobot-v1 has",
        ),
        ("clone", "CartPole-v1", {"lengths": []}, "the demonstrations of CartPole-v1 are empty"),
        (
            "clone",
            "CartPole-v1",
            {"random_return": 500.0},
            "never succeeds: its best return of 3",
        ),
        ("dagger", "CartPole-v1", {"expert": None}, "the expert of these demonstrations is not in the store"),
        ("ppo", "CartPole-v1", {}, "ppo learns from rewards, and demonstrations are given"),
    ],
    ids=["space", "empty", "failing", "expert", "method"],
)
def test_demonstrations_that_teach_nothing_are_refused(
    pole: Demonstrations, method: str, environment: str, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        AgentTask(make_config(method, environment), replace(pole, **changes))  # type: ignore[arg-type]

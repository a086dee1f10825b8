"""Built-in dynamics against gymnasium's, ends of episodes, and unsupported environments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from whorl.agents import make_env
from whorl.agents.environments.grids import GridWorld
from whorl.errors import ConfigError

gymnasium = pytest.importorskip("gymnasium")
NAMES = ["CartPole-v1", "Acrobot-v1", "Pendulum-v1", "MountainCar-v0", "FrozenLake-v1"]


def actions(environment: Any, rng: np.random.Generator) -> torch.Tensor:
    if environment.spaces.n_actions is None:
        return torch.from_numpy(rng.uniform(-2.5, 2.5, (environment.num_envs, 1)).astype(np.float32))
    return torch.from_numpy(rng.integers(0, environment.spaces.n_actions, environment.num_envs))


@pytest.mark.parametrize("name", NAMES)
def test_transitions_match_gymnasium(name: str) -> None:
    lake = name == "FrozenLake-v1"
    ours = GridWorld(5, slip_probability=0.0) if lake else make_env(name, 5)
    ours.reset(seed=3)
    references = [gymnasium.make(name, **({"is_slippery": False} if lake else {})) for _ in range(5)]

    def follow(i: int) -> None:
        """Some systems amplify rounding differences, so every step starts from the same state."""
        if not lake:
            references[i].unwrapped.state = ours.state[:, i].numpy().copy()

    for i, single in enumerate(references):
        single.reset(seed=i)
        follow(i)
    rng, episodes, rewards = np.random.default_rng(1), 0, 0.0
    for _ in range(2000 if lake else 520):
        action = actions(ours, rng)
        found = ours.step(action)
        for i, single in enumerate(references):
            taken = int(action[i]) if ours.spaces.n_actions is not None else action[i].numpy()
            seen, reward, terminated, truncated, _ = single.step(taken)
            wanted = np.eye(16)[seen] if lake else seen
            assert np.allclose(found.final_observation[i].numpy(), wanted, rtol=1e-5, atol=1e-6)
            assert float(found.reward[i]) == pytest.approx(float(reward), rel=1e-5)
            assert (bool(found.terminated[i]), bool(found.truncated[i])) == (terminated, truncated)
            rewards += float(reward)
            if terminated or truncated:
                episodes += 1
                single.reset()
            else:
                assert torch.equal(found.observation[i], found.final_observation[i])
            follow(i)
    assert episodes >= 5 and torch.equal(found.observation, ours.observe(ours.state))
    assert rewards > 0 or not lake


@pytest.mark.parametrize("name", NAMES)
def test_episode_ends_have_both_observations(name: str) -> None:
    def run(seed: int) -> tuple[list[torch.Tensor], int]:
        environment, rng = make_env(name, 64), np.random.default_rng(0)
        seen, ends = [environment.reset(seed)], 0
        for _ in range(environment.max_episode_steps + 1):
            found = environment.step(actions(environment, rng))
            ended = found.terminated | found.truncated
            ends += int(ended.sum())
            moved = (found.observation != found.final_observation).flatten(1).any(dim=1)
            assert not moved[~ended].any()
            if name != "FrozenLake-v1":  # where an episode may end at its start
                assert moved[ended].all()
            deadline = environment.step_count + environment.max_episode_steps
            assert (environment.deadline[ended] == deadline).all()
            seen.append(found.observation)
        return seen, ends

    first, ends = run(7)
    again, _ = run(7)
    assert ends >= 64 and all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    other, _ = run(8)
    assert name == "FrozenLake-v1" or not torch.equal(first[0], other[0])


def test_gymnasium_environments_step() -> None:
    environment = make_env("MountainCarContinuous-v0", 3)
    assert environment.spaces.observation_shape == (2,) and environment.spaces.n_actions is None
    assert environment.reset(seed=0).shape == (3, 2)
    for _ in range(999):
        found = environment.step(torch.zeros(3, 1))
    assert found.truncated.all() and not found.terminated.any()
    assert (found.observation != found.final_observation).any(dim=1).all()
    environment.close()
    taxi = make_env("Taxi-v4", 2)
    assert taxi.spaces.observation_shape == (500,) and taxi.spaces.n_actions == 6
    assert taxi.reset(seed=0).sum() == 2
    taxi.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_env("CartPool-v1", 2), "unknown environment 'CartPool-v1'"),
        (lambda: make_env("Blackjack-v1", 2), "Tuple"),
        (lambda: make_env("CartPole-v1", 0), "at least 1"),
        (lambda: make_env("CartPole-v1", 2).step(torch.zeros(2, dtype=torch.int64)), "call reset"),
    ],
)
def test_environment_errors(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()

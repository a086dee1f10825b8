"""Grid worlds against their tables, and tables against gymnasium's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from whorl.agents import make_env
from whorl.agents.environments.grids import CliffWalking, CostlyGrid, DeepSea, GridWorld
from whorl.agents.environments.registration import make_tables
from whorl.agents.environments.tables import tables_of_outcomes
from whorl.errors import ConfigError

GRIDS = ["FrozenLake-v1", "FrozenLake8x8-v1", "CliffWalking-v1", "CostlyGrid-v0", "DeepSea6-v0"]


@pytest.mark.parametrize("name", GRIDS)
def test_sampled_transitions_match_tables(name: str) -> None:
    """From every state and action: frequencies of next states, mean rewards and costs, and ends."""
    samples = 4_000 if "Lake" in name or "Costly" in name else 1
    tables, environment = make_tables(name), make_env(name, 1)
    n_states, n_actions = tables.reward.shape
    assert np.allclose(tables.transition.sum(axis=2), 1) and tables.initial.sum() == 1
    for state in np.flatnonzero(~tables.terminal):
        for action in range(n_actions):
            world: Any = make_env(name, samples)
            world.reset(seed=int(state) * n_actions + action)
            world.state.fill_(int(state))
            found = world.step(torch.full((samples,), action))
            reached = found.final_observation.argmax(dim=1).numpy()
            expected = tables.transition[state, action] * samples
            counted = np.bincount(reached, minlength=n_states)
            possible = expected > 0
            assert not counted[~possible].any()
            chi_square = ((counted - expected)[possible] ** 2 / expected[possible]).sum()
            assert chi_square < 25  # at most 2 degrees of freedom: 1 of 270,000
            assert (found.terminated.numpy() == tables.terminal[reached]).all()
            assert float(found.reward.mean()) == pytest.approx(tables.reward[state, action], abs=0.05)
            if tables.cost is not None:
                assert found.cost is not None
                assert float(found.cost.mean()) == pytest.approx(tables.cost[state, action], abs=0.03)
            else:
                assert found.cost is None
    assert (environment.reset(0).argmax(dim=1) == tables.initial.argmax()).all()


@pytest.mark.parametrize("name", ["FrozenLake-v1", "FrozenLake8x8-v1", "CliffWalking-v1"])
def test_tables_equal_gymnasium_outcomes(name: str) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    single = gymnasium.make(name)
    limit = single.spec.max_episode_steps
    other = tables_of_outcomes(single.unwrapped.P, single.unwrapped.initial_state_distrib, limit)
    ours = make_tables(name)
    for field in ("transition", "reward", "terminal", "initial"):
        assert np.allclose(getattr(ours, field), getattr(other, field), atol=1e-12), field
    assert ours.max_episode_steps == limit and ours.cost is None


def test_gymnasium_toy_text_has_tables() -> None:
    tables = make_tables("Taxi-v4")
    assert tables.transition.shape == (500, 6, 500) and tables.terminal.sum() == 4
    assert tables.max_episode_steps == 200 and np.count_nonzero(tables.initial) == 300
    assert tables.reward.max() == 20 and np.allclose(tables.transition.sum(axis=2), 1)


def test_grid_world_slip_probability() -> None:
    world = GridWorld(30_000, rows=("FFF", "FSF", "FFF"), slip_probability=0.25)
    world.reset(seed=0)
    found = world.step(torch.full((30_000,), 2))  # right is cell 5; slips lead down (7) or up (1)
    shares = found.observation.mean(dim=0)
    assert torch.allclose(shares[[5, 1, 7]], torch.tensor([0.5, 0.25, 0.25]), atol=0.01)


def test_cliff_walking_falls_back_to_the_start() -> None:
    world = CliffWalking(1)
    world.reset(seed=0)
    found = world.step(torch.tensor([1]))  # right, off the start: the cliff
    assert float(found.reward) == -100 and not found.terminated
    assert found.observation.argmax() == 36
    rewards = []
    for action in [0, *[1] * 11, 2]:
        found = world.step(torch.tensor([action]))
        rewards.append(float(found.reward))
    assert sum(rewards) == -13 and bool(found.terminated)


def test_deep_sea_rewards_only_the_dive_to_the_right() -> None:
    world = DeepSea(1, size=8)
    world.reset(seed=0)
    total = 0.0
    for step in range(8):
        right = int(world.move_of[:, world.state[0]].flatten().argmax())  # type: ignore[index]
        found = world.step(torch.tensor([right]))
        total += float(found.reward)
        assert bool(found.terminated) == (step == 7)
    assert total == pytest.approx(0.99, abs=1e-6)
    assert len(set(world.move_of[0].tolist())) == 2  # the action to the right differs from cell to cell
    with pytest.raises(ConfigError, match="size of DeepSea is 1"):
        make_env("DeepSea1-v0", 1)


def test_cost_belongs_to_the_step_and_not_to_the_reset() -> None:
    world = CostlyGrid(2, slip_probability=0.0, max_episode_steps=2)
    world.reset(seed=0)
    first, last = (world.step(torch.tensor([2, 1])) for _ in range(2))
    assert first.cost is not None and first.cost.tolist() == [1, 0]
    assert last.truncated.all() and last.cost is not None and last.cost.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GridWorld(1, rows=("SF", "F")), "invalid grid world"),
        (lambda: make_tables("CartPole-v1"), r"CartPole-v1 .* observations of shape \(4,\) and 2 actions"),
        (lambda: make_tables("Pendulum-v1"), "action vectors of 1"),
        (lambda: make_tables("MountainCarContinuous-v0"), "expected: a finite environment"),
    ],
)
def test_environments_without_tables_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()

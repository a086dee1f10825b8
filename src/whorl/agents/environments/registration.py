"""Environments by name: built-in dynamics where they exist, otherwise gymnasium's."""

from __future__ import annotations

import re

import torch

from whorl.agents.environments.classic_control import Acrobot, CartPole, MountainCar, Pendulum
from whorl.agents.environments.environment import BatchedEnvironment, Environment
from whorl.agents.environments.grids import (
    CliffWalking,
    CostlyGrid,
    DeepSea,
    DiagonalLake,
    DryLake,
    FrozenLake8x8,
    GridWorld,
)
from whorl.agents.environments.gymnasium_env import GymnasiumEnvironment
from whorl.agents.environments.tables import Tables
from whorl.agents.environments.trials import Bandits, DemonstratedGoalGrid, GoalGrid, HeldOutGoalGrid
from whorl.agents.search.game import ConnectFour, TicTacToe
from whorl.errors import ConfigError

TENSOR_ENVIRONMENTS: dict[str, type[BatchedEnvironment]] = {
    "CartPole-v1": CartPole,
    "Acrobot-v1": Acrobot,
    "Pendulum-v1": Pendulum,
    "MountainCar-v0": MountainCar,
    "FrozenLake-v1": GridWorld,
    "FrozenLake8x8-v1": FrozenLake8x8,
    "DryLake-v0": DryLake,
    "DiagonalLake-v0": DiagonalLake,
    "CliffWalking-v1": CliffWalking,
    "CostlyGrid-v0": CostlyGrid,
    "DeepSea-v0": DeepSea,
    "bandits": Bandits,
    "GoalGrid-v0": GoalGrid,
    "GoalGridDemo-v0": DemonstratedGoalGrid,
    "GoalGridHeldOut-v0": HeldOutGoalGrid,
    "tictactoe": TicTacToe,
    "connect4": ConnectFour,
}


def make_env(
    name: str, num_envs: int, *, max_episode_steps: int | None = None, device: str = "cpu"
) -> Environment:
    """Return `num_envs` copies of an environment by its gymnasium name, with built-in dynamics where they exist.

    `DeepSea10-v0` is DeepSea of size 10, `GoalGrid7-v0` is GoalGrid whose goal is always the cell 7.
    `max_episode_steps` replaces the environment's own time limit.

    Raises:
        ConfigError: the name is unknown, or the environment has unsupported spaces.
    """
    if name in TENSOR_ENVIRONMENTS:
        return TENSOR_ENVIRONMENTS[name](num_envs, max_episode_steps=max_episode_steps, device=device)
    if sized := re.fullmatch(r"DeepSea(\d{1,3})-v0", name):
        return DeepSea(num_envs, size=int(sized[1]), max_episode_steps=max_episode_steps, device=device)
    if fixed := re.fullmatch(r"GoalGrid(\d{1,3})-v0", name):
        return GoalGrid(num_envs, goals=(int(fixed[1]),), max_episode_steps=max_episode_steps, device=device)
    limit = {} if max_episode_steps is None else {"max_episode_steps": max_episode_steps}
    return GymnasiumEnvironment(name, num_envs, **limit)


def make_tables(name: str) -> Tables:
    """Return the tables of a finite environment.

    Raises:
        ConfigError: the name is unknown, or the environment is not finite.
    """
    environment = make_env(name, 1)
    tables, spaces = environment.tables(), environment.spaces
    environment.close()
    if tables is None:
        kind = "pixels" if spaces.observation_dtype == torch.uint8 else "observations"
        n, size, shape = spaces.n_actions, spaces.action_size, spaces.observation_shape
        actions = f"{n} actions" if n else f"action vectors of {size}"
        raise ConfigError(
            f"{name} has no table of transitions: it has {kind} of shape {shape} and {actions}",
            expected="a finite environment, such as FrozenLake-v1, CliffWalking-v1 or Taxi-v4",
            do=f"train a network: whorl rl train {'dqn' if spaces.n_actions else 'ppo'} {name}",
        )
    return tables

"""Environments by name: built-in dynamics where they exist, otherwise gymnasium's."""

from __future__ import annotations

from whorl.agents.environments.classic_control import Acrobot, CartPole, MountainCar, Pendulum
from whorl.agents.environments.environment import BatchedEnvironment, Environment
from whorl.agents.environments.grids import GridWorld
from whorl.agents.environments.gymnasium_env import GymnasiumEnvironment

TENSOR_ENVIRONMENTS: dict[str, type[BatchedEnvironment]] = {
    "CartPole-v1": CartPole,
    "Acrobot-v1": Acrobot,
    "Pendulum-v1": Pendulum,
    "MountainCar-v0": MountainCar,
    "FrozenLake-v1": GridWorld,
}


def make_env(name: str, num_envs: int, *, device: str = "cpu") -> Environment:
    """Return `num_envs` copies of an environment by its gymnasium name, with built-in dynamics where they exist.

    Raises:
        ConfigError: the name is unknown, or the environment has unsupported spaces.
    """
    if name in TENSOR_ENVIRONMENTS:
        return TENSOR_ENVIRONMENTS[name](num_envs, device=device)
    return GymnasiumEnvironment(name, num_envs)

"""Environments by name: built-in dynamics where they exist, otherwise gymnasium's."""

from __future__ import annotations

from whorl.agents.classic_control import TENSOR_ENVIRONMENTS
from whorl.agents.environments import Environment
from whorl.agents.gymnasium_env import GymnasiumEnvironment


def make_env(name: str, num_envs: int, *, device: str = "cpu") -> Environment:
    """Return `num_envs` copies of an environment by its gymnasium name, with built-in dynamics where they exist.

    Raises:
        ConfigError: the name is unknown, or the environment has unsupported spaces.
    """
    if name in TENSOR_ENVIRONMENTS:
        return TENSOR_ENVIRONMENTS[name](num_envs, device=device)
    return GymnasiumEnvironment(name, num_envs)

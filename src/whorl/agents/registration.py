"""Environments by name: our own dynamics where there are some, gymnasium's for everything else."""

from __future__ import annotations

from whorl.agents.classic_control import TENSOR_ENVIRONMENTS
from whorl.agents.environments import Environment
from whorl.agents.gymnasium_env import GymnasiumEnvironment


def make_env(name: str, num_envs: int, *, device: str = "cpu") -> Environment:
    """`n` copies of an environment by its gymnasium name: our own dynamics where there are some, else gymnasium's.

    Raises:
        ConfigError: nobody knows the name, or its spaces are of a kind that no agent here can use.
    """
    if name in TENSOR_ENVIRONMENTS:
        return TENSOR_ENVIRONMENTS[name](num_envs, device=device)
    return GymnasiumEnvironment(name, num_envs)

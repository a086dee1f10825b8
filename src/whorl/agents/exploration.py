"""Exploration: how an actor tries actions other than the best. An argument of every method.

policy    actions drawn from the method's own policy: entropy explores
epsilon   with a probability that falls during the run, a uniform random action
gaussian, ou   noise added to action vectors: independent per step, or correlated (Ornstein-Uhlenbeck)
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from whorl.agents.environments.environment import Spaces
from whorl.errors import ConfigError

OU_RATE = (
    0.15  # share of the noise that decays in a step (Lillicrap et al. 2016, arXiv:1509.02971, section 7)
)


class ExplorationConfig(BaseModel):
    """The actions that an actor tries, in addition to the policy's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["policy", "epsilon", "gaussian", "ou"] = Field(
        default="policy", description="of actions: the policy's own, random at times, or with added noise"
    )
    start: float = Field(
        default=1.0, ge=0, le=1, description="epsilon: probability of a random action at first"
    )
    end: float = Field(
        default=0.05, ge=0, le=1, description="epsilon: the same, from `fraction` of the run on"
    )
    fraction: float = Field(default=0.1, gt=0, le=1, description="epsilon: part of the run in which it falls")
    scale: float = Field(
        default=0.1, ge=0, description="gaussian, ou: deviation, in halves of the action's range"
    )

    def epsilon(self, done: float) -> float:
        """Return the probability of a random action after the fraction `done` of the run."""
        return self.start + (self.end - self.start) * min(1.0, done / self.fraction)


class Exploration:
    """The exploration of one actor. state: what the next step depends on, for a checkpoint."""

    def __init__(self, config: ExplorationConfig, spaces: Spaces, n_envs: int) -> None:
        self.config, self.spaces, self.n_envs = config, spaces, n_envs
        needed = {"epsilon": True, "gaussian": False, "ou": False}.get(config.kind)
        if needed is not None and needed != (spaces.n_actions is not None):
            raise ConfigError(
                f"exploration.kind is {config.kind!r}, and the actions are {'vectors' if needed else 'discrete'}",
                expected="policy or epsilon for discrete actions; policy, gaussian or ou for vectors",
            )
        self.state: dict[str, Tensor] = {}
        if config.kind == "ou":
            self.state["noise"] = torch.zeros(n_envs, spaces.action_size)
        if spaces.n_actions is None:
            self.half_range = (torch.tensor(spaces.action_high) - torch.tensor(spaces.action_low)) / 2

    def start(self, n_steps: int, generator: torch.Generator, done: float) -> None:
        """Draw the noise of a rollout. done: fraction of the run."""
        shape = (n_steps, self.n_envs)
        if self.spaces.n_actions is None:
            self.noise = torch.randn(*shape, self.spaces.action_size, generator=generator)
        else:
            self.noise = torch.rand(shape, generator=generator)
        if self.config.kind == "epsilon":
            assert self.spaces.n_actions is not None
            self.random = torch.rand(shape, generator=generator) < self.config.epsilon(done)
            self.random_action = torch.randint(self.spaces.n_actions, shape, generator=generator)

    def act(self, method: Any, networks: Any, observation: Tensor, t: int) -> tuple[Tensor, Tensor]:
        """Return the actions of step t of the rollout, and what `Method.log_prob` needs."""
        action, output = method.act(networks, observation, self.noise[t])
        if self.config.kind == "epsilon":
            action = torch.where(self.random[t], self.random_action[t], action)
        elif self.config.kind == "gaussian":
            action = action + self.config.scale * self.half_range * self.noise[t]
        elif self.config.kind == "ou":
            drift = self.config.scale * self.half_range * self.noise[t] * (2 * OU_RATE) ** 0.5
            self.state["noise"] = (1 - OU_RATE) * self.state["noise"] + drift
            action = action + self.state["noise"]
        return action, output

    def end_step(self, ended: Tensor) -> None:
        """Forget the state of copies whose episode ended. ended: [B]."""
        for name, tensor in self.state.items():
            self.state[name] = tensor.masked_fill(ended[:, None], 0.0)

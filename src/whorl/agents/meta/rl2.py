"""RL2: PPO whose policy reads the whole trial so far (Duan et al. 2016, arXiv:1611.02779).

With h[t] the state of a recurrent network over a trial's observations, the policy is pi(a | h[t]) and the value V(h[t]).
An observation has the last action, its reward and whether it ended an episode. The state is kept over episodes, so the
weights are trained to learn *within* a trial (also Wang et al. 2016, arXiv:1611.05763).
A rollout has whole trials, and minibatches are made of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from whorl.agents.environments.environment import Spaces
from whorl.agents.methods.method import Method, MethodConfig
from whorl.agents.methods.ppo import PPO, PPOConfig
from whorl.agents.networks import ActorCritic, make_network
from whorl.nn.recurrent import GRU
from whorl.objectives.advantages.estimators import Trajectory
from whorl.objectives.next_token import Loss
from whorl.train.learner.update import MicroBatch


class RL2Config(PPOConfig):
    method: Literal["rl2"] = "rl2"  # type: ignore[assignment]
    steps: int = Field(default=1_000_000, ge=1)
    n_envs: int = Field(default=128, ge=1)
    n_steps: int = Field(default=10, ge=1, description="steps of a trial")
    hidden: tuple[int, ...] = Field(default=(64,), min_length=1, description="widths; the last is the GRU's")
    learning_rate: float = Field(default=4e-3, gt=0)
    n_epochs: int = Field(default=3, ge=1)

    @model_validator(mode="after")
    def _validate(self) -> RL2Config:
        if self.minibatches > self.n_envs:
            raise ValueError(f"minibatches ({self.minibatches}) must be at most n_envs ({self.n_envs})")
        return self


class TrialActorCritic(ActorCritic):
    """A policy and a value function of features of a trial. The parent's methods take features in place of observations.

    hidden: widths of the layers before `trunk`, which has the memory; the last is also the trunk's.
    """

    def __init__(
        self, spaces: Spaces, hidden: tuple[int, ...], trunk: nn.Module, generator: torch.Generator
    ) -> None:
        super().__init__(replace(spaces, observation_shape=hidden[-1:]), (), generator)
        self.encoder, self.trunk = make_network(spaces, hidden[:-1], hidden[-1], 1.0, generator), trunk

    def features(self, observation: Tensor, memory: Any = None) -> Tensor:
        """Return the features [B, T, n] of T steps [B, T, d], after those in the memory."""
        found: Tensor = self.trunk(self.encoder(observation).tanh(), state=memory)
        return found


class TrialMethod(Method):
    """A method whose policy reads the whole trial so far. The end of a trial clears the memory."""

    needs_trials: ClassVar[bool] = True

    def start_rollout(self, networks: Any, copies: int) -> None:
        self.memory = networks.trunk.new_state(copies, self.spaces.trial_steps)

    def recall(self, networks: Any, observation: Tensor) -> Tensor:
        """Return the features [B, n] of a step."""
        if self.memory is None or self.memory.length >= self.spaces.trial_steps:
            self.start_rollout(networks, len(observation))
        found: Tensor = networks.features(observation[:, None], self.memory)
        return found[:, 0]

    def act(self, networks: Any, observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        return super().act(networks, self.recall(networks, observation), noise)

    def greedy_action(self, networks: Any, observation: Tensor) -> Tensor:
        return super().greedy_action(networks, self.recall(networks, observation))


class RL2(TrialMethod, PPO):
    Config: ClassVar[type[MethodConfig]] = RL2Config
    config: RL2Config

    def make_networks(self, generator: torch.Generator) -> TrialActorCritic:
        hidden = self.config.hidden
        return TrialActorCritic(self.spaces, hidden, GRU(hidden[-1], generator=generator), generator)

    def flat(self, networks: Any, rollout: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the fields of all steps by trial, each [B, T, ...]."""
        steps, copies = super().flat(networks, rollout), rollout["reward"].shape[1]
        return {n: t.view(-1, copies, *t.shape[1:]).transpose(0, 1) for n, t in steps.items()}

    def trajectory(
        self, networks: Any, rollout: Mapping[str, Tensor], critic: nn.Module | None = None
    ) -> Trajectory:
        """Return the rollout's rewards with the values of its states; a trial's end has none."""
        value = networks.values(networks.features(rollout["observation"][:-1].transpose(0, 1))).T
        following = torch.cat((value[1:], torch.zeros_like(value[:1])))
        return Trajectory(rollout["reward"], value, following, rollout["terminated"], rollout["truncated"])

    def loss(self, networks: Any, part: MicroBatch) -> Loss:
        """Return PPO's loss of whole trials."""
        steps = {name: t if name == "clip" else t.flatten(0, 1) for name, t in part.items()}
        features = networks.features(part["observation"]).flatten(0, 1)
        return super().loss(networks, {**steps, "observation": features})

"""A2C: advantage actor-critic, the parent of PPO and IMPALA (Mnih et al. 2016, arXiv:1602.01783, section 4).

REINFORCE with advantages from GAE in place of returns, and one optimizer step per rollout
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from whorl.agents.methods.method import Method, MethodConfig
from whorl.agents.networks import ActorCritic
from whorl.objectives.actor_critic import a2c
from whorl.objectives.advantages.estimators import Trajectory, gae
from whorl.objectives.next_token import Loss
from whorl.train.learner.update import MicroBatch, ParamOptim, Update, all_adamw


class A2CConfig(MethodConfig):
    """The value network learns five times faster than the policy: with lagging values, the policy stops at a plateau."""

    method: Literal["a2c"] = "a2c"
    steps: int = Field(default=200_000, ge=1)
    n_envs: int = Field(default=16, ge=1)
    n_steps: int = Field(default=8, ge=1)
    hidden: tuple[int, ...] = (64,)
    learning_rate: float = Field(default=2e-3, gt=0)
    clip_norm: float = Field(default=2.0, gt=0)
    gae_lambda: float = Field(default=0.95, ge=0, le=1, description="lambda of GAE or V-trace")
    normalize_advantage: bool = Field(default=False, description="scale them to mean 0 and deviation 1")
    value_learning_rate: float | None = Field(default=1e-2, gt=0, description="default: learning_rate")
    value_coef: float = Field(default=0.5, ge=0, description="weight of the loss of values")
    entropy_coef: float = Field(default=0.0, ge=0, description="reward for a policy's entropy")


class A2C(Method):
    Config: ClassVar[type[MethodConfig]] = A2CConfig
    config: A2CConfig

    def make_networks(self, generator: torch.Generator) -> ActorCritic:
        return ActorCritic(self.spaces, self.config.hidden, generator)

    def values(self, networks: ActorCritic, observation: Tensor) -> Tensor:
        return networks.values(observation)

    def log_prob(self, networks: ActorCritic, outputs: Tensor, action: Tensor) -> Tensor:
        return networks.log_prob(outputs, action)

    def make_updates(self, networks: ActorCritic) -> list[Update]:
        loss, clip_norm = partial(self.loss, networks), self.config.clip_norm
        return [Update(loss, self.param_optims(networks), clip_norm=clip_norm, eps=1e-5)]

    def param_optims(self, networks: ActorCritic) -> dict[str, ParamOptim]:
        """Return the optimizers: the value network has its own learning rate."""
        policy, value = self.config.learning_rate, self.config.value_learning_rate
        return {**all_adamw(networks, policy), **all_adamw(networks, value or policy, "value.")}

    def minibatches(
        self, networks: ActorCritic, rollout: Mapping[str, Tensor], step: int
    ) -> Iterator[Sequence[MicroBatch]]:
        """Yield the whole rollout once."""
        yield [self.flat(networks, rollout)]

    def flat(self, networks: ActorCritic, rollout: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return observation, action, behaviour_log_prob, advantage and target of all steps, each [T * B, ...]."""
        return {
            "observation": rollout["observation"][:-1].flatten(0, 1),
            "action": rollout["action"].flatten(0, 1),
            "behaviour_log_prob": rollout["behaviour_log_prob"].flatten(),
            **{name: t.flatten() for name, t in self.estimate_advantages(networks, rollout).items()},
        }

    @torch.no_grad()
    def estimate_advantages(self, networks: ActorCritic, rollout: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return advantage and target [T, B] of a rollout, from the newest values."""
        steps = self.trajectory(networks, rollout)
        advantage = gae(steps, self.config.discount, self.config.gae_lambda)
        return {"advantage": advantage, "target": advantage + steps.value}

    def trajectory(
        self, networks: ActorCritic, rollout: Mapping[str, Tensor], critic: nn.Module | None = None
    ) -> Trajectory:
        """Return the rollout's rewards with the values of its states; after an end, of the final observation."""

        def values(observation: Tensor) -> Tensor:
            return networks.values(observation) if critic is None else critic(observation).squeeze(-1)

        value = values(rollout["observation"])  # [T + 1, B]
        ended = rollout["terminated"] | rollout["truncated"]
        next_value = value[1:].clone()
        if ended.any():
            next_value[ended] = values(rollout["final_observation"][ended])
        flags = rollout["terminated"], rollout["truncated"]
        return Trajectory(rollout["reward"], value[:-1], next_value, *flags)

    def loss(self, networks: ActorCritic, part: MicroBatch) -> Loss:
        """Return the loss of a minibatch."""
        output = networks.evaluate_actions(part["observation"], part["action"])
        return a2c(output, self.scaled(part["advantage"]), part["target"], **self.coefficients)

    @property
    def coefficients(self) -> dict[str, float]:
        return {"value_coef": self.config.value_coef, "entropy_coef": self.config.entropy_coef}

    def scaled(self, advantage: Tensor) -> Tensor:
        """Return advantages with mean 0 and standard deviation 1, or unchanged, by `normalize_advantage`."""
        if not self.config.normalize_advantage or len(advantage) < 2:
            return advantage
        deviation, mean = torch.std_mean(advantage)
        return (advantage - mean) / (deviation + 1e-8)

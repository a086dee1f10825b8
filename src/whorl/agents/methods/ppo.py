"""PPO: A2C with a clipped ratio, which allows several passes over a rollout (Schulman et al. 2017, arXiv:1707.06347)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from whorl.agents.methods.a2c import A2C, A2CConfig
from whorl.agents.methods.method import MethodConfig
from whorl.agents.networks import ActorCritic
from whorl.objectives.actor_critic import ppo
from whorl.objectives.next_token import Loss
from whorl.tracking.seeds import generator
from whorl.train.learner.update import MicroBatch

MIN_CLIP_FRACTION = 0.05  # of the initial clip


class PPOConfig(A2CConfig):
    method: Literal["ppo"] = "ppo"  # type: ignore[assignment]
    steps: int = Field(default=100_000, ge=1)
    n_steps: int = Field(default=64, ge=1)
    hidden: tuple[int, ...] = (64, 64)
    learning_rate: float = Field(default=1e-3, gt=0)
    value_learning_rate: float | None = Field(default=None, gt=0)
    clip_norm: float = Field(default=0.5, gt=0)
    normalize_advantage: bool = True
    n_epochs: int = Field(default=10, ge=1, description="passes over each rollout")
    minibatches: int = Field(default=4, ge=1, description="minibatches per pass, one optimizer step each")
    clip: float = Field(default=0.2, gt=0, description="range of the ratio around 1")

    @model_validator(mode="after")
    def _validate(self) -> PPOConfig:
        if self.minibatches > self.n_envs * self.n_steps:
            most = self.n_envs * self.n_steps
            raise ValueError(f"minibatches ({self.minibatches}) must be at most n_envs x n_steps ({most})")
        return self


class PPO(A2C):
    Config: ClassVar[type[MethodConfig]] = PPOConfig
    config: PPOConfig

    def minibatches(
        self, networks: ActorCritic, rollout: Mapping[str, Tensor], step: int
    ) -> Iterator[Sequence[MicroBatch]]:
        """Yield several passes over the steps, in random order.

        During the run the clip narrows and the number of passes falls together with the learning rate. A good policy then
        changes less, and late rollouts cost less time.
        """
        config, flat = self.config, self.flat(networks, rollout)
        remaining = config.remaining_fraction(step)
        clip = {"clip": torch.tensor(config.clip * max(remaining, MIN_CLIP_FRACTION))}
        n, rng = len(flat["action"]), generator(config.seed, "order", step)
        for _ in range(max(1, round(config.n_epochs * remaining))):
            if config.minibatches == 1:  # the full batch: order has no effect
                yield [{**flat, **clip}]
                continue
            order = torch.randperm(n, generator=rng)
            parts = [t[order].tensor_split(config.minibatches) for t in flat.values()]
            for values in zip(*parts, strict=True):
                yield [{**dict(zip(flat, values, strict=True)), **clip}]

    def loss(self, networks: ActorCritic, part: MicroBatch) -> Loss:
        """Return the loss of a minibatch."""
        output = networks.evaluate_actions(part["observation"], part["action"])
        return ppo(
            output, part["behaviour_log_prob"], self.scaled(part["advantage"]), part["target"], clip=part["clip"],
            **self.coefficients,
        )  # fmt: skip

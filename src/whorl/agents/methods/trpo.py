"""TRPO: A2C whose policy moves by the natural gradient, as far as a KL divergence allows (Schulman et al. 2015).

    minimize  - mean ratio x A    subject to    mean KL(old || new) <= limit

The value network is trained in several passes over the rollout. Source: arXiv:1502.05477.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from whorl.agents.methods.a2c import A2C, A2CConfig
from whorl.agents.methods.method import MethodConfig
from whorl.agents.methods.natural_gradient import conjugate_gradients, fisher_product, line_search
from whorl.agents.networks import ActorCritic
from whorl.objectives.actor_critic import surrogate, value_regression
from whorl.objectives.next_token import Loss
from whorl.train.learner.update import MicroBatch, Update


class TRPOConfig(A2CConfig):
    method: Literal["trpo"] = "trpo"  # type: ignore[assignment]
    steps: int = Field(default=100_000, ge=1)
    n_steps: int = Field(default=64, ge=1)
    hidden: tuple[int, ...] = (64, 64)
    normalize_advantage: bool = True
    anneal: bool = False
    kl_limit: float = Field(default=0.02, gt=0, description="mean KL divergence of a step, nats")
    damping: float = Field(default=1e-2, ge=0, description="added to the Fisher matrix")
    value_passes: int = Field(default=10, ge=1, description="steps of the value network per rollout")
    value_learning_rate: float | None = Field(default=3e-3, gt=0)

    @model_validator(mode="after")
    def _is_on_policy(self) -> TRPOConfig:
        if self.actors:
            raise ValueError("actors must be 0: a trust region is for rollouts of the newest policy")
        return self


class TRPO(A2C):
    Config: ClassVar[type[MethodConfig]] = TRPOConfig
    config: TRPOConfig
    without_effect = ("learning_rate", "entropy_coef", "value_coef")

    def make_updates(self, networks: ActorCritic) -> list[Update]:
        optims = self.param_optims(networks)
        values = {n: p for n, p in optims.items() if "value." in n}
        policy = {n: p for n, p in optims.items() if n not in values}
        return [
            Update(
                partial(self.policy_loss, networks), policy, clip_norm=float("inf"), every=self.config.value_passes,
                apply=partial(self.move, networks),
            ),
            Update(partial(self.value_loss, networks), values, clip_norm=self.config.clip_norm, eps=1e-5),
        ]  # fmt: skip

    def minibatches(
        self, networks: ActorCritic, rollout: Mapping[str, Tensor], step: int
    ) -> Iterator[Sequence[MicroBatch]]:
        """Yield the whole rollout once per pass of the value network; the policy moves at the first."""
        flat = self.flat(networks, rollout)
        flat["advantage"] = self.scaled(flat["advantage"])
        with torch.no_grad():
            flat["distribution"] = networks.policy(flat["observation"])
            flat["old_log_prob"] = networks.log_prob(flat["distribution"], flat["action"])
        if networks.log_width is not None:
            flat["old_log_width"] = networks.log_width.detach().clone()
        yield from ([flat] for _ in range(self.config.value_passes))

    def policy_loss(self, networks: ActorCritic, part: MicroBatch) -> Loss:
        """Return the surrogate loss, and keep its minibatch for `move`."""
        self.part = part
        return surrogate(self.log_prob_of(networks, part), part["old_log_prob"], part["advantage"])

    def value_loss(self, networks: ActorCritic, part: MicroBatch) -> Loss:
        return value_regression(networks.values(part["observation"]), part["target"])

    def log_prob_of(self, networks: ActorCritic, part: MicroBatch) -> Tensor:
        """Return the log-probabilities [N] of the actions taken, by the current policy."""
        return networks.log_prob(networks.policy(part["observation"]), part["action"])

    def kl(self, networks: ActorCritic, part: MicroBatch) -> Tensor:
        """Return the mean KL divergence from the policy at the start of the step to the current one."""
        return networks.kl(part["distribution"], part.get("old_log_width"), part["observation"])

    def move(self, networks: ActorCritic, parameters: Sequence[Tensor], gradient: Tensor) -> dict[str, float]:
        """Take one step along the natural gradient; `parameters` and their mean gradient [P] of the loss."""
        config, part = self.config, self.part
        product = fisher_product(lambda: self.kl(networks, part), parameters, config.damping)
        direction = -conjugate_gradients(product, gradient)
        curvature = float(direction @ product(direction))
        if curvature <= 0:  # no gradient
            return {"step_share": 0.0, "kl": 0.0}
        step = direction * (2 * config.kl_limit / curvature) ** 0.5
        return self.search(networks, parameters, step)

    def search(self, networks: ActorCritic, parameters: Sequence[Tensor], step: Tensor) -> dict[str, float]:
        """Take the longest part of a step within the limits; return it and its KL divergence."""
        part = self.part
        before = self.losses(networks)

        def accept() -> bool:
            near = bool(self.kl(networks, part) <= self.config.kl_limit)
            return near and self.improves(before, self.losses(networks))

        share = line_search(parameters, step, accept)
        with torch.no_grad():
            return {"step_share": share, "kl": float(self.kl(networks, part))}

    @torch.no_grad()
    def losses(self, networks: ActorCritic) -> tuple[float, ...]:
        """Return the mean surrogate loss at the current weights."""
        ratio = (self.log_prob_of(networks, self.part) - self.part["old_log_prob"]).exp()
        return (-float((ratio * self.part["advantage"]).mean()),)

    def improves(self, before: tuple[float, ...], after: tuple[float, ...]) -> bool:
        return after[0] < before[0]

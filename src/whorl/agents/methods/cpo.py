"""CPO: TRPO with a limit on the cost of an episode (Achiam et al. 2017, arXiv:1705.10528).

    minimize  g x    subject to    c + b x <= 0    and    x H x / 2 <= kl_limit

g, b: gradients of the loss and of the cost; c: the cost above its limit. The two multipliers have a closed form (theorem 2).
If no step within the trust region satisfies the limit, the step lowers the cost alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from whorl.agents.methods.method import MethodConfig
from whorl.agents.methods.natural_gradient import conjugate_gradients, fisher_product
from whorl.agents.methods.trpo import TRPO, TRPOConfig
from whorl.agents.networks import ActorCritic, make_network
from whorl.objectives.actor_critic import value_regression
from whorl.objectives.advantages.estimators import gae
from whorl.objectives.next_token import Loss
from whorl.train.learner.update import MicroBatch


class CPOConfig(TRPOConfig):
    """Rollouts are longer than those of TRPO: the mean cost of an episode, which has the limit, varies much."""

    method: Literal["cpo"] = "cpo"  # type: ignore[assignment]
    environment: str = "CostlyGrid-v0"
    n_steps: int = Field(default=256, ge=1)
    cost_limit: float = Field(default=1.0, ge=0, description="mean cost of an episode, undiscounted")
    clip_norm: float = Field(default=10.0, gt=0)


@dataclass(frozen=True)
class Multipliers:
    """lambda of the trust region and nu of the cost; recover: no step satisfies the limit."""

    trust: float
    cost: float
    recover: bool = False


def solve_dual(q: float, r: float, s: float, c: float, limit: float) -> Multipliers:
    """Return the multipliers of: minimize g x with c + b x <= 0 and x H x <= limit.

    Args:
        q, r, s: g H^-1 g, g H^-1 b and b H^-1 b.
    """
    if q <= 0:  # no gradient: only the cost can fall
        return Multipliers(1.0, 0.0, recover=c > 0 and s > 0)
    if s <= 1e-12 or (c < 0 and c * c / s > limit):  # no step within the trust region reaches the cost limit
        return Multipliers((q / limit) ** 0.5, 0.0)
    if c > 0 and c * c / s > limit:
        return Multipliers(0.0, 0.0, recover=True)
    a, b = max(q - r * r / s, 0.0), max(limit - c * c / s, 1e-12)
    edge = r / c if c else 0.0  # nu > 0 where lambda c > r
    bounds_a, bounds_b = ((edge, float("inf")), (0.0, edge)) if c > 0 else ((0.0, edge), (edge, float("inf")))
    if c == 0:
        everything, nothing = (0.0, float("inf")), (0.0, 0.0)
        bounds_a, bounds_b = (everything, nothing) if r < 0 else (nothing, everything)

    def project(x: float, bounds: tuple[float, float]) -> float:
        return max(bounds[0], min(bounds[1], x), 1e-12)

    at_a, at_b = project((a / b) ** 0.5, bounds_a), project((q / limit) ** 0.5, bounds_b)
    value_a = -a / (2 * at_a) - at_a * b / 2 - r * c / s if bounds_a[1] > 0 else -float("inf")
    value_b = -(q / at_b + at_b * limit) / 2 if bounds_b[1] > 0 else -float("inf")
    trust = at_a if value_a >= value_b else at_b
    return Multipliers(trust, max(0.0, (trust * c - r) / s))


class CPO(TRPO):
    Config: ClassVar[type[MethodConfig]] = CPOConfig
    config: CPOConfig
    needs_costs = True

    def make_networks(self, generator: torch.Generator) -> ActorCritic:
        networks = super().make_networks(generator)
        networks.cost_value = make_network(self.spaces, self.config.hidden, 1, 1.0, generator)
        return networks

    def minibatches(
        self, networks: ActorCritic, rollout: Mapping[str, Tensor], step: int
    ) -> Iterator[Sequence[MicroBatch]]:
        """Yield the minibatches of TRPO, with advantages of the cost and its excess over the limit."""
        config = self.config
        with torch.no_grad():
            costs = self.trajectory(networks, {**rollout, "reward": rollout["cost"]}, networks.cost_value)
            advantage = gae(costs, config.discount, config.gae_lambda)
        ends = int((rollout["terminated"] | rollout["truncated"]).sum())
        length = rollout["cost"].numel() / max(1, ends)  # mean steps of an episode
        added = {
            "cost_advantage": (advantage - advantage.mean()).flatten(),
            "cost_target": (advantage + costs.value).flatten(),
            "excess": rollout["cost"].mean() - config.cost_limit / length,  # per step
        }
        for (part,) in super().minibatches(networks, rollout, step):
            yield [{**part, **added}]

    def value_loss(self, networks: ActorCritic, part: MicroBatch) -> Loss:
        """Return the loss of both value networks."""
        assert networks.cost_value is not None
        reward = super().value_loss(networks, part)
        cost = value_regression(networks.cost_value(part["observation"]).squeeze(-1), part["cost_target"])
        return Loss(reward.total + cost.total, reward.count, {"excess_cost": part["excess"] * reward.count})

    def move(self, networks: ActorCritic, parameters: Sequence[Tensor], gradient: Tensor) -> dict[str, float]:
        """Take one step by the closed form of the two multipliers."""
        config, part = self.config, self.part
        product = fisher_product(lambda: self.kl(networks, part), parameters, config.damping)
        ratio = (self.log_prob_of(networks, part) - part["old_log_prob"]).exp()
        pieces = torch.autograd.grad((ratio * part["cost_advantage"]).mean(), list(parameters))
        of_cost = torch.cat([piece.reshape(-1) for piece in pieces])
        along, along_cost = conjugate_gradients(product, gradient), conjugate_gradients(product, of_cost)
        q, r, s = float(gradient @ along), float(gradient @ along_cost), float(of_cost @ along_cost)
        limit = 2 * config.kl_limit
        found = solve_dual(q, r, s, float(part["excess"]), limit)
        self.recovering = found.recover
        if self.recovering:
            return self.search(networks, parameters, -along_cost * (limit / s) ** 0.5)
        step = -(along + found.cost * along_cost) / found.trust
        return {**self.search(networks, parameters, step), "cost_multiplier": found.cost}

    @torch.no_grad()
    def losses(self, networks: ActorCritic) -> tuple[float, ...]:
        """Return the mean surrogate loss and the mean surrogate cost at the current weights."""
        ratio = (self.log_prob_of(networks, self.part) - self.part["old_log_prob"]).exp()
        return (*super().losses(networks), float((ratio * self.part["cost_advantage"]).mean()))

    def improves(self, before: tuple[float, ...], after: tuple[float, ...]) -> bool:
        """Whether the loss falls and the cost stays within its limit; above the limit, whether the cost falls."""
        excess = float(self.part["excess"])
        if self.recovering or excess > 0:  # a step back to the limit may have to raise the loss
            return after[1] < before[1]
        return after[0] < before[0] and after[1] - before[1] <= -excess

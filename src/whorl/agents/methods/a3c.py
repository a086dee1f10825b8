"""A3C: A2C whose actors compute the gradients, each when it is ready (Mnih et al. 2016, arXiv:1602.01783).

A record carries the gradient of its rollout, with the weights that acted. The learner takes one optimizer step for each, in
the order in which they arrive. With one actor in lockstep this is A2C, bit for bit.

With `hogwild` the actors also take the steps: each adds its own to the shared weights, without a lock (Recht et al. 2011,
arXiv:1106.5730). Steps of two actors at one moment may then be lost in part; the steps are those of gradient descent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from whorl.agents.methods.a2c import A2C, A2CConfig
from whorl.agents.methods.method import MethodConfig
from whorl.agents.networks import ActorCritic
from whorl.objectives.next_token import Loss
from whorl.train.asynchronous.gradient import recorded_loss
from whorl.train.learner.update import MicroBatch, Update


class A3CConfig(A2CConfig):
    method: Literal["a3c"] = "a3c"  # type: ignore[assignment]
    actors: int = Field(default=2, ge=0)
    hogwild: bool = Field(default=False, description="actors move the shared weights, without a lock")


class A3C(A2C):
    Config: ClassVar[type[MethodConfig]] = A3CConfig
    config: A3CConfig
    actors_differentiate = True

    def rollout_loss(self, networks: ActorCritic, rollout: Mapping[str, Tensor]) -> Loss:
        return self.loss(networks, self.flat(networks, rollout))

    def actor_rates(self, networks: ActorCritic, step: int) -> dict[str, float] | None:
        if not self.config.hogwild:
            return None
        scale = self.config.remaining_fraction(step)
        return {n: scale * p.lr for n, p in self.param_optims(networks).items()}

    def make_updates(self, networks: ActorCritic) -> list[Update]:
        if self.config.hogwild:
            return []
        parameters = [*networks.parameters()]

        def objective(part: MicroBatch) -> Loss:
            return recorded_loss(parameters, part["gradient"][:-2], *part["gradient"][-2:])

        return [replace(super().make_updates(networks)[0], objective=objective)]

    def minibatches(
        self, networks: ActorCritic, rollout: Mapping[str, Tensor], step: int
    ) -> Iterator[Sequence[MicroBatch]]:
        """Yield the gradient of the record."""
        yield [{"gradient": rollout["gradient"]}]

"""Off-policy methods: minibatches are drawn from the steps of many earlier policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import psutil
from pydantic import Field, model_validator
from torch import Tensor

from whorl.agents.environments.environment import step_fields
from whorl.agents.methods.method import Method, MethodConfig
from whorl.slots.replay import TransitionStore
from whorl.tracking.seeds import numpy_rng
from whorl.train.learner.update import MicroBatch


class ReplayConfig(MethodConfig):
    n_envs: int = Field(default=4, ge=1)
    n_steps: int = Field(default=4, ge=1)
    capacity: int = Field(default=100_000, ge=2, description="steps in the replay buffer")
    learning_starts: int = Field(default=1_000, ge=1, description="steps before the first update")
    batch_size: int = Field(default=256, ge=1, description="steps in a minibatch")
    updates_per_step: float = Field(default=1.0, gt=0, description="updates per environment step")
    n_step: int = Field(default=1, ge=1, description="rewards before the estimate of the rest")
    priority_exponent: float = Field(default=0.0, ge=0, le=1, description="0 draws uniformly, 1 by TD error")
    anneal: bool = False

    @model_validator(mode="after")
    def _fits(self) -> ReplayConfig:
        if self.capacity < 4 * self.rollout_steps:  # a ring holds a rollout, with final observations
            least = 4 * self.rollout_steps
            raise ValueError(f"capacity ({self.capacity}) must be at least 4 rollouts ({least} steps)")
        if self.learning_starts > min(self.capacity, self.steps):
            most = f"steps ({self.steps}) and capacity ({self.capacity})"
            raise ValueError(f"learning_starts ({self.learning_starts}) must be at most {most}")
        return self

    @property
    def updates_per_rollout(self) -> int:
        return max(1, round(self.updates_per_step * self.rollout_steps))


class ReplayMethod(Method):
    Config: ClassVar[type[MethodConfig]]
    config: ReplayConfig
    store: TransitionStore

    def make_store(self, copies: int) -> None:
        """Allocate the buffer.

        Raises:
            ConfigError: it is larger than the free memory.
        """
        fields = step_fields(self.spaces, self.n_outputs)
        del fields["behaviour_log_prob"]
        self.store = TransitionStore(
            self.config.capacity, copies, fields, alpha=self.config.priority_exponent,
            memory=psutil.virtual_memory().available,
        )  # fmt: skip

    def minibatches(
        self, networks: Any, rollout: Mapping[str, Tensor], step: int
    ) -> Iterator[Sequence[MicroBatch]]:
        """Yield minibatches of the stored steps, once there are enough of them."""
        config, rng = self.config, numpy_rng(self.config.seed, "replay", step)
        if len(self.store) >= config.learning_starts:
            for _ in range(config.updates_per_rollout):
                yield [
                    self.store.draw(config.batch_size, rng, discount=config.discount, n_steps=config.n_step)
                ]

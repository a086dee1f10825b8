"""IMPALA: A2C on rollouts of asynchronous actors, corrected by V-trace (Espeholt et al. 2018, arXiv:1802.01561)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from whorl.agents.methods.a2c import A2C, A2CConfig
from whorl.agents.methods.method import MethodConfig
from whorl.agents.networks import ActorCritic
from whorl.objectives.advantages.estimators import v_trace


class IMPALAConfig(A2CConfig):
    method: Literal["impala"] = "impala"  # type: ignore[assignment]
    actors: int = Field(default=2, ge=0)
    v_trace: bool = Field(default=True, description="correct stale rollouts; false: GAE, as if fresh")


class IMPALA(A2C):
    Config: ClassVar[type[MethodConfig]] = IMPALAConfig
    config: IMPALAConfig

    @torch.no_grad()
    def estimate_advantages(self, networks: ActorCritic, rollout: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return advantage and target [T, B], with the newest values and the ratio of the newest policy to the actor's."""
        config = self.config
        if not config.v_trace:
            return super().estimate_advantages(networks, rollout)
        steps = self.trajectory(networks, rollout)
        log_prob = networks.log_prob(networks.policy(rollout["observation"][:-1]), rollout["action"])
        ratio = log_prob - rollout["behaviour_log_prob"]
        estimate = v_trace(steps, ratio, config.discount, lambda_=config.gae_lambda)
        return {"advantage": estimate.advantage, "target": estimate.target}

"""REINFORCE: A2C with whole returns in place of estimated advantages (Williams 1992, doi:10.1007/BF00992696).

    gradient   grad log pi(a|s) (G - b),   G the discounted rewards to the end of the episode

The baseline b changes the variance of the gradient and not its mean: none, a moving average of G, or a learned V(s).
Only steps whose episode ends in the rollout count, because G of the others is not known yet. Where a time limit cut an
episode off, the learned baseline gives the value of what would follow; the others count what was received.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from whorl.agents.methods.a2c import A2C, A2CConfig
from whorl.agents.methods.method import MethodConfig
from whorl.agents.networks import ActorCritic
from whorl.objectives.advantages.estimators import Trajectory, discounted_returns
from whorl.train.learner.update import ParamOptim


class REINFORCEConfig(A2CConfig):
    method: Literal["reinforce"] = "reinforce"  # type: ignore[assignment]
    n_steps: int = Field(default=500, ge=1)
    n_envs: int = Field(default=8, ge=1)
    steps: int = Field(default=400_000, ge=1)
    learning_rate: float = Field(default=1e-2, gt=0)
    baseline: Literal["none", "moving-average", "learned"] = Field("learned", description="of returns")
    baseline_decay: float = Field(default=0.9, ge=0, lt=1, description="of the moving average, per rollout")


class REINFORCE(A2C):
    Config: ClassVar[type[MethodConfig]] = REINFORCEConfig
    config: REINFORCEConfig
    without_effect = ("gae_lambda",)

    def make_networks(self, generator: torch.Generator) -> ActorCritic:
        networks = super().make_networks(generator)
        networks.register_buffer("mean_return", torch.zeros(1))
        return networks

    def param_optims(self, networks: ActorCritic) -> dict[str, ParamOptim]:
        """Return the optimizers, without those of the value network if it is not used."""
        found = super().param_optims(networks)
        learned = self.config.baseline == "learned"
        return {n: p for n, p in found.items() if learned or not n.startswith("value.")}

    @torch.no_grad()
    def estimate_advantages(self, networks: ActorCritic, rollout: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return G - b and G, each [T, B]; both without effect at steps whose episode does not end in the rollout."""
        config, steps = self.config, self.trajectory(networks, rollout)
        if config.baseline != "learned":
            zero = torch.zeros_like(steps.value)
            steps = Trajectory(steps.reward, zero, zero, steps.terminated, steps.truncated)
        returns = discounted_returns(steps, config.discount)
        known = steps.episode_end.flip(0).cumsum(0).flip(0) > 0
        if config.baseline == "learned":
            returns = torch.where(known, returns, steps.value)
            return {"advantage": returns - steps.value, "target": returns}
        mean = networks.get_buffer("mean_return")
        baseline = mean.clone() if config.baseline == "moving-average" else torch.zeros(1)
        if known.any():
            mean.lerp_(returns[known].mean(), 1 - config.baseline_decay)
        return {"advantage": torch.where(known, returns - baseline, 0.0), "target": returns}

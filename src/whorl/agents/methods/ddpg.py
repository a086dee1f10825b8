"""DDPG: Q-learning with a policy that gives the maximum, for vector actions (Lillicrap et al. 2016, arXiv:1509.02971).

TD3 is DDPG with the options of Fujimoto et al. 2018, arXiv:1802.09477:

    n_critics      2: targets are the least of two critics, which overestimates less
    policy_every   2: the policy moves every second update
    target_noise   0.2: the next action of a target is disturbed, so that neighbouring actions have similar values
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from whorl.agents.exploration import ExplorationConfig
from whorl.agents.methods.method import MethodConfig
from whorl.agents.methods.replayed import ReplayConfig, ReplayMethod
from whorl.agents.networks import PolicyAndCritics
from whorl.objectives.action_value import critics_loss, deterministic_policy_loss
from whorl.objectives.next_token import Loss
from whorl.tracking.seeds import generator
from whorl.train.learner.average import Average
from whorl.train.learner.update import MicroBatch, Update, all_adamw

NOISE_LIMIT = 2.5  # of target_noise, in deviations: 0.5 of TD3's 0.2


class DDPGConfig(ReplayConfig):
    method: Literal["ddpg"] = "ddpg"
    environment: str = "Pendulum-v1"
    steps: int = Field(default=20_000, ge=1)
    n_envs: int = Field(default=1, ge=1)
    n_steps: int = Field(default=8, ge=1)
    hidden: tuple[int, ...] = (256, 256)
    clip_norm: float = Field(default=1e6, gt=0)
    average: float = Field(default=0.995, ge=0, le=1, description="decay of the target networks, per update")
    n_critics: int = Field(default=1, ge=1, description="targets are the least of their values")
    policy_every: int = Field(default=1, ge=1, description="updates of the critics per update of the policy")
    target_noise: float = Field(default=0.0, ge=0, description="of a target's action, in halves of its range")
    exploration: ExplorationConfig = ExplorationConfig(kind="gaussian", random_steps=1_000)


class TD3Config(DDPGConfig):
    method: Literal["td3"] = "td3"  # type: ignore[assignment]
    n_critics: int = Field(default=2, ge=1)
    policy_every: int = Field(default=2, ge=1)
    target_noise: float = Field(default=0.2, ge=0)


class DDPG(ReplayMethod):
    Config: ClassVar[type[MethodConfig]] = DDPGConfig
    config: DDPGConfig
    actions, acted_weights = "vectors", ("policy.",)

    def make_networks(self, generator: torch.Generator) -> PolicyAndCritics:
        config, spaces = self.config, self.spaces
        return PolicyAndCritics(
            spaces, config.hidden, generator, n_out=spaces.action_size, n_critics=config.n_critics,
            target_policy=True,
        )  # fmt: skip

    def act(self, networks: PolicyAndCritics, observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        action = self.greedy_action(networks, observation)
        return action, action

    def greedy_action(self, networks: PolicyAndCritics, observation: Tensor) -> Tensor:
        return networks.squash(networks.policy(observation))

    def make_updates(self, networks: PolicyAndCritics) -> list[Update]:
        config = self.config
        return [
            Update(
                partial(self.critics_loss, networks), all_adamw(networks, config.learning_rate, "critics."),
                clip_norm=config.clip_norm,
            ),
            Update(
                partial(self.policy_loss, networks), all_adamw(networks, config.learning_rate, "policy."),
                clip_norm=config.clip_norm, every=config.policy_every,
            ),
        ]  # fmt: skip

    def averages(self) -> list[Average]:
        every = self.config.policy_every
        return [
            Average(f"{name}.", self.config.average, every=every, target=f"target_{name}.")
            for name in ("critics", "policy")
        ]

    def minibatches(
        self, networks: PolicyAndCritics, rollout: Mapping[str, Tensor], step: int
    ) -> Iterator[Sequence[MicroBatch]]:
        """Yield drawn minibatches, with normal noise [N, k] for the actions of the targets."""
        rng = generator(self.config.seed, "target noise", step)
        for (part,) in super().minibatches(networks, rollout, step):
            yield [{**part, "noise": torch.randn(part["action"].shape, generator=rng)}]

    def critics_loss(self, networks: PolicyAndCritics, part: MicroBatch) -> Loss:
        """Return the loss of the critics."""
        with torch.no_grad():
            action = networks.squash(networks.target_policy(part["next_observation"]))
            if scale := self.config.target_noise:
                noise = networks.half_range * scale * part["noise"].clamp(-NOISE_LIMIT, NOISE_LIMIT)
                bounds = networks.middle - networks.half_range, networks.middle + networks.half_range
                action = torch.minimum(torch.maximum(action + noise, bounds[0]), bounds[1])
            least = networks.values(networks.target_critics, part["next_observation"], action).amin(0)
            target = part["reward"] + part["next_discount"] * least
        values = networks.values(networks.critics, part["observation"], part["action"])
        return critics_loss(values, target, part["weight"])

    def policy_loss(self, networks: PolicyAndCritics, part: MicroBatch) -> Loss:
        """Return the loss of the policy: the first critic's value of its actions, negated."""
        action = networks.squash(networks.policy(part["observation"]))
        return deterministic_policy_loss(networks.values(networks.critics, part["observation"], action)[0])


class TD3(DDPG):
    """TD3: DDPG with the least of two critics, a policy that moves every second update, and disturbed targets."""

    Config: ClassVar[type[MethodConfig]] = TD3Config

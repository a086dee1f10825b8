"""DQN: Q-learning with a network, a replay buffer and a target network (Mnih et al. 2015, doi:10.1038/nature14236).

loss = huber(Q(s, a) - y),    y = r + discount max_b Q'(s', b)

double        y = r + discount Q'(s', argmax_b Q(s', b))   less overestimation (van Hasselt et al. 2016, arXiv:1509.06461)
duelling      Q = V + A - mean A                             (Wang et al. 2016, arXiv:1511.06581)
n_step        y sums n rewards before Q'                     (Hessel et al. 2018, arXiv:1710.02298)
priority_exponent   draws by TD error                        (Schaul et al. 2016, arXiv:1511.05952)
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from whorl.agents.exploration import ExplorationConfig
from whorl.agents.methods.method import MethodConfig
from whorl.agents.methods.replayed import ReplayConfig, ReplayMethod
from whorl.agents.networks import QNetworks
from whorl.objectives.action_value import q_loss, q_target
from whorl.objectives.next_token import Loss
from whorl.train.learner.average import Average
from whorl.train.learner.update import MicroBatch, Update, all_adamw

MIN_PRIORITY = 1e-6


class DQNConfig(ReplayConfig):
    method: Literal["dqn"] = "dqn"
    steps: int = Field(default=50_000, ge=1)
    hidden: tuple[int, ...] = (128, 128)
    batch_size: int = Field(default=128, ge=1)
    clip_norm: float = Field(default=10.0, gt=0)
    double: bool = Field(default=True, description="choose the next action with the trained network")
    duelling: bool = Field(default=False, description="Q as the sum of a value and advantages")
    target_every: int = Field(default=200, ge=1, description="updates between copies to the target network")
    members: int = Field(
        default=1, ge=1, description="networks of an ensemble, for exploration.kind=ensemble"
    )
    prior_scale: float = Field(default=3.0, ge=0, description="of each member's fixed random function")
    exploration: ExplorationConfig = ExplorationConfig(kind="epsilon")


class DQN(ReplayMethod):
    Config: ClassVar[type[MethodConfig]] = DQNConfig
    config: DQNConfig
    actions, acted_weights = "discrete", ("q.", "prior.")

    @property
    def n_members(self) -> int:
        return self.config.members

    def make_networks(self, generator: torch.Generator) -> QNetworks:
        config = self.config
        return QNetworks(
            self.spaces, config.hidden, generator, config.members, duelling=config.duelling,
            prior_scale=config.prior_scale if config.members > 1 else 0.0,
        )  # fmt: skip

    def act(self, networks: QNetworks, observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        values = networks.values(networks.q, observation).mean(0)
        return values.argmax(dim=-1), values

    def act_as_member(
        self, networks: QNetworks, observation: Tensor, member: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the best actions [B] by the values of one member [B] each, and these values [B, A]."""
        values = networks.values(networks.q, observation)[member, torch.arange(len(member))]
        return values.argmax(dim=-1), values

    def greedy_action(self, networks: QNetworks, observation: Tensor) -> Tensor:
        return self.act(networks, observation, observation)[0]

    def values(self, networks: QNetworks, observation: Tensor) -> Tensor:
        return networks.values(networks.q, observation).mean(0).amax(-1)

    def make_updates(self, networks: QNetworks) -> list[Update]:
        rate, clip_norm = self.config.learning_rate, self.config.clip_norm
        return [Update(partial(self.loss, networks), all_adamw(networks, rate, "q."), clip_norm=clip_norm)]

    def averages(self) -> list[Average]:
        return [Average("q.", 0.0, every=self.config.target_every, target="target.")]

    def loss(self, networks: QNetworks, part: MicroBatch) -> Loss:
        """Return the loss of a minibatch of `TransitionStore.draw`, and set its priorities."""
        values = networks.values(networks.q, part["observation"])  # [K, N, A]
        value = values.gather(2, part["action"].expand(len(values), -1).unsqueeze(2)).squeeze(2)
        with torch.no_grad():
            following = part["next_observation"]
            of_next = networks.values(networks.target, following)
            chooser = networks.values(networks.q, following) if self.config.double else of_next
        target = q_target(part["reward"], part["next_discount"], of_next, chooser)
        if self.config.priority_exponent:
            error = (value - target).detach().abs().mean(0)
            self.store.set_priorities(part["index"], error + MIN_PRIORITY)
        return q_loss(value, target, part["weight"])

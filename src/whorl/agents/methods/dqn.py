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
    exploration: ExplorationConfig = ExplorationConfig(kind="epsilon")


class DQN(ReplayMethod):
    Config: ClassVar[type[MethodConfig]] = DQNConfig
    config: DQNConfig
    actions, acted_weights = "discrete", "q."

    def make_networks(self, generator: torch.Generator) -> QNetworks:
        return QNetworks(self.spaces, self.config.hidden, generator, duelling=self.config.duelling)

    def act(self, networks: QNetworks, observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        values: Tensor = networks.q(observation)
        return values.argmax(dim=-1), values

    def greedy_action(self, networks: QNetworks, observation: Tensor) -> Tensor:
        values: Tensor = networks.q(observation)
        return values.argmax(dim=-1)

    def make_updates(self, networks: QNetworks) -> list[Update]:
        config = self.config
        return [
            Update(
                partial(self.loss, networks), all_adamw(networks, config.learning_rate, "q."),
                clip_norm=config.clip_norm,
            )
        ]  # fmt: skip

    def averages(self) -> list[Average]:
        return [Average("q.", 0.0, every=self.config.target_every, target="target.")]

    def loss(self, networks: QNetworks, part: MicroBatch) -> Loss:
        """Return the loss of a minibatch of `TransitionStore.draw`, and set its priorities."""
        value = networks.q(part["observation"]).gather(1, part["action"][:, None]).squeeze(1)
        with torch.no_grad():
            of_next = networks.target(part["next_observation"])
            chooser = networks.q(part["next_observation"]) if self.config.double else of_next
        target = q_target(part["reward"], part["next_discount"], of_next, chooser)
        if self.config.priority_exponent:
            self.store.set_priorities(part["index"], (value - target).detach().abs() + MIN_PRIORITY)
        return q_loss(value, target, part["weight"])

"""SAC: DDPG with a policy that is random by as much entropy as set (Haarnoja et al. 2018, arXiv:1812.05905).

    vectors    a Gaussian whose draws pass through tanh; the gradient passes through the draw
    discrete   expectations over all actions in place of draws (Christodoulou 2019, arXiv:1910.07207)

A temperature alpha weighs the entropy. It is trained so that the entropy keeps its target.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import softplus

from whorl.agents.exploration import ExplorationConfig
from whorl.agents.methods.method import MethodConfig
from whorl.agents.methods.replayed import ReplayConfig, ReplayMethod
from whorl.agents.networks import PolicyAndCritics, draw_action
from whorl.objectives.action_value import critics_loss, soft_policy_loss
from whorl.objectives.next_token import Loss
from whorl.tracking.seeds import generator
from whorl.train.learner.average import Average
from whorl.train.learner.update import MicroBatch, Update, all_adamw

LOG_WIDTH = (-5.0, 2.0)  # bounds of the Gaussian's log deviation


class SACConfig(ReplayConfig):
    method: Literal["sac"] = "sac"
    environment: str = "Pendulum-v1"
    steps: int = Field(default=10_000, ge=1)
    n_envs: int = Field(default=1, ge=1)
    n_steps: int = Field(default=8, ge=1)
    hidden: tuple[int, ...] = (256, 256)
    learning_starts: int = Field(default=256, ge=1)
    clip_norm: float = Field(default=1e6, gt=0)
    average: float = Field(default=0.995, ge=0, le=1, description="decay of the target critics, per update")
    n_critics: int = Field(default=2, ge=1, description="targets are the least of their values")
    temperature: float = Field(default=0.2, gt=0, description="of the entropy, at first")
    target_entropy: float | None = Field(None, description="nats; default: - dimensions, or log(actions) / 2")
    exploration: ExplorationConfig = ExplorationConfig(random_steps=256)


class SAC(ReplayMethod):
    Config: ClassVar[type[MethodConfig]] = SACConfig
    config: SACConfig
    acted_weights = ("policy.",)

    @property
    def discrete(self) -> bool:
        return self.spaces.n_actions is not None

    @property
    def target_entropy(self) -> float:
        if self.config.target_entropy is not None:
            return self.config.target_entropy
        n_actions, size = self.spaces.n_actions, self.spaces.action_size
        return 0.5 * math.log(n_actions) if n_actions else -float(size)

    def make_networks(self, generator: torch.Generator) -> PolicyAndCritics:
        config, spaces = self.config, self.spaces
        return PolicyAndCritics(
            spaces, config.hidden, generator, temperature=config.temperature, n_critics=config.n_critics,
            n_out=spaces.n_actions or 2 * spaces.action_size,
        )  # fmt: skip

    def act(self, networks: PolicyAndCritics, observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        output = networks.policy(observation)
        draw = draw_action(output, noise) if self.discrete else networks.squash(self._draw(output, noise))
        return draw, output

    def greedy_action(self, networks: PolicyAndCritics, observation: Tensor) -> Tensor:
        output: Tensor = networks.policy(observation)
        return output.argmax(dim=-1) if self.discrete else networks.squash(output.chunk(2, dim=-1)[0])

    def values(self, networks: PolicyAndCritics, observation: Tensor) -> Tensor | None:
        return networks.critics(observation).amin(0).amax(-1) if self.discrete else None

    def make_updates(self, networks: PolicyAndCritics) -> list[Update]:
        rate, clip_norm = self.config.learning_rate, self.config.clip_norm
        policy = {**all_adamw(networks, rate, "policy."), **all_adamw(networks, rate, "log_temperature")}
        return [
            Update(partial(self.critics_loss, networks), all_adamw(networks, rate, "critics."), clip_norm=clip_norm),
            Update(partial(self.policy_loss, networks), policy, clip_norm=clip_norm),
        ]  # fmt: skip

    def averages(self) -> list[Average]:
        return [Average("critics.", self.config.average, target="target_critics.")]

    def minibatches(
        self, networks: PolicyAndCritics, rollout: Mapping[str, Tensor], step: int
    ) -> Iterator[Sequence[MicroBatch]]:
        """Yield drawn minibatches, with normal noise [2, N, k] for vector actions now and in the next state."""
        rng = generator(self.config.seed, "policy noise", step)
        for (part,) in super().minibatches(networks, rollout, step):
            noise = {} if self.discrete else {"noise": torch.randn(2, *part["action"].shape, generator=rng)}
            yield [{**part, **noise}]

    def critics_loss(self, networks: PolicyAndCritics, part: MicroBatch) -> Loss:
        """Return the loss of the critics."""
        with torch.no_grad():
            probability, log_prob, least = self._policy_values(networks, networks.target_critics, part, 1)
            soft = least - networks.log_temperature.exp() * log_prob
            soft = soft if probability is None else (probability * soft).sum(-1)
            target = part["reward"] + part["next_discount"] * soft
        if self.discrete:
            index = part["action"].expand(self.config.n_critics, -1).unsqueeze(-1)
            values = networks.critics(part["observation"]).gather(2, index).squeeze(-1)
        else:
            values = networks.values(networks.critics, part["observation"], part["action"])
        return critics_loss(values, target, part["weight"])

    def policy_loss(self, networks: PolicyAndCritics, part: MicroBatch) -> Loss:
        """Return the loss of the policy and the temperature."""
        probability, log_prob, least = self._policy_values(networks, networks.critics, part, 0)
        if probability is not None:
            least = least.detach()
        return soft_policy_loss(probability, log_prob, least, networks.log_temperature, self.target_entropy)

    def _policy_values(
        self, networks: PolicyAndCritics, critics: nn.Module, part: MicroBatch, which: int
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return probabilities [N, A] or None, log-probabilities and the least values, [N, A] or [N] of one draw.

        which: 0 for the state of the step, 1 for the next one.
        """
        observation = part[("observation", "next_observation")[which]]
        output = networks.policy(observation)
        if self.discrete:
            log_prob = output.log_softmax(dim=-1)
            return log_prob.exp(), log_prob, critics(observation).amin(0)
        noise = part["noise"][which]
        draw = self._draw(output, noise)
        log_width = self._log_width(output)
        # log N(draw) - log |d tanh / d draw|; the range of the action is left out, as in the target entropy.
        jacobian = 2 * (math.log(2) - draw - softplus(-2 * draw))
        log_prob = (-0.5 * noise.square() - log_width - 0.5 * math.log(2 * math.pi) - jacobian).sum(-1)
        least = networks.values(critics, observation, networks.squash(draw)).amin(0)
        return None, log_prob, least

    def _draw(self, output: Tensor, noise: Tensor) -> Tensor:
        return output.chunk(2, dim=-1)[0] + self._log_width(output).exp() * noise

    def _log_width(self, output: Tensor) -> Tensor:
        low, high = LOG_WIDTH
        return low + 0.5 * (high - low) * (output.chunk(2, dim=-1)[1].tanh() + 1)

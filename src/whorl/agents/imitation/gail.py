"""GAIL: PPO whose reward is the logit of a discriminator of the expert's steps (Ho & Ermon 2016, arXiv:1606.03476).

    discriminator   - log D(s, a) of the expert's steps - log(1 - D(s, a)) of the policy's          D = sigmoid(f)
    reward          (1 - g) f(s, a), f = log D - log(1 - D), g the discount         (Fu et al. 2018, arXiv:1710.11248)

The subtle point is the end of an episode. A reward that is always positive rewards a policy for living, one that is
always negative for dying, in every environment. So an episode that terminated continues in an absorbing state, which has
one more logit, and its last step has that logit's discounted sum as well (Kostrikov et al. 2019, arXiv:1809.02925).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import softplus

from whorl.agents.environments.environment import Spaces
from whorl.agents.methods.method import MethodConfig
from whorl.agents.methods.ppo import PPO, PPOConfig
from whorl.agents.networks import ActorCritic, Critics
from whorl.objectives.next_token import Loss
from whorl.tracking.seeds import generator
from whorl.train.learner.update import MicroBatch, ParamOptim, Update, all_adamw

DISCRIMINATOR = ("discriminator.", "absorbing")


class GAILConfig(PPOConfig):
    method: Literal["gail"] = "gail"  # type: ignore[assignment]
    discount: float = Field(default=0.99, ge=0, lt=1)
    learning_rate: float = Field(default=3e-3, gt=0)
    discriminator_learning_rate: float = Field(default=3e-3, gt=0, description="AdamW's of the discriminator")
    smoothing: float = Field(default=0.05, ge=0, lt=0.5, description="distance of its targets from 0 and 1")


class GAILNetworks(ActorCritic):
    """Policy and value, and the logits f of a discriminator."""

    def __init__(self, spaces: Spaces, hidden: Sequence[int], generator: torch.Generator) -> None:
        super().__init__(spaces, hidden, generator)
        size = 0 if self.discrete else spaces.action_size
        self.discriminator = Critics(1, spaces, hidden, spaces.n_actions or 1, generator, action_size=size)
        self.absorbing = nn.Parameter(torch.zeros(()))
        self.bounds = torch.tensor([spaces.action_low, spaces.action_high])

    def logits(self, observation: Tensor, action: Tensor) -> Tensor:
        """Return f [N] of actions [N] or [N, k], as the environment gets them, at observations [N, d]."""
        if self.discrete:
            each: Tensor = self.discriminator(observation)[0]
            return each.gather(1, action[:, None]).squeeze(1)
        out: Tensor = self.discriminator(observation, action.clamp(*self.bounds))[0]
        return out.squeeze(-1)


class GAIL(PPO):
    Config: ClassVar[type[MethodConfig]] = GAILConfig
    config: GAILConfig
    needs_demonstrations = True
    acted_weights = ("policy.", "log_width")

    def make_networks(self, generator: torch.Generator) -> GAILNetworks:
        return GAILNetworks(self.spaces, self.config.hidden, generator)

    def param_optims(self, networks: ActorCritic) -> dict[str, ParamOptim]:
        return {n: p for n, p in super().param_optims(networks).items() if not n.startswith(DISCRIMINATOR)}

    def make_updates(self, networks: ActorCritic) -> list[Update]:
        rate = self.config.discriminator_learning_rate  # one number moves too little at the rate of matrices
        trained = all_adamw(networks, rate, DISCRIMINATOR) | all_adamw(networks, 10 * rate, "absorbing")
        loss = partial(self.discriminator_loss, networks)  # type: ignore[arg-type]
        return [*super().make_updates(networks), Update(loss, trained)]

    def flat(self, networks: ActorCritic, rollout: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {**super().flat(networks, rollout), "terminated": rollout["terminated"].flatten().float()}

    def minibatches(  # type: ignore[override]
        self, networks: GAILNetworks, rollout: Mapping[str, Tensor], step: int
    ) -> Iterator[Sequence[MicroBatch]]:
        """Yield PPO's minibatches under the discriminator's reward, each with as many steps of the expert."""
        with torch.no_grad():
            flat = rollout["observation"][:-1].flatten(0, 1), rollout["action"].flatten(0, 1)
            discount, logits = self.config.discount, networks.logits(*flat).view_as(rollout["reward"])
            reward = (1 - discount) * logits + discount * rollout["terminated"] * networks.absorbing
        rng = generator(self.config.seed, "demonstrations", step)
        for (part,) in super().minibatches(networks, {**rollout, "reward": reward}, step):
            expert = self.demonstrations.draw(len(part["action"]), rng)
            yield [{**part, **{f"expert_{name}": t for name, t in expert.items()}}]

    def discriminator_loss(self, networks: GAILNetworks, part: MicroBatch) -> Loss:
        """Return the cross-entropy of N steps of the expert and N of the policy, with their absorbing states."""
        rates = self.demonstrations.steps["terminated"].float().mean(), part["terminated"].mean()
        total, targets = torch.zeros(()), (1 - self.config.smoothing, self.config.smoothing)
        for name, rate, target in zip(("expert_", ""), rates, targets, strict=True):
            logits = networks.logits(part[f"{name}observation"], part[f"{name}action"])
            absorbed = rate * self.config.discount / (1 - self.config.discount)  # absorbing steps per step
            of_steps, of_absorbing = (softplus(x) - target * x for x in (logits, networks.absorbing))
            total = total + (of_steps.mean() + absorbed * of_absorbing) / (1 + absorbed)
        return Loss(total, torch.ones(()), {"discriminator_loss": total.detach()})

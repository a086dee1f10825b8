"""Cloning: the policy of A2C, trained to give the expert's actions (Pomerleau 1991, doi:10.1162/neco.1991.3.1.88).

    loss   - log pi(a|s)          over the steps of the demonstrations

No reward is used. Rollouts of the policy only measure its return. The subtle point: the loss counts errors in the expert's
states, and one error leads to states without demonstrations, where the next is likelier. DAgger adds the policy's states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar, Literal

import psutil
import torch
from pydantic import Field
from torch import Tensor

from whorl.agents.environments.environment import step_fields
from whorl.agents.methods.method import Method, MethodConfig
from whorl.agents.networks import ActorCritic
from whorl.errors import ConfigError
from whorl.objectives.next_token import Loss
from whorl.slots.replay import TransitionStore
from whorl.tracking.seeds import generator, numpy_rng
from whorl.train.learner.update import MicroBatch, Update, all_adamw


class CloneConfig(MethodConfig):
    method: Literal["clone"] = "clone"
    steps: int = Field(default=20_000, ge=1)
    n_envs: int = Field(default=8, ge=1)
    n_steps: int = Field(default=32, ge=1)
    learning_rate: float = Field(default=3e-3, gt=0)
    clip_norm: float = Field(default=10.0, gt=0)
    batch_size: int = Field(default=256, ge=1, description="steps in a minibatch")
    updates: int = Field(default=32, ge=1, description="minibatches per rollout, one optimizer step each")


class Clone(Method):
    Config: ClassVar[type[MethodConfig]] = CloneConfig
    config: CloneConfig
    needs_demonstrations = True
    without_effect = ("discount",)
    acted_weights: ClassVar[tuple[str, ...]] = ("policy.", "log_width")

    def make_networks(self, generator: torch.Generator) -> ActorCritic:
        return ActorCritic(self.spaces, self.config.hidden, generator)

    def log_prob(self, networks: ActorCritic, outputs: Tensor, action: Tensor) -> Tensor:
        return networks.log_prob(outputs, action)

    def make_updates(self, networks: ActorCritic) -> list[Update]:
        trained = all_adamw(networks, self.config.learning_rate, self.acted_weights)
        return [Update(partial(self.loss, networks), trained, clip_norm=self.config.clip_norm)]

    def minibatches(
        self, networks: ActorCritic, rollout: Mapping[str, Tensor], step: int
    ) -> Iterator[Sequence[MicroBatch]]:
        """Yield minibatches of the demonstrations."""
        rng = generator(self.config.seed, "demonstrations", step)
        for _ in range(self.config.updates):
            yield [self.demonstrations.draw(self.config.batch_size, rng)]

    def loss(self, networks: ActorCritic, part: MicroBatch) -> Loss:
        """Return the negative log-likelihood of actions [N] or [N, k] at observations [N, d]."""
        log_prob = networks.log_prob(networks.policy(part["observation"]), part["action"])
        return Loss(-log_prob.sum(), torch.tensor(float(len(log_prob))), {})


class DAggerConfig(CloneConfig):
    method: Literal["dagger"] = "dagger"  # type: ignore[assignment]


class DAgger(Clone):
    """DAgger: cloning in states that the policy visits, with the expert's labels (Ross et al. 2011, arXiv:1011.0686).

    Algorithm 3.1 with beta_1 = 1 and then 0: the demonstrations come first, then rollouts of the policy. So errors are
    counted in the policy's states, and their sum grows with the horizon T, not with its square (theorem 3.2).
    """

    Config: ClassVar[type[MethodConfig]] = DAggerConfig
    config: DAggerConfig
    store: TransitionStore

    def make_store(self, copies: int) -> None:
        """Allocate the visited states of the whole run.

        Raises:
            ConfigError: they do not fit into memory, or the expert is not available.
        """
        if self.demonstrations.expert is None:
            what = (
                "the expert of these demonstrations is not in the store, and dagger asks it for its actions"
            )
            raise ConfigError(what, do="give the agent itself: --from AGENT, or use clone")
        fields = {
            n: f
            for n, f in step_fields(self.spaces).items()
            if n in ("observation", "terminated", "truncated")
        }
        rows = self.config.n_rollouts * self.config.rollout_steps + copies
        memory = psutil.virtual_memory().available
        fields["reward"] = step_fields(self.spaces)["reward"]
        self.store = TransitionStore(rows, copies, fields, memory=memory)

    def minibatches(
        self, networks: ActorCritic, rollout: Mapping[str, Tensor], step: int
    ) -> Iterator[Sequence[MicroBatch]]:
        """Yield minibatches of the demonstrations and of all visited states, in proportion to their numbers."""
        size, rng = self.config.batch_size, generator(self.config.seed, "demonstrations", step)
        visits, draws = len(self.store), numpy_rng(self.config.seed, "visited", step)
        n_visited = round(size * visits / (visits + len(self.demonstrations)))
        for _ in range(self.config.updates):
            part = self.demonstrations.draw(size - n_visited, rng)
            visited = self.store.draw(n_visited, draws)["observation"]
            labelled = {"observation": visited, "action": self.demonstrations.expert(visited)}
            yield [{name: torch.cat((t, labelled[name])) for name, t in part.items()}]

"""One-shot imitation: repeat a demonstration, which is the prefix of a transformer (Duan et al. 2017, arXiv:1703.07326).

    loss = - sum over steps after the first episode of  log pi(a[t] | o[0], ..., o[t])

The demonstrations are whole trials of an expert. Their first episode is the prefix, and the later ones are cloned. A network
that minimizes this has to read the task from the prefix, so one demonstration suffices for a task that was never trained.
The parents are cloning and, with a causal transformer in place of the GRU, RL2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from whorl.agents.imitation.clone import Clone, CloneConfig
from whorl.agents.meta.rl2 import TrialActorCritic, TrialMethod
from whorl.agents.methods.method import MethodConfig
from whorl.errors import ConfigError
from whorl.models.transformer import Transformer
from whorl.models.transformer_config import AttentionConfig, TransformerConfig
from whorl.objectives.next_token import Loss
from whorl.tracking.seeds import generator
from whorl.train.learner.update import MicroBatch

HEAD_DIM = 32


class OneShotConfig(CloneConfig):
    method: Literal["one-shot"] = "one-shot"  # type: ignore[assignment]
    steps: int = Field(default=10_000, ge=1)
    hidden: tuple[int, ...] = Field(
        default=(64,), min_length=1, description="widths; the last: the transformer"
    )
    learning_rate: float = Field(default=3e-3, gt=0)
    n_layers: int = Field(default=2, ge=1, description="of the transformer")
    batch_size: int = Field(default=64, ge=1, description="trials in a minibatch")
    updates: int = Field(default=8, ge=1, description="minibatches per rollout, one optimizer step each")


class PrefixActorCritic(TrialActorCritic):
    """The trunk is a causal transformer. The embedding of its first id is a bias of the vectors."""

    def features(self, observation: Tensor, memory: Any = None) -> Tensor:
        model: Any = self.trunk
        bias, positions = model.prepare(torch.zeros(observation.shape[:2], dtype=torch.int64), state=memory)
        found: Tensor = model.trunk(bias + self.encoder(observation), positions, state=memory)
        return found


class OneShot(TrialMethod, Clone):
    Config: ClassVar[type[MethodConfig]] = OneShotConfig
    config: OneShotConfig
    acted_weights = ("encoder.", "trunk.", "policy.", "log_width")

    def make_networks(self, generator: torch.Generator) -> TrialActorCritic:
        width, heads = self.config.hidden[-1], max(1, self.config.hidden[-1] // HEAD_DIM)
        attention = AttentionConfig(n_heads=heads, n_kv_heads=heads, head_dim=HEAD_DIM)
        shape = TransformerConfig(
            vocab_size=2, d_model=width, n_layers=self.config.n_layers, mixers={"attention": attention},
            mlp_hidden=2 * width, tie_embeddings=True,
        )  # fmt: skip
        return PrefixActorCritic(self.spaces, self.config.hidden, Transformer(shape, generator), generator)

    def make_store(self, copies: int) -> None:
        """Check the demonstrations. Raises ConfigError: they are not whole trials."""
        steps, lengths = self.spaces.trial_steps, self.demonstrations.lengths
        if set(lengths) != {steps}:
            what = f"an episode of the demonstrations has {min(lengths)} steps"
            raise ConfigError(what, expected=f"whole trials of {steps} steps", do="record without --steps")

    def minibatches(
        self, networks: Any, rollout: Mapping[str, Tensor], step: int
    ) -> Iterator[Sequence[MicroBatch]]:
        """Yield random trials of the demonstrations."""
        rng, steps = generator(self.config.seed, "demonstrations", step), self.demonstrations.steps
        trials = {n: steps[n].unflatten(0, (-1, self.spaces.trial_steps)) for n in ("observation", "action")}
        for _ in range(self.config.updates):
            chosen = torch.randint(len(trials["action"]), (self.config.batch_size,), generator=rng)
            yield [{name: t[chosen] for name, t in trials.items()}]

    def loss(self, networks: Any, part: MicroBatch) -> Loss:
        """Return the loss of trials [B, T, ...]. The step after an episode's end has no effect, and is not learned."""
        ended = part["observation"][..., -1] > 0
        learned = (ended.cumsum(1) > 0) & ~ended
        features = networks.features(part["observation"])[learned]
        return super().loss(networks, {"observation": features, "action": part["action"][learned]})

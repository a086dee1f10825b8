"""GAN: a generator of noise, trained by a critic in place of a target (Goodfellow et al. 2014, arXiv:1406.2661).

    x = f(z, label),  z ~ N(0, I) in the shape of a row

The network of pictures is a denoiser's at t = 1. That of vectors is an MLP.

Two updates: the critic in every step, the generator in every `critic_steps`-th. Their losses are those of
`objectives/generative/adversarial.py`. With "wasserstein" the critic's slope must be bounded (`lipschitz`):

    clip       weights beyond +-clip are cut after every step         Arjovsky et al. 2017, arXiv:1701.07875, algorithm 1
    penalty    of the slope between pairs of data and samples         Gulrajani et al. 2017, arXiv:1704.00028, algorithm 1
    spectral   weights divided by their spectral norm                 Miyato et al. 2018, arXiv:1802.05957

Both losses may rise while samples improve, so a loss is no measure of them. `diagnose` returns the accuracy of the critic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from whorl.generative.data import Data, DataInfo
from whorl.generative.methods.method import DrawOptions, GenerativeConfig, GenerativeMethod
from whorl.models.autoencoder import VectorCoder
from whorl.models.critic import Critic
from whorl.objectives.generative.adversarial import (
    AdversarialLoss,
    critic_loss,
    generator_loss,
    row_means,
    slope_penalty,
)
from whorl.objectives.next_token import Loss
from whorl.tracking.seeds import generator
from whorl.train.learner.update import MicroBatch, Update, all_adamw

DIAGNOSED = 1000  # held-out rows, and as many samples
Lipschitz = Literal["none", "clip", "penalty", "spectral"]
BETAS = (0.5, 0.9)  # of AdamW (arXiv:1704.00028, appendix F)


class CriticConfig(GenerativeConfig):
    """Settings of methods with a critic."""

    steps: int = Field(default=5000, ge=1, description="of the critic")
    lr: float = Field(default=1e-3, gt=0, description="peak learning rate")
    loss: AdversarialLoss = Field(default="wasserstein", description="of critic and generator")
    lipschitz: Lipschitz = Field(default="penalty", description="bound on the critic's slope")
    penalty: float = Field(default=1.0, ge=0, description="weight of the slope's penalty")
    clip: float = Field(default=0.05, gt=0, description="largest weight of the critic, for lipschitz=clip")
    critic_steps: int = Field(default=2, ge=1, description="steps of the critic per step of the generator")

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.loss == "wasserstein" and self.lipschitz == "none":
            raise ValueError(
                "loss=wasserstein needs lipschitz=clip, penalty or spectral: it has no least value"
            )
        return self


class GANConfig(CriticConfig):
    """Settings of a GAN."""

    method: Literal["gan"] = "gan"


class GAN(GenerativeMethod):
    Config: ClassVar[type[GenerativeConfig]] = GANConfig
    config: CriticConfig

    def __init__(self, config: CriticConfig, info: DataInfo) -> None:
        super().__init__(config, info)

    def make_networks(self, rng: torch.Generator) -> nn.Module:
        c = self.config
        critic = Critic(
            self.info.shape,
            c.width,
            c.depth,
            self.n_classes,
            spectral=c.lipschitz == "spectral",
            generator=rng,
        )
        if self.info.is_pictures:
            generating: nn.Module = self.make_denoiser(rng, self.n_classes)
        else:  # waves of the noise, as a denoiser of vectors has, make the map rough
            size = self.info.shape[0]
            generating = VectorCoder(size, size, c.width, c.depth, self.n_classes, rng)
        return nn.ModuleDict({"generator": generating, "critic": critic})

    def draws(self, data: Tensor, labels: Tensor | None, rng: torch.Generator) -> dict[str, Tensor]:
        found = {"noise": torch.randn(data.shape, generator=rng), "mix": torch.rand(len(data), generator=rng)}
        return found if labels is None else {**found, "labels": labels}

    def updates(self, networks: nn.Module) -> Sequence[Update]:
        c = self.config
        critic = Update(
            partial(self.loss, networks), all_adamw(networks, c.lr, "critic."), weight_decay=c.weight_decay,
            betas=BETAS, max_weight=c.clip if c.lipschitz == "clip" else None,
        )  # fmt: skip
        generating = Update(
            partial(self.generator_loss, networks), all_adamw(networks, c.lr, "generator."),
            weight_decay=c.weight_decay, betas=BETAS, every=c.critic_steps,
        )  # fmt: skip
        return [critic, generating]

    def loss(self, networks: Any, batch: MicroBatch) -> Loss:
        """Return the critic's loss."""
        c, real, labels = self.config, self.seen(batch["data"], batch), batch.get("labels")
        with torch.no_grad():
            fake = self.seen(self.generate(networks, batch["noise"], labels), batch)
        twice = None if labels is None else labels.repeat(2)
        of_real, of_fake = networks["critic"](torch.cat([real, fake]), twice).chunk(2)
        penalty = None
        if c.lipschitz == "penalty":
            penalty = c.penalty * slope_penalty(
                partial(networks["critic"], labels=labels), real, fake, batch["mix"]
            )
        return critic_loss(c.loss, of_real, of_fake, penalty)

    def generator_loss(self, networks: Any, batch: MicroBatch) -> Loss:
        labels = batch.get("labels")
        fake = self.seen(self.generate(networks, batch["noise"], labels), batch)
        return generator_loss(self.config.loss, networks["critic"](fake, labels))

    def seen(self, x: Tensor, batch: MicroBatch) -> Tensor:
        """Return the critic's input for data or samples x [N, *shape] of a batch."""
        return x

    def generate(self, networks: Any, noise: Tensor, labels: Tensor | None) -> Tensor:
        """Return samples [N, *shape] of noise [N, *shape] and classes [N]."""
        time = (noise.new_ones(len(noise)),) if self.info.is_pictures else ()
        found: Tensor = networks["generator"](noise, *time, labels)
        return found

    def sample(self, networks: Any, n: int, rng: torch.Generator, options: DrawOptions) -> Tensor:
        if options.labels is None and self.n_classes:
            options = replace(options, labels=torch.randint(self.n_classes, (n,), generator=rng))
        return super().sample(networks, n, rng, options)

    def from_noise(self, networks: Any, noise: Tensor, rng: torch.Generator, options: DrawOptions) -> Tensor:
        return self.generate(networks, noise, options.labels_on(noise.device))

    def diagnose(self, networks: Any, data: Data) -> dict[str, float]:
        """Return what the critic finds between held-out rows and samples.

        critic_accuracy is the share of pairs whose data has the higher value. At 0.5 the critic sees no difference; at 1
        every sample differs from data. wasserstein is the value of the critic's objective. A clipped critic has none,
        because the bound of its slope is unknown.
        """
        c, device = self.config, next(networks.parameters()).device
        rows, labels = data.test[:DIAGNOSED], data.test_labels
        draws = self.draws(
            rows, None if labels is None else labels[:DIAGNOSED], generator(c.seed, "diagnose")
        )
        batch = {name: t.to(device) for name, t in {"data": rows, **draws}.items()}
        with torch.no_grad():
            classes = batch.get("labels")
            both = batch["data"], self.generate(networks, batch["noise"], classes)
            real, fake = (row_means(networks["critic"](self.seen(x, batch), classes)) for x in both)
            found = {"critic_accuracy": float((real[:, None] > fake).double().mean())}
            if c.loss == "wasserstein" and c.lipschitz != "clip":
                loss = self.loss(networks, batch)
                found["wasserstein"] = -float(loss.total / loss.count)
        return found

"""pix2pix: pictures from a part of them, by a U-Net and a critic of patches (Isola et al. 2017, arXiv:1611.07004).

    generator    generator_loss(D(c, G(c))) + l1 |x - G(c)|             section 3.1; c = condition(x)
    critic       critic_loss(D(c, x), D(c, G(c))), of each patch        section 3.2.2

It differs from `gan.py` in the generator's input, which is the condition in place of noise, and in the L1 distance. The
condition is computed from the picture. There is no noise, which the paper found to be ignored: each condition has one
result, and there are no samples without a picture.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.generative.data import Data, DataInfo
from whorl.generative.methods.gan import DIAGNOSED, GAN, CriticConfig, Lipschitz
from whorl.generative.methods.method import GenerativeConfig, GenerativeMethod
from whorl.models.critic import Critic
from whorl.objectives.generative.adversarial import AdversarialLoss, generator_loss
from whorl.objectives.next_token import Loss
from whorl.train.learner.update import MicroBatch

COARSE = 4  # pixels of a side that become one


class Pix2PixConfig(CriticConfig):
    """Settings of pix2pix."""

    method: Literal["pix2pix"] = "pix2pix"
    steps: int = Field(default=2000, ge=1, description="of critic and generator")
    batch_size: int = Field(default=32, ge=2, description="rows per step")
    width: int = Field(default=32, ge=8, multiple_of=2, description="of both networks")
    network: Literal["dit", "unet"] = Field(default="unet", description="the kind of generator")
    loss: AdversarialLoss = Field(default="non-saturating", description="of critic and generator")
    lipschitz: Lipschitz = Field(default="none", description="bound on the critic's slope")
    critic_steps: int = Field(default=1, ge=1, description="steps of the critic per step of the generator")
    condition: Literal["half", "coarse", "edges"] = Field(
        default="half", description="the left half, means of 4 x 4 pixels, or edges are given"
    )
    l1: float = Field(default=100.0, ge=0, description="weight of the L1 distance to the picture")


class Pix2Pix(GAN):
    """pix2pix: complete pictures of their left half, of coarse pixels or of edges; there are no samples."""

    Config: ClassVar[type[GenerativeConfig]] = Pix2PixConfig
    config: Pix2PixConfig
    has_samples = False
    n_classes = 0
    from_noise = GenerativeMethod.from_noise

    def __init__(self, config: Pix2PixConfig, info: DataInfo) -> None:
        super().__init__(config, info)
        if not info.is_pictures:
            raise ConfigError(
                f"pix2pix needs pictures, and {info.name} has rows of {info.shape[0]} numbers",
                expected="digits, glyphs, shapes, scenes or a folder of pictures",
            )

    def make_networks(self, rng: torch.Generator) -> nn.Module:
        c, (channels, *sides) = self.config, self.info.shape
        critic = Critic(
            (2 * channels, *sides), c.width, c.depth, patches=True, spectral=c.lipschitz == "spectral", generator=rng
        )  # fmt: skip
        return nn.ModuleDict({"generator": self.make_denoiser(rng, 0), "critic": critic})

    def condition(self, x: Tensor) -> Tensor:
        side = x.shape[-1]
        if self.config.condition == "half":
            return torch.where(torch.arange(side, device=x.device) < side // 2, x, 0.0)
        if self.config.condition == "coarse":
            return F.interpolate(F.interpolate(x, size=max(1, side // COARSE), mode="area"), size=side)
        down, right = (F.pad(x, pad, mode="replicate") for pad in ((0, 0, 0, 1), (0, 1, 0, 0)))
        return (down.diff(dim=2).square() + right.diff(dim=3).square()).sqrt().clamp_max(2) - 1

    def draws(self, data: Tensor, labels: Tensor | None, rng: torch.Generator) -> dict[str, Tensor]:
        """Return the condition as `noise`, the generator's input."""
        return {**super().draws(data, None, rng), "noise": self.condition(data)}

    def seen(self, x: Tensor, batch: MicroBatch) -> Tensor:
        return torch.cat([batch["noise"], x], 1)

    def generator_loss(self, networks: Any, batch: MicroBatch) -> Loss:
        fake = self.generate(networks, batch["noise"], None)
        loss = generator_loss(self.config.loss, networks["critic"](self.seen(fake, batch)))
        error = (fake - batch["data"]).abs().flatten(1).mean(1).sum()
        return Loss(loss.total + self.config.l1 * error, loss.count, {"l1": error.detach()})

    def reconstruct(self, networks: Any, x: Tensor) -> Tensor:
        return self.generate(networks, self.condition(x), None)

    @torch.no_grad()
    def diagnose(self, networks: Any, data: Data) -> dict[str, float]:
        """Return the critic's accuracy and the mean absolute error of held-out pixels that were not given, from -1 to 1.

        other_error is that of the coarse pixels themselves, or else that of the median of training pictures.
        """
        kind, x = self.config.condition, data.test[:DIAGNOSED]
        other = self.condition(x) if kind == "coarse" else data.train[:DIAGNOSED].median(0).values
        found = self.reconstruct(networks, x.to(next(networks.parameters()).device)).cpu()
        hidden = slice(x.shape[-1] // 2 if kind == "half" else 0, None)
        pairs = {"mean_absolute_error": found, "other_error": other}
        errors = {name: float((y - x)[..., hidden].abs().mean()) for name, y in pairs.items()}
        return {**super().diagnose(networks, data), **errors}

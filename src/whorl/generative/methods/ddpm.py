"""DDPM: predict the noise, the data or v at a random step of a diffusion (Ho et al. 2020, arXiv:2006.11239).

    n ~ uniform{1 .. 1000},  t = n / 1000,  loss = |f(a x_0 + s eps, t) - target|^2

This is the loss L_simple (eq. 14): every step has weight 1.

The quantity v keeps its scale at both ends of the path, where eps and x_0
each become trivial (Salimans & Ho 2022, arXiv:2202.00512, section 4).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from whorl.generative.data import DataInfo
from whorl.generative.methods.denoising import Denoising, DenoisingConfig
from whorl.generative.methods.method import GenerativeConfig
from whorl.objectives.generative.diffusion import DIFFUSION_STEPS, SCHEDULES, denoising
from whorl.objectives.next_token import Loss
from whorl.train.learner.update import MicroBatch


class DDPMConfig(DenoisingConfig):
    """Settings of DDPM."""

    method: Literal["ddpm"] = "ddpm"
    schedule: Literal["linear", "cosine"] = Field(default="cosine", description="of the noise")
    prediction: Literal["eps", "x0", "v"] = Field(default="v", description="of the network")


class DDPM(Denoising):
    Config: ClassVar[type[GenerativeConfig]] = DDPMConfig

    def __init__(self, config: DDPMConfig, info: DataInfo) -> None:
        super().__init__(config, info)
        self.path, self.prediction = SCHEDULES[config.schedule](), config.prediction

    def draws(self, data: Tensor, labels: Tensor | None, rng: torch.Generator) -> dict[str, Tensor]:
        step = torch.randint(1, DIFFUSION_STEPS + 1, (len(data),), generator=rng)
        noise = torch.randn(data.shape, generator=rng)
        return {"noise": noise, "time": step / DIFFUSION_STEPS, **self.draw_labels(labels, rng)}

    def loss(self, networks: Any, batch: MicroBatch) -> Loss:
        data, noise, time = batch["data"], batch["noise"], batch["time"]
        point = self.path.at(time, data)
        predicted = self.predict(networks, point.noisy(data, noise), time, batch.get("labels"))
        return denoising(predicted, point.value(self.prediction, data, noise))

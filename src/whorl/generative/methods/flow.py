"""Flow matching: DDPM with a straight path, a continuous time and the velocity (Lipman et al. 2023, arXiv:2210.02747).

With `coupling = "optimal"` the noise of a batch is paired with its data by optimal transport (`transport_pairs`).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from whorl.generative.methods.denoising import Denoising, DenoisingConfig
from whorl.generative.methods.method import GenerativeConfig
from whorl.objectives.generative.diffusion import GaussianPath, Prediction
from whorl.objectives.generative.flow import StraightPath, flow_matching, transport_pairs
from whorl.objectives.next_token import Loss
from whorl.train.learner.update import MicroBatch


class FlowConfig(DenoisingConfig):
    """Settings of flow matching."""

    method: Literal["flow"] = "flow"
    coupling: Literal["independent", "optimal"] = Field(
        default="independent",
        description="pairs of noise and data: any, or those of the optimal transport of a batch",
    )


class Flow(Denoising):
    Config: ClassVar[type[GenerativeConfig]] = FlowConfig
    path: GaussianPath = StraightPath()
    prediction: Prediction = "velocity"

    def draws(self, data: Tensor, labels: Tensor | None, rng: torch.Generator) -> dict[str, Tensor]:
        noise = torch.randn(data.shape, generator=rng)
        time = torch.rand(len(data), generator=rng)
        if self.config.coupling == "optimal":
            noise = noise[transport_pairs(data, noise, labels)]
        return {"noise": noise, "time": time, **self.draw_labels(labels, rng)}

    def loss(self, networks: Any, batch: MicroBatch) -> Loss:
        data, noise, time = batch["data"], batch["noise"], batch["time"]
        x = self.path.at(time, data).noisy(data, noise)
        predicted = self.predict(networks, x, time, batch.get("labels"))
        return flow_matching(predicted, data, noise)

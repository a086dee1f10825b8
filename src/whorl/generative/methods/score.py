"""Score matching: the gradient of the log-density on a path of growing noise (arXiv:1907.05600).

    score(x, t) = f(x / sqrt(1 + sigma^2), t) / sigma

The division by sigma follows Song & Ermon 2020 (arXiv:2006.09011, section 3.2): |score| is about 1 / sigma, so f keeps its
scale. The input is scaled too, because noisy data spread over (low, high).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from whorl.generative.data import DataInfo
from whorl.generative.methods.denoising import Denoising, DenoisingConfig
from whorl.generative.methods.method import GenerativeConfig
from whorl.objectives.generative.diffusion import Prediction
from whorl.objectives.generative.score import VarianceExploding, score_matching
from whorl.objectives.next_token import Loss
from whorl.train.learner.update import MicroBatch


class ScoreConfig(DenoisingConfig):
    """Settings of denoising score matching."""

    method: Literal["score"] = "score"
    low: float = Field(default=0.01, gt=0, description="smallest standard deviation of the noise")
    high: float = Field(default=50.0, gt=0, description="largest standard deviation of the noise")

    @model_validator(mode="after")
    def _ordered(self) -> ScoreConfig:
        if self.low >= self.high:
            raise ValueError(f"low is {self.low:g} and high {self.high:g}: low must be less")
        return self


class ScoreMatching(Denoising):
    Config: ClassVar[type[GenerativeConfig]] = ScoreConfig
    prediction: Prediction = "score"

    def __init__(self, config: ScoreConfig, info: DataInfo) -> None:
        super().__init__(config, info)
        self.path = VarianceExploding(config.low, config.high)

    def draws(self, data: Tensor, labels: Tensor | None, rng: torch.Generator) -> dict[str, Tensor]:
        noise, time = torch.randn(data.shape, generator=rng), torch.rand(len(data), generator=rng)
        return {"noise": noise, "time": time, **self.draw_labels(labels, rng)}

    def predict(self, networks: Any, x: Tensor, time: Tensor, labels: Tensor | None) -> Tensor:
        s = self.path.at(time, x).s
        score: Tensor = networks(x / (1 + s.square()).sqrt(), time, labels) / s
        return score

    def loss(self, networks: Any, batch: MicroBatch) -> Loss:
        data, noise, time = batch["data"], batch["noise"], batch["time"]
        point = self.path.at(time, data)
        score = self.predict(networks, point.noisy(data, noise), time, batch.get("labels"))
        return score_matching(score, noise, point.s)

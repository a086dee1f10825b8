"""The settings that determine the weights of an embedder."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from whorl.models.encoder import EncoderConfig
from whorl.train.config import FiniteGuardConfig, OptimizerName


class EmbedJob(BaseModel):
    """All settings that determine the weights of an embedder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: str = Field(description="folder of the token set")
    encoder: EncoderConfig
    min_span: int = Field(default=16, ge=1, description="ids of the shortest span")
    batch_size: int = Field(
        default=128, ge=2, description="pairs per step; each has one positive and batch_size - 1 negatives"
    )
    steps: int = Field(default=2000, ge=1)
    seed: int = 0
    temperature: float = Field(default=0.05, gt=0)
    optimizer: OptimizerName = "muon"
    lr_muon: float = Field(
        default=0.02, gt=0, description="peak learning rate of Muon, for the blocks' matrices"
    )
    lr_adamw: float = Field(
        default=0.01, gt=0, description="peak learning rate of AdamW, for the other parameters (or all)"
    )
    weight_decay: float = Field(default=0.0, ge=0)
    clip_norm: float = Field(default=1.0, gt=0)
    warmup_ratio: float = Field(default=0.02, ge=0, le=1)
    decay_ratio: float = Field(default=0.5, gt=0, le=1)
    held_out: int = Field(default=512, ge=2, description="maximum number of held-out documents for recall")
    evaluations: int = Field(default=10, ge=1, description="recall evaluations during the run")
    spike_guard: FiniteGuardConfig = FiniteGuardConfig()
    ema: float = Field(default=0.0, ge=0, lt=1, description="decay per step of averaged weights; 0 for none")
    threads: int = Field(default=1, ge=1)
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"

    @model_validator(mode="after")
    def _possible(self) -> EmbedJob:
        if self.min_span > self.encoder.max_length:
            raise ValueError(
                f"min_span ({self.min_span}) is more than max_length ({self.encoder.max_length})"
            )
        return self

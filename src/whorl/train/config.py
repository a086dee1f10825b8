"""The settings of the optimisers, apart from them so that a recipe can be checked without importing torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class OptimConfig(BaseModel):
    """Peak learning rates and what goes with them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    matrix_rate: float = Field(default=0.02, gt=0, description="Muon, matrices of the blocks")
    matrix_every: int = Field(
        default=2, ge=1, description="steps between updates of a matrix, which then is as much larger"
    )
    embedding_rate: float = Field(default=0.006, gt=0, description="AdamW, embedding and head")
    scalar_rate: float = Field(default=0.01, gt=0, description="AdamW, gains and temperatures")
    memory_rate: float = Field(default=0.05, gt=0, description="row Adagrad, n-gram memories")
    momentum: float = Field(default=0.95, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_norm: float = Field(default=1.0, gt=0, description="of the mean gradient, dense parameters together")

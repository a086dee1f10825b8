"""The settings of the planner, apart from it so that a recipe can be checked without importing torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from whorl.runs import BudgetText
from whorl.train.config import OptimConfig


class PlanConfig(BaseModel):
    """The dial, and what may be held fixed. What is left out is chosen."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    budget: BudgetText = Field(default="300s", description="training time (90s, 5m, 2h) or FLOPs (1e15flops)")
    d_model: int | None = Field(default=None, ge=16)
    n_layers: int | None = Field(default=None, ge=1)
    vocab_size: int | None = Field(default=None, ge=300, le=65_536)
    length: int = Field(default=256, ge=16, description="tokens a row")
    batch_rows: int = Field(default=8, ge=1, description="rows a step")
    ngram_buckets: int = Field(default=65_536, ge=16)
    steps: int | None = Field(default=None, ge=1, description="given, nothing is timed")
    replicas: int | None = Field(default=None, ge=1, description="default: one a core")
    compile: bool | None = Field(default=None, description="default: whichever is faster here")
    optim: OptimConfig = OptimConfig()
    seed: int = 0

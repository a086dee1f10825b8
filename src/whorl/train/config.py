"""The settings of optimisers, schedules and routing, apart from them so that a recipe can be checked without importing
torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class OptimConfig(BaseModel):
    """Peak learning rates and what goes with them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    optimizer: Literal["muon", "adamw"] = Field(
        default="muon", description="what trains the blocks' matrices"
    )
    lr_muon: float = Field(default=0.02, gt=0, description="Muon, matrices of the blocks")
    lr_adamw: float = Field(default=0.003, gt=0, description="AdamW, matrices of the blocks, if it has them")
    muon_every: int = Field(
        default=2, ge=1, description="steps between updates of a matrix, which then is as much larger"
    )
    lr_embedding: float = Field(default=0.006, gt=0, description="AdamW, embedding and head")
    lr_scalar: float = Field(default=0.01, gt=0, description="AdamW, gains and temperatures")
    lr_ngram: float = Field(default=0.05, gt=0, description="row Adagrad, n-gram memories")
    momentum: float = Field(default=0.95, ge=0, lt=1)
    weight_decay: float = Field(
        default=0.0, ge=0, description="of what layers multiply with; times the rate, a step"
    )
    fused: bool | None = Field(
        default=None, description="AdamW by torch's fused kernel, with other last bits; default: on CUDA only"
    )
    mup_base_width: int | None = Field(
        default=None, ge=1, description="muP: the width (d_model) that the rates were found at (mup.py)"
    )
    clip_norm: float = Field(default=1.0, gt=0, description="of the mean gradient, dense parameters together")


class ScheduleConfig(BaseModel):
    """How the learning rates rise and fall (`schedule.py`). Shares are of the run's steps."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["wsd", "cosine", "linear", "constant"] = "wsd"
    warmup_ratio: float = Field(default=0.02, ge=0, lt=1, description="share that warms up")
    warmup_steps: float | None = Field(
        default=None, ge=0, description="steps that warm up, in place of the share"
    )
    decay_ratio: float = Field(default=0.5, gt=0, le=1, description="share that decays, of wsd")
    min_lr_ratio: float = Field(
        default=0.02, ge=0, le=1, description="share of the peak that is left at the very end"
    )

    @model_validator(mode="after")
    def _possible(self) -> ScheduleConfig:
        def given(name: str) -> bool:  # by value: what was read from a file again names every field
            return bool(getattr(self, name) != type(self).model_fields[name].default)

        if given("decay_ratio") and self.kind != "wsd":
            falls = "does not fall" if self.kind == "constant" else "falls from the end of the warm-up on"
            raise ValueError(
                f"decay_ratio ({self.decay_ratio:g}) belongs to kind = 'wsd'; {self.kind!r} {falls}"
            )
        if given("min_lr_ratio") and self.kind == "constant":
            raise ValueError(
                f"min_lr_ratio ({self.min_lr_ratio:g}) belongs to a schedule that falls; 'constant' does not"
            )
        if given("warmup_ratio") and self.warmup_steps is not None:
            raise ValueError(
                f"both warmup_ratio ({self.warmup_ratio:g}) and warmup_steps ({self.warmup_steps:g}) are set: give one"
            )
        if (
            self.kind == "wsd"
            and self.warmup_steps is None
            and self.warmup_ratio + self.decay_ratio > 1 + 1e-9
        ):
            raise ValueError(
                f"warmup_ratio ({self.warmup_ratio:g}) + decay_ratio ({self.decay_ratio:g}) is above 1: together at most 1"
            )
        return self


class RoutingConfig(BaseModel):
    """How mixtures of experts are kept in use (`nn/experts`); of no effect on a model without any."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    aux_loss_coef: float = Field(
        default=0.01, ge=0, description="weight of the load-balancing loss, each layer"
    )
    z_loss_coef: float = Field(default=1e-3, ge=0, description="weight of the router's z-loss, each layer")
    bias_update_rate: float = Field(
        default=1e-3, ge=0, description="step of the balancing bias, for routers that have one"
    )


class SpikeGuardConfig(BaseModel):
    """What is done about a step that went wrong (`guard.py`). All of it counts in steps: no clock decides a weight."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    threshold: float = Field(
        default=10.0,
        ge=0,
        description="robust standard deviations above the median at which a batch is skipped; 0: never",
    )
    window: int = Field(default=128, ge=8, description="steps whose losses and gradient norms are compared")
    patience: int = Field(default=8, ge=1, description="bad steps in a row before the weights go back")
    max_rollbacks: int = Field(default=2, ge=0, description="how often they may; then training stops")
    max_skipped: float = Field(
        default=0.05, ge=0, le=1, description="share of the steps that may be skipped; then training stops"
    )
    snapshot_every: int | None = Field(
        default=None, ge=1, description="steps between the copies to go back to; default an eighth of the run"
    )

"""Settings of the planner. This module does not import torch, so that recipes can be checked quickly."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from whorl.machine.budget import MIN_SECONDS, Budget, BudgetText
from whorl.train.config import DataConfig, OptimConfig, RoutingConfig


class PlanConfig(BaseModel):
    """The budget, and optional fixed choices. The planner chooses every field that is left out."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    budget: BudgetText = Field(default="300s", description="training time (90s, 5m, 2h) or FLOPs (1e15flops)")
    d_model: int | None = Field(default=None, ge=32, description="width; heads are 64 wide, or 32")
    n_layers: int | None = Field(default=None, ge=1, le=1000)
    vocab_size: int | None = Field(default=None, ge=300, le=65_536)
    model: dict[str, Any] | None = Field(
        default=None,
        description="fields of a TransformerConfig, to train that network instead of whorl_decoder (docs/models.md)",
    )
    data: DataConfig = Field(default=DataConfig(), description="length and number of the rows of a step")
    long_ratio: float | None = Field(
        default=None, ge=0, lt=1,
        description="fraction of the steps, at the end, with rows of four times the length; default: 0.1 on a CPU",
    )  # fmt: skip
    ngram_buckets: int = Field(default=65_536, ge=16)
    steps: int | None = Field(default=None, ge=1, description="if given, nothing is timed")
    replicas: int | None = Field(default=None, ge=1, description="default: one per core")
    compile: bool | None = Field(default=None, description="default: the faster, by timing")
    optim: OptimConfig | None = Field(
        default=None, description="default: rates tuned for whorl_decoder, or for Llama-like models"
    )
    routing: RoutingConfig = RoutingConfig()
    seed: int = Field(default=0, ge=0)
    deterministic: bool = Field(default=False, description="make no choice by timing")

    @field_validator("budget")
    @classmethod
    def _long_enough(cls, budget: str) -> str:
        if (Budget.parse(budget).seconds or MIN_SECONDS) < MIN_SECONDS:
            raise ValueError(f"at least {MIN_SECONDS:g}s, since training takes seconds to start")
        return budget

    @model_validator(mode="after")
    def _validate(self) -> PlanConfig:
        if self.deterministic and self.steps is None and Budget.parse(self.budget).seconds is not None:
            raise ValueError(
                f"a budget of {self.budget} needs timing, which deterministic excludes: give a number of FLOPs "
                "(--budget 1e14flops) or a number of steps (--set plan.steps=2000)"
            )
        if self.replicas is not None and self.data.batch_size % self.replicas:
            raise ValueError(
                f"replicas is {self.replicas}, which does not divide data.batch_size, {self.data.batch_size}"
            )
        if self.model is not None and self.long_ratio:
            raise ValueError("long_ratio: longer rows need the planner's own network, so omit model")
        if self.model is not None:
            from whorl.models.transformer_config import (
                TransformerConfig,  # imports torch: only when needed
            )

            for name in ("d_model", "n_layers"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} cannot be given together with model: set model.{name}")
            try:
                shape = TransformerConfig.model_validate(self.transformer_fields())
            except ValidationError as error:
                first = error.errors()[0]
                raise ValueError(f"{'.'.join(map(str, ('model', *first['loc'])))}: {first['msg']}") from error
            _check_buildable(shape)
            if shape.tie_embeddings and self.optim is not None and self.optim.mup_base_width is not None:
                raise ValueError(
                    f"optim.mup_base_width ({self.optim.mup_base_width}) with model.tie_embeddings: muP has different rates "
                    "for embedding and head; set model.tie_embeddings = false or omit optim.mup_base_width"
                )
            if shape.learned_positions and self.data.seq_len > shape.max_length:
                raise ValueError(
                    f"data.seq_len ({self.data.seq_len}) exceeds model.max_length ({shape.max_length})"
                )
            if shape.experts is not None and shape.experts.routing == "expert_choice":
                raise ValueError(
                    "model.experts.routing: expert_choice routes by later tokens, so a language model would see its "
                    "targets; use dropless or token_choice"
                )
        return self

    def transformer_fields(self) -> dict[str, Any]:
        """Return `model` with its vocabulary size filled in."""
        return {"vocab_size": self.vocab_size or 1024, **(self.model or {})}


def _check_buildable(shape: Any) -> None:
    """Build the model on the meta device.

    Raises:
        ValueError: a layer rejects its settings.
    """

    from whorl.errors import ConfigError
    from whorl.models import make_model
    from whorl.nn.compiler import meta_device

    try:
        with meta_device():
            make_model(shape)
    except ConfigError as error:
        raise ValueError(
            f"model: {error.what}" + (f"; {error.expected}" if error.expected else "")
        ) from error
    except TypeError as error:
        raise ValueError(f"model: an option has the wrong type: {error}") from error

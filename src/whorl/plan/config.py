"""The settings of the planner, apart from it so that a recipe can be checked without importing torch."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from whorl.machine.budget import Budget, BudgetText
from whorl.train.config import OptimConfig, RoutingConfig


class PlanConfig(BaseModel):
    """The dial, and what may be held fixed. What is left out is chosen."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    budget: BudgetText = Field(default="300s", description="training time (90s, 5m, 2h) or FLOPs (1e15flops)")
    d_model: int | None = Field(default=None, ge=32, description="heads are 32 wide, or 64")
    n_layers: int | None = Field(default=None, ge=1)
    vocab_size: int | None = Field(default=None, ge=300, le=65_536)
    model: dict[str, Any] | None = Field(
        default=None,
        description="another network than the house's own: the fields of a TransformerConfig (docs/models.md)",
    )
    seq_len: int = Field(default=256, ge=16, description="tokens a row")
    batch_size: int = Field(default=8, ge=1, description="rows a step")
    ngram_buckets: int = Field(default=65_536, ge=16)
    steps: int | None = Field(default=None, ge=1, description="given, nothing is timed")
    replicas: int | None = Field(default=None, ge=1, description="default: one a core")
    compile: bool | None = Field(default=None, description="default: whichever is faster here")
    optim: OptimConfig | None = Field(
        default=None, description="default: rates found for the house's decoder, or for the Llama-like"
    )
    routing: RoutingConfig = RoutingConfig()
    seed: int = 0
    deterministic: bool = Field(default=False, description="choose nothing by timing it")

    @model_validator(mode="after")
    def _validate(self) -> PlanConfig:
        if self.deterministic and self.steps is None and Budget.parse(self.budget).seconds is not None:
            raise ValueError(
                f"without timing, nobody knows what a budget of {self.budget} buys: give an amount of arithmetic "
                "(--budget 1e14flops) or a number of steps (--set plan.steps=2000)"
            )
        if self.model is not None:
            from whorl.models.transformer_config import (
                TransformerConfig,  # imports torch: only where it is asked for
            )

            for name in ("d_model", "n_layers"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} stands beside model: give it as model.{name}")
            try:
                shape = TransformerConfig.model_validate(self.transformer_fields())
            except ValidationError as error:
                first = error.errors()[0]
                raise ValueError(f"{'.'.join(map(str, ('model', *first['loc'])))}: {first['msg']}") from error
            _check_buildable(shape)
            if shape.tie_embeddings and self.optim is not None and self.optim.mup_base_width is not None:
                raise ValueError(
                    f"optim.mup_base_width ({self.optim.mup_base_width}) with model.tie_embeddings: muP gives an embedding and a "
                    "head different rates; set model.tie_embeddings = false or leave optim.mup_base_width out"
                )
            if shape.learned_positions and self.seq_len > shape.max_length:
                raise ValueError(f"seq_len ({self.seq_len}) is beyond model.max_length ({shape.max_length})")
            if shape.experts is not None and shape.experts.routing == "expert_choice":
                raise ValueError(
                    "model.experts.routing: experts that choose look at tokens to come, so a model of what comes next "
                    "would see what it is asked for; use dropless or token_choice"
                )
        return self

    def transformer_fields(self) -> dict[str, Any]:
        """`model`, its vocabulary filled in."""
        return {"vocab_size": self.vocab_size or 1024, **(self.model or {})}


def _check_buildable(shape: Any) -> None:
    """Raises ValueError for what only the layers themselves know to be impossible."""
    import torch

    from whorl.errors import ConfigError
    from whorl.models import make_model

    try:
        with torch.device("meta"):
            make_model(shape)
    except ConfigError as error:
        raise ValueError(
            f"model: {error.what}" + (f"; {error.expected}" if error.expected else "")
        ) from error
    except TypeError as error:
        raise ValueError(f"model: an option has the wrong type: {error}") from error

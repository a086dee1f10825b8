"""The step `init_model`: an untrained byte-level model, for tasks that need no pretraining."""

from __future__ import annotations

import json

from pydantic import BaseModel, ConfigDict, Field, model_validator

from whorl.recipes.registry import StepContext, step
from whorl.report.training import model_facts


class InitModelConfig(BaseModel):
    """Shape of the untrained model; its vocabulary is the 256 bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    d_model: int = Field(default=128, ge=16)
    n_layers: int = Field(default=4, ge=1)
    n_heads: int = Field(default=4, ge=1)
    mlp_hidden: int = Field(default=384, ge=8)
    seed: int = Field(default=0, ge=0)

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        return self.d_model // self.n_heads

    @model_validator(mode="after")
    def _check_head_dim(self) -> InitModelConfig:
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(
                f"d_model ({self.d_model}) over n_heads ({self.n_heads}) gives heads of {self.head_dim}: rotary "
                "positions need an even number"
            )
        return self


@step("model", config=InitModelConfig, version=2)
def init_model(ctx: StepContext, config: InitModelConfig) -> None:
    """Initialize a byte-level model without training it."""
    from whorl.models import make_model, save_model, whorl_decoder
    from whorl.tokens.tokenizer import Tokenizer
    from whorl.tracking.seeds import generator

    tokenizer = Tokenizer([bytes([i]) for i in range(256)])
    shape = whorl_decoder(
        vocab_size=-(-tokenizer.vocab_size // 8) * 8, d_model=config.d_model, n_layers=config.n_layers,
        n_heads=config.n_heads, n_kv_heads=config.n_heads, head_dim=config.head_dim,
        mlp_hidden=config.mlp_hidden, ngram_buckets=512,
    )  # fmt: skip
    model = make_model(shape, generator(config.seed, "weights"))
    save_model(model, ctx.out)
    tokenizer.save(ctx.out)
    ctx.summary.update(
        params=model.params(), headline=f"{model.params()['total'] / 1e6:.2f} M parameters, untrained"
    )
    config_file = json.loads((ctx.out / "config.json").read_text())
    ctx.report.blocks.append(model_facts(config_file, model.params()))

"""The step `init_model`: an untrained model of bytes, or of tokens of its tasks, which need no pretraining."""

from __future__ import annotations

import json

from pydantic import BaseModel, ConfigDict, Field, model_validator

from whorl.errors import ConfigError
from whorl.recipes.registry import StepContext, step
from whorl.report.training import model_facts


class InitModelConfig(BaseModel):
    """Shape of the untrained model; by default its vocabulary is the 256 bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    d_model: int = Field(default=128, ge=16)
    n_layers: int = Field(default=4, ge=1)
    n_heads: int = Field(default=4, ge=1)
    mlp_hidden: int = Field(default=384, ge=8)
    vocab_size: int | None = Field(
        default=None,
        ge=300,
        le=65_536,
        description="tokens of a BPE that is trained on the conversations of `tasks`",
    )
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


@step("model", config=InitModelConfig, parents={"tasks?": "tasks"}, version=2)
def init_model(ctx: StepContext, config: InitModelConfig) -> None:
    """Initialize a model of bytes, or of tokens of the tasks, without training it."""
    from whorl.align.data.dataset_files import read_conversations
    from whorl.models import make_model, save_model, whorl_decoder
    from whorl.tokens.tokenizer import Tokenizer
    from whorl.tracking.seeds import generator

    if (config.vocab_size is None) == ("tasks" in ctx.parents):
        raise ConfigError(
            f"{ctx.name}: vocab_size and the parent tasks belong together", expected="both or neither"
        )
    tokenizer = Tokenizer([bytes([i]) for i in range(256)])
    if config.vocab_size is not None:
        talks = read_conversations(ctx.parent_folder("tasks"), "train")
        texts = [str(message["content"]) for talk in talks for message in talk.messages]
        tokenizer = Tokenizer.train(texts, config.vocab_size)
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

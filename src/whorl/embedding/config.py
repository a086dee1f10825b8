"""Settings of the training of an embedder and of a text classifier. Imports no torch, so a recipe is checked fast."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from whorl.train.config import FiniteTrainConfig, OptimizerName, RowTrainConfig


class EmbedTrainConfig(FiniteTrainConfig):
    """The update loop of an embedder."""

    clip_norm: float = Field(default=1.0, gt=0, description="of the mean gradient")
    weight_decay: float = Field(
        default=0.0, ge=0, description="of weight matrices; times the learning rate, per step"
    )


class EmbedConfig(BaseModel):
    """Training of an embedder, for the step and its job; the objective is described in `embedding/train.py`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_span: int = Field(
        default=16, ge=1, description="ids of the shortest span; documents need twice as many"
    )
    words: bool = Field(
        default=False,
        description="read words as the text index does (identifiers split, lower case): for search in code",
    )
    batch_size: int = Field(
        default=128, ge=2, description="documents per step; each is contrasted with all others"
    )
    steps: int = Field(default=2000, ge=1)
    seed: int = Field(default=0, ge=0)
    temperature: float = Field(default=0.05, gt=0, description="divisor of the cosines")
    optimizer: OptimizerName = Field(default="muon", description="optimizer of the blocks' matrices")
    lr_muon: float = Field(default=0.02, gt=0, description="peak learning rate of Muon")
    lr_adamw: float = Field(
        default=0.01, gt=0, description="peak learning rate of the other parameters, or of all without Muon"
    )
    held_out: int = Field(default=512, ge=2, description="documents among which recall is measured, at most")
    evaluations: int = Field(
        default=10, ge=1, description="evaluations on held-out documents during training"
    )
    train: EmbedTrainConfig = Field(default=EmbedTrainConfig(), description="the update loop")


class TextClassifierConfig(RowTrainConfig):
    """Data, shape and training of a text classifier."""

    path: str = Field(description="a JSONL, Parquet or CSV file of labelled texts, or a folder of them")
    text_field: str = Field(default="text", description="the text")
    label_field: str = Field(default="label", description="the class: a text or a whole number")
    test_fraction: float = Field(default=0.2, gt=0, lt=1, description="held-out fraction, of each class")
    vocab_size: int = Field(default=4096, ge=260, description="of the texts' tokenizer, at most")
    d_model: int = Field(default=64, ge=8)
    n_layers: int = Field(default=2, ge=1)
    n_heads: int = Field(default=4, ge=1)
    mlp_hidden: int = Field(default=128, ge=8)
    max_length: int = Field(default=128, ge=1, description="ids of a text; longer ones are cut")
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)
    content_hash: str = Field(default="", description="of the files; computed")

    @model_validator(mode="after")
    def _heads(self) -> TextClassifierConfig:
        if self.d_model % self.n_heads:
            raise ValueError(f"d_model ({self.d_model}) must be a multiple of n_heads ({self.n_heads})")
        return self

"""An embedder's job: everything that decides its weights, as one frozen record."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from whorl.embedding.config import EmbedConfig
from whorl.models.encoder import EncoderConfig


class EmbedJob(EmbedConfig):
    """The settings of one run: those of training, the data, the shape and the device."""

    tokens: str = Field(description="folder of the token set")
    tokenizer: str = Field(default="", description="its folder; read where `words` is set")
    encoder: EncoderConfig
    threads: int = Field(default=1, ge=1)
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"

    @model_validator(mode="after")
    def _possible(self) -> EmbedJob:
        if self.min_span > self.encoder.max_length:
            raise ValueError(
                f"min_span ({self.min_span}) is more than max_length ({self.encoder.max_length})"
            )
        if self.words and not self.tokenizer:
            raise ValueError("words needs the folder of the tokenizer")
        return self

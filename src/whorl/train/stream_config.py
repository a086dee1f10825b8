"""Settings of training on raw text. Apart from `train/config.py`, since the corpus package takes a second to import."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from whorl.corpus.blocks import Source


class TextStreamConfig(BaseModel):
    """Raw files that are tokenized during training, in place of the training split of the token set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sources: list[Source] = Field(
        min_length=1, description="files (patterns, URLs), weight, final_weight, formats"
    )
    shuffle_bytes: int = Field(
        default=1 << 19, ge=1, description="bytes of raw text whose documents are shuffled together"
    )
    block_bytes: int = Field(
        default=1 << 14, ge=1, description="bytes of raw text per read; for remote files use 1000000"
    )
    mixture_warmup_records: int = Field(
        default=1000, ge=1, description="records over which the weights change to final_weight"
    )
    workers: int = Field(
        default=1, ge=0, description="tokenizing processes per replica; 0: in the training process"
    )

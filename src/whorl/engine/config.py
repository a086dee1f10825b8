"""How much an engine holds at once and how it shares a step; apart from it, so that a command line need not import torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class EngineConfig(BaseModel):
    """How much the engine holds at once, and how it shares a step."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_num_seqs: int = Field(default=32, ge=1, description="that run at once; the others wait")
    max_model_len: int = Field(default=2048, ge=2, description="positions of one text, prompt and output")
    kv_cache_tokens: int | None = Field(
        default=None, ge=1, description="positions held at once; default half of all texts at full length"
    )
    block_size: int = Field(default=32, ge=1, description="positions a page")
    kv_cache_dtype: Literal["model", "int8"] = Field(
        default="model", description="keys and values in the model's type, or in int8 (kv_int8.py)"
    )
    max_num_batched_tokens: int = Field(default=512, ge=1, description="positions a step at most")
    enable_prefix_caching: bool = Field(
        default=True, description="find what was computed of a prompt's beginning"
    )
    preemption: Literal["recompute", "swap"] = "recompute"
    batch_invariant: bool = Field(
        default=False, description="the same tokens to the bit, whatever else is in the batch (slower)"
    )
    weight_dtype: Literal["float32", "bfloat16", "int8", "int4"] | None = Field(
        default=None, description="how a CPU's native step keeps them; default: as the model computes"
    )
    weight_group_size: int | None = Field(
        default=None, ge=8, description="inputs that share a scale, of int8, int4"
    )
    max_decode_slowdown: float = Field(
        default=1.8, ge=1, description="of a decoding step, by prompts that are read in beside it"
    )
    seed: int = Field(default=0, description="of requests that bring none, together with their id")
    slo_tpot: float | None = Field(
        default=None, gt=0, description="seconds per output token that were promised"
    )

"""Engine sizes and scheduling limits. In its own file so that the command line need not import torch."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

BATCH_BLOCK_SIZE = 8  # positions
BATCH_BURST = 16  # tokens


class EngineConfig(BaseModel):
    """Engine sizes and scheduling limits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_num_seqs: int = Field(
        default=32, ge=1, description="maximum number of running sequences; others wait"
    )
    max_model_len: int = Field(default=2048, ge=2, description="positions of one sequence, prompt and output")
    kv_cache_tokens: int | None = Field(
        default=None,
        ge=1,
        description="positions in the KV cache; default: half of max_num_seqs * max_model_len",
    )
    block_size: int = Field(default=32, ge=1, description="positions per page")
    kv_cache_dtype: Literal["model", "int8"] = Field(
        default="model", description="type of keys and values: the model's, or int8"
    )
    max_num_batched_tokens: int = Field(
        default=512, ge=1, description="tokens per engine step; a smaller number bounds the delay by prefills"
    )
    enable_prefix_caching: bool = Field(default=True, description="reuse the cached pages of a shared prefix")
    preemption: Literal["recompute", "swap"] = "recompute"
    batch_invariant: bool = Field(
        default=False, description="bit-identical tokens for any batch composition (slower)"
    )
    weight_dtype: Literal["float32", "bfloat16", "int8", "int4"] | None = Field(
        default=None,
        description="weight format on a CPU; default: as loaded, with the codes of a quantized model",
    )
    decode_rows: int | None = Field(
        default=None, ge=1, description="usual rows of a decode step, for the choice by timing; default: few"
    )
    decode_burst: int = Field(
        default=1, ge=1, description="tokens of a row that a step may draw in the native library"
    )
    max_threads: int | None = Field(
        default=None, ge=1, description="threads of the native step, at most; default: all usable cores"
    )
    weight_group_size: int | None = Field(
        default=None, ge=8, description="inputs that share a scale, for int8 and int4"
    )
    max_decode_slowdown: float = Field(
        default=1.8, ge=1, description="largest slowdown of a decode step by prefill in the same step"
    )
    seed: int = Field(default=0, description="seed of requests without one; combined with their id")
    slo_tpot: float | None = Field(default=None, gt=0, description="target seconds per output token (TPOT)")

    @classmethod
    def for_batch(cls, sequences: int, max_length: int, **options: Any) -> EngineConfig:
        """Return settings for throughput: `sequences` of `max_length` positions that all fit the cache.

        Blocks are small, so that completions share prefixes. No decision depends on time, so completions do not depend on
        earlier requests.
        """
        row_length = -(-max_length // BATCH_BLOCK_SIZE) * BATCH_BLOCK_SIZE
        return cls(
            max_num_seqs=sequences, max_model_len=max_length, kv_cache_tokens=sequences * row_length,
            block_size=BATCH_BLOCK_SIZE, max_num_batched_tokens=max(2048, 2 * sequences), max_decode_slowdown=math.inf,
            **{"decode_rows": sequences, "decode_burst": BATCH_BURST, **options},
        )  # fmt: skip

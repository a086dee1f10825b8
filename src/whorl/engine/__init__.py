"""The engine: continuous batching over a paged KV cache, sampling, and generation.

The names below are imported at their first use, so that `whorl.engine.config` needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from whorl._lazy_exports import lazy_exports

if TYPE_CHECKING:
    from whorl.engine.config import EngineConfig
    from whorl.engine.engine import Engine
    from whorl.engine.load import fastest_dtype, load_for_sampling
    from whorl.engine.model.multi_lora import Adapters
    from whorl.engine.request import Request, Token
    from whorl.engine.sampling.sampler import Sampler, SamplerRow, distribution
    from whorl.engine.sampling_params import SamplingParams

_MODULES = {
    "config": ("EngineConfig",),
    "engine": ("Engine",),
    "load": ("fastest_dtype", "load_for_sampling"),
    "model.multi_lora": ("Adapters",),
    "request": ("Request", "Token"),
    "sampling.sampler": ("Sampler", "SamplerRow", "distribution"),
    "sampling_params": ("SamplingParams",),
}
__all__ = [
    "Adapters",
    "Engine",
    "EngineConfig",
    "Request",
    "Sampler",
    "SamplerRow",
    "SamplingParams",
    "Token",
    "distribution",
    "fastest_dtype",
    "load_for_sampling",
]
__getattr__, __dir__ = lazy_exports(__name__, _MODULES)

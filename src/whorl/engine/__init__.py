"""The engine: continuous batching over a paged KV cache, sampling, and generation.

The names below are imported at their first use, so that `whorl.engine.config` needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whorl.engine.config import EngineConfig
    from whorl.engine.load import fastest_dtype, load_for_sampling
    from whorl.engine.model.multi_lora import Adapters
    from whorl.engine.request import Token
    from whorl.engine.sampling.sampler import Sampler, SamplerRow, distribution
    from whorl.engine.sampling_params import SamplingParams

_MODULES = {
    "EngineConfig": "config",
    "fastest_dtype": "load",
    "load_for_sampling": "load",
    "Adapters": "model.multi_lora",
    "Token": "request",
    "Sampler": "sampling.sampler",
    "SamplerRow": "sampling.sampler",
    "distribution": "sampling.sampler",
    "SamplingParams": "sampling_params",
}
__all__ = [
    "Adapters",
    "EngineConfig",
    "Sampler",
    "SamplerRow",
    "SamplingParams",
    "Token",
    "distribution",
    "fastest_dtype",
    "load_for_sampling",
]


def __getattr__(name: str) -> Any:
    """Import a name of the package at its first use."""
    if name in _MODULES:
        return getattr(import_module(f"whorl.engine.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'whorl.engine' has no attribute {name!r}")

"""The engine: continuous batching over a paged KV cache, sampling, and generation."""

from whorl.engine.config import EngineConfig
from whorl.engine.load import fastest_dtype, load_for_sampling
from whorl.engine.model.multi_lora import Adapters
from whorl.engine.request import Token
from whorl.engine.sampling.sampler import Sampler, SamplerRow, distribution
from whorl.engine.sampling_params import SamplingParams

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

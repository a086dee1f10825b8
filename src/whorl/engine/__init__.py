"""The engine: continuous batching over a paged KV cache, sampling, and generation of one sequence."""

from whorl.engine.generate import complete, generate
from whorl.engine.load import fastest_dtype, load_for_sampling
from whorl.engine.model.multi_lora import Adapters
from whorl.engine.request import Token
from whorl.engine.sampling.sampler import Sampler, SamplerRow, distribution
from whorl.engine.sampling_params import SamplingParams

__all__ = [
    "Adapters",
    "Sampler",
    "SamplerRow",
    "SamplingParams",
    "Token",
    "complete",
    "distribution",
    "fastest_dtype",
    "generate",
    "load_for_sampling",
]

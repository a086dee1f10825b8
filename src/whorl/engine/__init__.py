"""Running a trained decoder: the sampler, and generation with the cache."""

from whorl.engine.generate import Token, complete, generate
from whorl.engine.sampler import Sampling, distribution

__all__ = ["Sampling", "Token", "complete", "distribution", "generate"]

"""Running a trained model: the sampler, and generation with a state."""

from whorl.engine.generate import complete, generate
from whorl.engine.load import fastest_dtype, load_for_sampling
from whorl.engine.request import Token
from whorl.engine.sampler import Row, Sampler, distribution
from whorl.engine.sampling import Sampling

__all__ = [
    "Row",
    "Sampler",
    "Sampling",
    "Token",
    "complete",
    "distribution",
    "fastest_dtype",
    "generate",
    "load_for_sampling",
]

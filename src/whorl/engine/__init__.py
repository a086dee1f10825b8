"""Running a trained model: the sampler, and generation with a state."""

from whorl.engine.generate import Token, complete, generate
from whorl.engine.load import fastest_dtype, load_for_sampling
from whorl.engine.sampler import distribution
from whorl.engine.sampling import Sampling

__all__ = ["Sampling", "Token", "complete", "distribution", "fastest_dtype", "generate", "load_for_sampling"]

"""Running a trained model: the sampler, and generation with a state."""

from whorl.engine.adapters import Adapters
from whorl.engine.generate import complete, generate
from whorl.engine.load import fastest_dtype, load_for_sampling
from whorl.engine.lora import load_lora, merge, save_lora
from whorl.engine.quantise import quantise_model
from whorl.engine.request import Token
from whorl.engine.sampler import Row, Sampler, distribution
from whorl.engine.sampling import Sampling

__all__ = [
    "Adapters",
    "Row",
    "Sampler",
    "Sampling",
    "Token",
    "complete",
    "distribution",
    "fastest_dtype",
    "generate",
    "load_for_sampling",
    "load_lora",
    "merge",
    "quantise_model",
    "save_lora",
]

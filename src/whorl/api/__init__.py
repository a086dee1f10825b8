"""The Python API: load a model, run a recipe, train on one's own data."""

from whorl.api.jobs import run, train
from whorl.api.model import Embedder, Model, load

__all__ = ["Embedder", "Model", "load", "run", "train"]

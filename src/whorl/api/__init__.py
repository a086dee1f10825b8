"""The Python API: load a model, run a recipe, train on one's own data."""

from whorl.api.jobs import run, train
from whorl.api.model import Model, load
from whorl.embedding.embedder import Embedder

__all__ = ["Embedder", "Model", "load", "run", "train"]

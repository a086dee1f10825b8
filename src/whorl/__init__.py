"""Train, align, measure and serve your own small language model, from raw files, in one readable Python codebase.

    model = whorl.load("quickstart/pretrain")       # an artifact, a folder of weights, or a Hugging Face folder
    model.generate("def mean(values):")
    whorl.run("quickstart", budget="2m")            # a recipe, as `whorl run`
    whorl.train("notes/", out="notes-model")        # one's own files, texts or token ids

Importing this package imports nothing else: torch is loaded by the first call.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whorl.api import Embedder, Model, load, run, train

__version__ = "0.2.0"  # pyproject.toml and `whorl --version` read it here
__all__ = ["Embedder", "Model", "load", "run", "train"]


def __getattr__(name: str) -> Any:
    """Import a name of the Python API at its first use. `whorl.train` is a package that can be called."""
    if name == "train":
        return import_module("whorl.train")
    if name in __all__:
        return getattr(import_module("whorl.api"), name)
    raise AttributeError(f"module 'whorl' has no attribute {name!r}")

"""Train, align, measure and serve your own small language model, from raw files, in one readable Python codebase.

    model = whorl.load("quickstart/pretrain")       # an artifact, a folder of weights, or a Hugging Face folder
    model.generate("def mean(values):")
    whorl.run("quickstart", budget="2m")            # a recipe, as `whorl run`
    whorl.train("notes/", out="notes-model")        # one's own files, texts or token ids

Importing this package imports nothing else: torch is loaded by the first call.

It sets the turns that waiting threads of OpenMP spin before they sleep (GOMP_SPINCOUNT, in the environment, so that
child processes inherit it). Libgomp reads the variable once, as torch loads it. Its default spins for milliseconds, and
on busy cores such a thread takes the time of the one that computes.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whorl.api import Embedder, Model, load, run, train

__version__ = "0.2.0"  # pyproject.toml and `whorl --version` read it here
__all__ = ["Embedder", "Model", "load", "run", "train"]
OPENMP_WAITING = (
    "GOMP_SPINCOUNT",
    "OMP_WAIT_POLICY",
    "KMP_BLOCKTIME",
    "KMP_LIBRARY",
)  # the user's choice of waiting
SPIN_COUNT = 10_000  # turns, some 50 us: bench/machine/spin.py

if "torch" not in sys.modules and not any(name in os.environ for name in OPENMP_WAITING):
    os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)


def __getattr__(name: str) -> Any:
    """Import a name of the Python API at its first use. `whorl.train` is a package that can be called."""
    if name == "train":
        return import_module("whorl.train")
    if name in __all__:
        return getattr(import_module("whorl.api"), name)
    raise AttributeError(f"module 'whorl' has no attribute {name!r}")

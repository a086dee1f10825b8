"""The global RNG states of torch, NumPy and Python in a checkpoint.

The project's code uses no global generator, but a third-party network may. torch's states are tensors of the
checkpoint; the others are in the metadata.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whorl.train.checkpoint.format import Checkpoint

RNG_PREFIX = "generators/"


def without_rng_state(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint without the RNG states."""
    return {n: t for n, t in tensors.items() if not n.startswith(RNG_PREFIX)}


def rng_tensors() -> dict[str, Tensor]:
    """The states of torch's global generators, for the CPU and every GPU in use."""
    found = {f"{RNG_PREFIX}torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found |= {f"{RNG_PREFIX}cuda/{n}": state for n, state in enumerate(torch.cuda.get_rng_state_all())}
    return found


def rng_metadata() -> dict[str, Any]:
    """The states of Python's and NumPy's global generators."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {"python": random.getstate(), "numpy": [kind, np.asarray(keys).tolist(), *rest]}


def restore_rng_state(checkpoint: Checkpoint) -> None:
    """Restore all global generators from a checkpoint, except those of missing devices."""
    torch.set_rng_state(checkpoint.tensors[f"{RNG_PREFIX}torch"].clone())
    if torch.cuda.is_available():
        for name, state in checkpoint.tensors.items():
            if name.startswith(f"{RNG_PREFIX}cuda/") and int(name.split("/")[-1]) < torch.cuda.device_count():
                torch.cuda.set_rng_state(state.clone(), int(name.split("/")[-1]))
    version, state, gauss = checkpoint.metadata["generators"]["python"]
    random.setstate((version, tuple(state), gauss))
    kind, keys, *rest = checkpoint.metadata["generators"]["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))

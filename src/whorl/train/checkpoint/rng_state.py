"""The generators that belong to nobody: torch's, NumPy's and Python's own, in a checkpoint.

No code of this house draws from them, but a network of somebody else's may, and then a continued run must draw what it
would have drawn. torch's states are tensors, and lie among the tensors; the others are numbers in the record.
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
    """All of a checkpoint's tensors but those."""
    return {n: t for n, t in tensors.items() if not n.startswith(RNG_PREFIX)}


def rng_tensors() -> dict[str, Tensor]:
    """torch's own generators, on every device that is in use."""
    found = {f"{RNG_PREFIX}torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found |= {f"{RNG_PREFIX}cuda/{n}": state for n, state in enumerate(torch.cuda.get_rng_state_all())}
    return found


def rng_metadata() -> dict[str, Any]:
    """Python's and NumPy's own generators."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {"python": random.getstate(), "numpy": [kind, np.asarray(keys).tolist(), *rest]}


def restore_rng_state(checkpoint: Checkpoint) -> None:
    """All of them as they were when `found` was taken; those of a device that is not here are left out."""
    torch.set_rng_state(checkpoint.tensors[f"{RNG_PREFIX}torch"].clone())
    if torch.cuda.is_available():
        for name, state in checkpoint.tensors.items():
            if name.startswith(f"{RNG_PREFIX}cuda/") and int(name.split("/")[-1]) < torch.cuda.device_count():
                torch.cuda.set_rng_state(state.clone(), int(name.split("/")[-1]))
    version, state, gauss = checkpoint.metadata["generators"]["python"]
    random.setstate((version, tuple(state), gauss))
    kind, keys, *rest = checkpoint.metadata["generators"]["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))

"""Random streams, each derived from one seed and the names of what it is for.

One number seeds a whole run, yet the data order, the initial weights and the sampler each need a stream of
their own: were they to share one generator, a sample drawn on the way would change the training order after
it. So a stream is named, `generator(seed, "pretrain", "init")`, and its seed is the BLAKE2 hash of the
run's seed and the names. Streams with different names are independent, adding one never moves another, and
the mapping is fixed for ever (a test holds the numbers). No global generator is touched.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch


def derive(seed: int, *names: str | int) -> int:
    """A seed in [0, 2**63) for a stream. JSON keeps "1" and 1, and ("a", "b") and ("ab",), apart."""
    digest = hashlib.blake2b(json.dumps([seed, *names]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(seed: int, *names: str | int) -> torch.Generator:
    """A CPU torch generator for the stream called `names`."""
    import torch

    return torch.Generator().manual_seed(derive(seed, *names))


def numpy_rng(seed: int, *names: str | int) -> np.random.Generator:
    """A numpy generator (PCG64) for the stream called `names`."""
    import numpy as np

    return np.random.Generator(np.random.PCG64(derive(seed, *names)))

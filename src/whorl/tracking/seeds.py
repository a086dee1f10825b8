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
from typing import TYPE_CHECKING, Any

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


class ReseedableRNG:
    """One numpy generator that starts anew for each of many seeds, at a tenth of what making one costs.

    The seed's hash becomes PCG64's whole 128-bit state.
    """

    def __init__(self) -> None:
        import numpy as np

        self._bits = np.random.PCG64(0)
        self._state: Any = self._bits.state
        self._generator = np.random.Generator(self._bits)

    def __call__(self, seed: int) -> np.random.Generator:
        """The generator, as if it had never been used; valid until the next call."""
        digest = hashlib.blake2b(seed.to_bytes(8, "big"), digest_size=16).digest()
        self._state["state"]["state"] = int.from_bytes(digest, "big")
        self._bits.state = self._state
        return self._generator

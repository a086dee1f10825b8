"""Random streams, each derived from one seed and names for its purpose.

One number seeds a run, but data order, initial weights and sampling need separate streams. With one generator, an extra
sample would change the later training order. So a stream is named, `generator(seed, "pretrain", "init")`. Its seed is
the BLAKE2 hash of the run's seed and the names. Streams with different names are independent, a new stream never
changes another, and the mapping is fixed (a test checks it). No global generator is used.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


def derive(seed: int, *names: str | int) -> int:
    """Return a stream's seed in [0, 2**63). JSON distinguishes "1" from 1, and ("a", "b") from ("ab",)."""
    digest = hashlib.blake2b(json.dumps([seed, *names]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(seed: int, *names: str | int) -> torch.Generator:
    """Return a CPU torch generator for the stream called `names`."""
    import torch

    return torch.Generator().manual_seed(derive(seed, *names))


def numpy_rng(seed: int, *names: str | int) -> np.random.Generator:
    """Return a numpy generator (PCG64) for the stream called `names`."""
    import numpy as np

    return np.random.Generator(np.random.PCG64(derive(seed, *names)))


def splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the finalizer of SplitMix64 of each number: a bijection in which every input bit affects every output bit.

    Source: Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195. Hashes of text use it, too: the low bits of a polynomial
    are weak. The bits decide sampled tokens, arithmetic problems and near duplicates, so they never change.
    """
    import numpy as np

    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class ReseedableRNG:
    """One numpy generator, reseeded for each record at a tenth of the cost of a new one.

    The seed's hash becomes PCG64's 128-bit state.
    """

    def __init__(self) -> None:
        import numpy as np

        self._bits = np.random.PCG64(0)
        self._state: Any = self._bits.state
        self._generator = np.random.Generator(self._bits)

    def __call__(self, seed: int) -> np.random.Generator:
        """Return the generator in its initial state for `seed`; valid until the next call."""
        digest = hashlib.blake2b(seed.to_bytes(8, "big"), digest_size=16).digest()
        self._state["state"]["state"] = int.from_bytes(digest, "big")
        self._bits.state = self._state
        return self._generator

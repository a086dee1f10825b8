"""A Bloom filter (Bloom 1970) in torch: membership of a set in a fixed number of bits, with false positives and no misses.

For n items in m bits with k hashes, the false-positive rate is about (1 - e^(-k n / m))^k. It is least for
k = m / n * ln 2, and then m = -n ln(p) / (ln 2)^2 bits give the rate p: 9.6 bits per item for 1 %.

`add` is an atomic test-and-set. Its result equals that of adding the keys one after the other, so it reports the second
copy of a key within a batch. Of threads that add one key at once, exactly one finds it new.

Subtle: torch has no scattered OR. Only bits that are not set are added, each once, so a scattered sum into bytes is one.
Numbers are int64 and wrap modulo 2^64 like unsigned ones; shifts to the right are masked.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from whorl.errors import ConfigError

if TYPE_CHECKING:
    import torch

_CHUNK_KEYS = 1 << 16
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))  # of splitmix64, as int64


class BloomFilter:
    """A set of 64-bit keys, such as those of `text_keys`.

    Args:
        n: items for which the filter is sized; it takes more, at a higher false-positive rate.
        false_positive_rate: probability that a new item is reported as present once n items are in.
        device: of torch, where the bits are.
    """

    def __init__(self, n: int, false_positive_rate: float = 1e-3, device: str = "cpu") -> None:
        if n < 1 or not 0 < false_positive_rate < 1:
            raise ConfigError(
                f"Bloom filter of {n} items with false-positive rate {false_positive_rate}",
                expected="1 item or more, and a rate between 0 and 1",
                do="change n or false_positive_rate",
            )
        import torch  # takes a second, which processes without a filter should not pay

        self.n_bits = max(8, math.ceil(-n * math.log(false_positive_rate) / math.log(2) ** 2))
        self.n_hashes = max(1, round(self.n_bits / n * math.log(2)))
        self.n_added, self._n_set = 0, 0  # keys that were new, and bits
        self._bits = torch.zeros(-(-self.n_bits // 8), dtype=torch.uint8, device=device)
        self._seeds = _mix(torch.arange(1, self.n_hashes + 1, device=device))
        self._lock = threading.Lock()

    def add(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Add a batch, and return which keys were present, in the filter or earlier in the batch: [n]."""
        present = np.empty(len(keys), bool)
        with self._lock:
            for begin in range(0, len(keys), _CHUNK_KEYS):
                present[begin : begin + _CHUNK_KEYS] = self._add(keys[begin : begin + _CHUNK_KEYS])
        return present

    def contains(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which keys are present: [n]. Adds none."""
        present = np.empty(len(keys), bool)
        for begin in range(0, len(keys), _CHUNK_KEYS):
            positions = self._positions(keys[begin : begin + _CHUNK_KEYS])
            present[begin : begin + _CHUNK_KEYS] = self._are_set(positions).all(dim=1).cpu().numpy()
        return present

    def false_positive_rate(self) -> float:
        """Return the rate for the bits that are set: their share to the power of k. Its expectation is the formula."""
        return float((self._n_set / self.n_bits) ** self.n_hashes)

    def _add(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        import torch

        positions = self._positions(keys)
        unset = torch.nonzero(~self._are_set(positions).ravel()).ravel()
        ordered, order = positions.ravel()[unset].sort(stable=True)
        is_first = torch.ones_like(ordered, dtype=torch.bool)
        is_first[1:] = ordered[1:] != ordered[:-1]
        fresh = ordered[is_first]
        # The first key that needs the bit finds it unset.
        present = torch.ones(len(keys), dtype=torch.bool, device=positions.device)
        present[unset[order[is_first]] // self.n_hashes] = False
        self._n_set += len(fresh)
        self._bits.index_add_(0, fresh >> 3, (1 << (fresh & 7)).to(torch.uint8))
        found: NDArray[np.bool_] = present.cpu().numpy()
        self.n_added += int((~found).sum())
        return found

    def _positions(self, keys: NDArray[np.uint64]) -> torch.Tensor:
        """Return the bits of each key: [n, n_hashes] int64."""
        import torch

        values = torch.from_numpy(np.ascontiguousarray(keys).view(np.int64)).to(self._bits.device)
        return (_mix(values[:, None] ^ self._seeds) & (2**63 - 1)) % self.n_bits

    def _are_set(self, positions: torch.Tensor) -> torch.Tensor:
        return (self._bits[positions >> 3] >> (positions & 7)) & 1 > 0


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Finalizer of splitmix64, as in `shingles.py`, of int64."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * multiplier
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def text_keys(texts: Iterable[str]) -> NDArray[np.uint64]:
    """Return 64 bits of the BLAKE2b hash of each text: [n]."""
    digests = [
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest() for text in texts
    ]
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)

"""A Bloom filter (Bloom 1970): membership of a set in a fixed number of bits, with false positives and no misses.

For n items in m bits with k hashes, the false-positive rate is about (1 - e^(-k n / m))^k. It is least for
k = m / n * ln 2, and then m = -n ln(p) / (ln 2)^2 bits give the rate p: 9.6 bits per item for 1 %.

`add` is an atomic test-and-set. Its result equals that of adding the keys one after the other, so it reports the second
copy of a key within a batch. Of threads that add one key at once, exactly one finds it new.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from whorl.corpus.deduplication.shingles import mix
from whorl.errors import ConfigError

_CHUNK_KEYS = 1 << 16


class BloomFilter:
    """A set of 64-bit keys, such as those of `text_keys`.

    Args:
        n: items for which the filter is sized; it takes more, at a higher false-positive rate.
        false_positive_rate: probability that a new item is reported as present once n items are in.
    """

    def __init__(self, n: int, false_positive_rate: float = 1e-3) -> None:
        if n < 1 or not 0 < false_positive_rate < 1:
            raise ConfigError(
                f"Bloom filter of {n} items with false-positive rate {false_positive_rate}",
                expected="1 item or more, and a rate between 0 and 1",
                do="change n or false_positive_rate",
            )
        self.n_bits = max(8, math.ceil(-n * math.log(false_positive_rate) / math.log(2) ** 2))
        self.n_hashes = max(1, round(self.n_bits / n * math.log(2)))
        self.n_added = 0  # keys that were new
        self._bits = np.zeros(-(-self.n_bits // 8), np.uint8)
        self._seeds = mix(np.arange(1, self.n_hashes + 1, dtype=np.uint64))
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
            present[begin : begin + _CHUNK_KEYS] = self._are_set(positions).all(axis=1)
        return present

    def false_positive_rate(self) -> float:
        """Return the rate (1 - e^(-k n / m))^k for the keys that are in."""
        return float((1 - math.exp(-self.n_hashes * self.n_added / self.n_bits)) ** self.n_hashes)

    def _add(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        positions = self._positions(keys)
        unset = np.flatnonzero(~self._are_set(positions))
        fresh, index = np.unique(positions.ravel()[unset], return_index=True)
        present = np.ones(len(keys), bool)
        present[unset[index] // self.n_hashes] = False  # the first key that needs the bit finds it unset
        np.bitwise_or.at(self._bits, fresh >> 3, np.left_shift(1, fresh & 7).astype(np.uint8))
        self.n_added += int((~present).sum())
        return present

    def _positions(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the bits of each key: [n, n_hashes]."""
        return (mix(keys[:, None] ^ self._seeds) % np.uint64(self.n_bits)).astype(np.int64)

    def _are_set(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = (self._bits[positions >> 3] >> (positions & 7).astype(np.uint8)) & 1 > 0
        return found


def text_keys(texts: Iterable[str]) -> NDArray[np.uint64]:
    """Return 64 bits of the BLAKE2b hash of each text: [n]."""
    digests = [
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest() for text in texts
    ]
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)

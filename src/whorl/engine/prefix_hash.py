"""Chained hashes of full pages of token ids; the key of the prefix cache."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

PageHash = bytes


def prefix_hashes(
    seed: PageHash, ids: Sequence[int], page_size: int, hashes: list[PageHash]
) -> list[PageHash]:
    """Append the hashes of further full pages of `ids` to `hashes` and return it."""
    for page in range(len(hashes), len(ids) // page_size):
        before = hashes[-1] if hashes else seed
        block = np.asarray(ids[page * page_size : (page + 1) * page_size], np.int64).tobytes()
        hashes.append(hashlib.blake2b(before + block, digest_size=16).digest())
    return hashes

"""Chained hashes of full pages of token ids, by which cached prefixes are found."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

Hash = bytes


def chain(seed: Hash, ids: Sequence[int], page_size: int, known: list[Hash]) -> list[Hash]:
    """Extends `known` by the hashes of the further full pages of `ids`, and returns it."""
    for page in range(len(known), len(ids) // page_size):
        before = known[-1] if known else seed
        block = np.asarray(ids[page * page_size : (page + 1) * page_size], np.int64).tobytes()
        known.append(hashlib.blake2b(before + block, digest_size=16).digest())
    return known

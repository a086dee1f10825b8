"""MinHash signatures and the keys of their bands.

MinHash (Broder 1997, On the Resemblance and Containment of Documents) keeps a number for each of several hash functions:
its minimum over the shingles. Two documents agree in any one with probability J, their Jaccard similarity, so the
fraction of equal numbers estimates J, with a standard deviation of at most 0.044 for 128 hashes.

A hash is the upper half of a * x + b modulo 2^64, and the minimum commutes with taking the upper half. The native
path keeps 64 minima in vector registers. `minhash_signature_reference` is the slow reference.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from whorl.corpus.deduplication.native import library, pointer
from whorl.corpus.deduplication.settings import MinHashConfig
from whorl.corpus.deduplication.shingles import P, TextBlock, block_shingles, shingle_hashes
from whorl.tracking.seeds import splitmix64

_PASS = 64  # PASS of native.cpp


@functools.cache
def hash_functions(n: int, seed: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return n odd multipliers and n increments, so that signatures are comparable between runs."""
    random = np.random.Generator(np.random.PCG64(seed))
    multipliers = random.integers(0, 1 << 64, n, np.uint64, endpoint=False) | np.uint64(1)
    return multipliers, random.integers(0, 1 << 64, n, np.uint64, endpoint=False)


def padded_functions(config: MinHashConfig) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the hash functions with zeros up to a multiple of what the native loop computes at once."""
    multipliers, increments = hash_functions(config.hashes, config.seed)
    padding = (0, -config.hashes % _PASS)
    return np.pad(multipliers, padding), np.pad(increments, padding)


def minhash_signatures(
    texts: Sequence[bytes] | TextBlock, config: MinHashConfig | None = None
) -> NDArray[np.uint32]:
    """Return the MinHash signatures of documents: [len(texts), hashes]. Hashes them in blocks of 2 MB."""
    config = config or MinHashConfig()
    block = texts if isinstance(texts, TextBlock) else TextBlock.of(texts)
    out = np.empty((len(block), config.hashes), np.uint32)
    for begin, end in block.blocks():
        shingles, first = block_shingles(block.part(begin, end), config)
        _minhash(shingles, first, config, out[begin:end])
    return out


def _minhash(
    shingles: NDArray[np.uint64], first: NDArray[np.int64], config: MinHashConfig, out: NDArray[np.uint32]
) -> None:
    native = library()
    if native is not None:
        multipliers, increments = padded_functions(config)
        native.whorl_minhash(
            pointer(shingles), pointer(first), len(out), pointer(multipliers), pointer(increments), config.hashes,
            pointer(out),
        )  # fmt: skip
        return
    for k, (a, b) in enumerate(zip(*hash_functions(config.hashes, config.seed), strict=True)):
        hashed = ((shingles * a + b) >> np.uint64(32)).astype(np.uint32)
        out[:, k] = np.minimum.reduceat(hashed, first[:-1])


def band_keys(signatures: NDArray[np.uint32], config: MinHashConfig) -> NDArray[np.uint64]:
    """Return a hash of the numbers of each band, and of the band's number: [len(signatures), bands]."""
    out = np.empty((len(signatures), config.bands), np.uint64)
    native = library()
    if native is not None:
        signatures = np.ascontiguousarray(signatures)
        native.whorl_band_keys(
            pointer(signatures), len(out), config.hashes, config.bands, config.rows, pointer(out)
        )
        return out
    for band in range(config.bands):
        key = np.full(len(out), band, np.uint64)
        for row in range(config.rows):
            key = splitmix64(key ^ signatures[:, band * config.rows + row].astype(np.uint64)) * np.uint64(P)
        out[:, band] = key
    return out


def divided_keys(
    keys: NDArray[np.uint64], partitions: int
) -> tuple[NDArray[np.uint32], NDArray[np.uint16], NDArray[np.int64]]:
    """Return the lower halves of keys by partition, a range of the keys, and in a partition by document.

    Args:
        keys: [n, bands].
        partitions: a power of two.

    Returns:
        keys [n * bands]; how many of each document are in each partition [partitions, n]; where each begins, and the end.
    """
    n, bands = keys.shape
    bits = partitions.bit_length() - 1
    counts, first = np.empty((partitions, n), np.uint16), np.zeros(partitions + 1, np.int64)
    native = library()
    if native is not None:
        out = np.empty(keys.size, np.uint32)
        native.whorl_partition(pointer(keys), n, bands, bits, pointer(out), pointer(counts), pointer(first))
        return out, counts, first
    numbers = (keys >> np.uint64(64 - bits)).astype(np.int64) if bits else np.zeros(keys.shape, np.int64)
    order = np.argsort(numbers.ravel(), kind="stable")
    for number in range(partitions):
        counts[number] = (numbers == number).sum(axis=1)
    np.cumsum(counts.sum(axis=1), out=first[1:])
    return keys.ravel()[order].astype(np.uint32), counts, first


def signature_digests(signatures: NDArray[np.uint16]) -> NDArray[np.uint64]:
    """Return a hash of each signature: [n]."""
    padded = np.pad(signatures, ((0, 0), (0, -signatures.shape[1] % 4)))
    rows = np.ascontiguousarray(padded).view(np.uint64)
    native = library()
    found = np.zeros(len(rows), np.uint64)
    if native is not None:
        native.whorl_digest(pointer(rows), len(rows), rows.shape[1], pointer(found))
        return found
    for column in rows.T:
        found = splitmix64(found ^ column) * np.uint64(P)
    return found


def minhash_signature_reference(text: bytes, config: MinHashConfig | None = None) -> NDArray[np.uint32]:
    """Reference: return one document's signature, [hashes]."""
    config = config or MinHashConfig()
    shingles = np.array(sorted(shingle_hashes(text, config)), np.uint64)
    functions = zip(*hash_functions(config.hashes, config.seed), strict=True)
    return np.array([((shingles * a + b) >> np.uint64(32)).min() for a, b in functions], np.uint32)

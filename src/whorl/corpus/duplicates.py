"""Near-duplicate clusters: MinHash, locality-sensitive hashing, union-find.

The similarity of two documents is the Jaccard similarity J of their sets of five-word shingles. MinHash (Broder 1997,
On the Resemblance and Containment of Documents) keeps 128 numbers per document, each the minimum of another random hash
over its shingles. Two documents agree in any one of them with probability J, so the fraction of equal numbers estimates
J with a standard deviation of at most 0.044.

The 128 numbers are cut into 32 bands of 4. Documents that agree in a whole band share a bucket and are compared. A pair
is missed with probability (1 - J^4)^32: 13 % at J = 0.5, 1 % at 0.6, 0.02 % at 0.7, below 1e-7 at 0.8. Pairs above the
threshold are joined into clusters, so the ends of a chain may differ.

The fast path is vectorized over a block of documents. A word is a run of letters, digits, underscores and non-ASCII
bytes; its hash is a polynomial in its bytes. With S[i] the sum of byte[j] * P^j for j < i (modulo 2^64), the word
[a, b) has the hash (S[b] - S[a]) * P^-a, since an odd P is invertible modulo 2^64. `shingle_hashes` and
`minhash_signature_reference` are the slow reference; a test compares them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whorl.corpus.measures.measure import Columns, Measure, Texts

N_HASHES = 128
BANDS, ROWS_PER_BAND = 32, 4
SHINGLE = 5
# Larger buckets are compared with their leaders only, because m^2 pairs would take too long.
MAX_ALL_PAIRS_BUCKET = 256
# Only the beginning of a longer document is compared: hashing a block needs about 60 bytes per byte of text.
MAX_SIGNATURE_BYTES = 2_000_000

_MASK = (1 << 64) - 1
_P = 0x9E3779B97F4A7C15  # odd, so invertible modulo 2^64
_P_INVERSE = pow(_P, -1, 1 << 64)
_WORD = np.zeros(256, bool)
_WORD[[*range(48, 58), *range(65, 91), 95, *range(97, 123), *range(128, 256)]] = True
# The 128 hash functions are constant, so that signatures are comparable between runs.
_RANDOM = np.random.Generator(np.random.PCG64(20240607))
_MULTIPLIERS = _RANDOM.integers(0, 1 << 64, N_HASHES, np.uint64, endpoint=False) | np.uint64(1)
_INCREMENTS = _RANDOM.integers(0, 1 << 64, N_HASHES, np.uint64, endpoint=False)


def _powers(base: int, n: int) -> NDArray[np.uint64]:
    """Return base^0 .. base^(n-1) modulo 2^64."""
    return _power_table(base, 1 << max(10, (n - 1).bit_length()))[:n]


@lru_cache(maxsize=4)  # 32 MB each for a block of 4 MB
def _power_table(base: int, n: int) -> NDArray[np.uint64]:
    out = np.full(n, base, np.uint64)
    out[:1] = 1
    np.multiply.accumulate(out, out=out)
    out.setflags(write=False)
    return out


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Finalizer of splitmix64: spreads a polynomial hash, whose low bits are weak, over all 64 bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def span_hashes(
    values: NDArray[Any], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """Return a hash of each span values[starts[i] : ends[i]], which does not depend on where it is.

    Args:
        values: [n] numbers, such as bytes, code points, or the hashes of words.
    """
    sums = np.zeros(len(values) + 1, np.uint64)
    np.cumsum(values * _powers(_P, len(values)), out=sums[1:])
    return _mix((sums[ends] - sums[starts]) * _powers(_P_INVERSE, len(values) + 1)[starts])


def minhash_signatures(texts: Sequence[bytes]) -> NDArray[np.uint32]:
    """Return the MinHash signatures of a block of documents: [len(texts), N_HASHES]. See `block_shingles`."""
    return _minhash(*block_shingles(texts))


def measure_signatures(batch: Texts) -> Columns:
    """Return the signature of each text, 4 * N_HASHES bytes, in the byte order of this machine."""
    signatures = minhash_signatures([data[:MAX_SIGNATURE_BYTES] for data in batch.data])
    return {"signature": [row.tobytes() for row in signatures]}


MINHASH = Measure(
    "minhash", 1, "Broder 1997", {"signature": f"binary[{4 * N_HASHES}]"}, lambda: measure_signatures
)


def block_shingles(texts: Sequence[bytes]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return the shingle hashes of a block of documents, with repetitions, and where each document's begin.

    Args:
        texts: documents of a few megabytes in total (about 60 bytes of memory per byte of text).

    A document without a word has the empty shingle.
    """
    data = np.frombuffer(b"\n".join(texts) + b"\n", np.uint8)
    is_word = _WORD[data]
    edges = np.flatnonzero(np.diff(is_word, prepend=False))
    starts, ends = edges[::2], edges[1::2]  # the last byte is no word byte, so edges pair up
    words = span_hashes(data, starts, ends)
    stops = np.cumsum([len(t) + 1 for t in texts])  # document i ends before stops[i]
    first_word = np.concatenate([[0], np.searchsorted(starts, stops)])  # [n_documents + 1]
    n_words = np.diff(first_word)
    # A document of fewer than five words is one shingle of all its words.
    n_shingles = np.maximum(n_words - SHINGLE + 1, 1)
    first_shingle = np.concatenate([[0], np.cumsum(n_shingles)])
    at = np.arange(first_shingle[-1]) + np.repeat(first_word[:-1] - first_shingle[:-1], n_shingles)
    left = np.repeat(first_word[1:], n_shingles) - at  # words from this one to the document's end
    words = np.append(words, np.zeros(SHINGLE, np.uint64))
    shingles = np.zeros(len(at), np.uint64)
    for i in range(SHINGLE):
        shingles = shingles * np.uint64(_P) + np.where(left > i, words[np.minimum(at + i, len(words) - 1)], 0)
    return _mix(shingles), first_shingle[:-1]


def _minhash(shingles: NDArray[np.uint64], first: NDArray[np.int64]) -> NDArray[np.uint32]:
    out = np.empty((len(first), N_HASHES), np.uint32)
    for k in range(N_HASHES):  # multiply-add, upper half: a separate hash for every k
        hashed = ((shingles * _MULTIPLIERS[k] + _INCREMENTS[k]) >> np.uint64(32)).astype(np.uint32)
        out[:, k] = np.minimum.reduceat(hashed, first)
    return out


def shingle_hashes(text: bytes) -> set[int]:
    """Reference: return the hashes of one document's shingles, computed word by word."""
    words, word = [], b""
    for byte in (*text, 10):
        if _WORD[byte]:
            word += bytes([byte])
        elif word:
            words.append(_mix64(sum(b * pow(_P, i, 1 << 64) for i, b in enumerate(word))))
            word = b""
    out = set()
    for at in range(max(len(words) - SHINGLE + 1, 1)):
        shingle = 0
        window = words[at : at + SHINGLE]
        for value in window + [0] * (SHINGLE - len(window)):
            shingle = (shingle * _P + value) & _MASK
        out.add(_mix64(shingle))
    return out


def _mix64(x: int) -> int:
    return int(_mix(np.array([x & _MASK], np.uint64))[0])


def minhash_signature_reference(text: bytes) -> NDArray[np.uint32]:
    """Reference: return one document's signature, [N_HASHES]."""
    shingles = np.array(sorted(shingle_hashes(text)), np.uint64)
    return np.array(
        [((shingles * a + b) >> np.uint64(32)).min() for a, b in zip(_MULTIPLIERS, _INCREMENTS, strict=True)],
        np.uint32,
    )


def jaccard_similarity(a: bytes, b: bytes) -> float:
    """Reference: return the exact Jaccard similarity of two documents' shingles."""
    first, second = shingle_hashes(a), shingle_hashes(b)
    return len(first & second) / len(first | second)


def removable(texts: Sequence[bytes], threshold: float) -> NDArray[np.bool_]:
    """Return which documents of a cluster have an exact Jaccard similarity of `threshold` with an earlier one that stays.

    MinHash gives candidates, and a cluster may be a chain: its ends need not be similar. So all pairs are verified.
    """
    kept: list[NDArray[np.uint64]] = []
    remove = np.zeros(len(texts), bool)
    for i, text in enumerate(texts):
        shingles = np.unique(block_shingles([text])[0])
        for other in kept:
            common = len(np.intersect1d(shingles, other, assume_unique=True))
            if common >= threshold * (len(shingles) + len(other) - common):
                remove[i] = True
                break
        else:
            kept.append(shingles)
    return remove


class UnionFind:
    """Disjoint sets of 0 .. n-1. A set's root is its smallest member, so the order of unions has no effect."""

    def __init__(self, n: int) -> None:
        self.parent = np.arange(n)

    def find(self, i: int) -> int:
        parent = self.parent
        while (up := int(parent[i])) != i:
            parent[i] = parent[up]  # path halving
            i = up
        return i

    def union(self, i: int, j: int) -> None:
        a, b = self.find(i), self.find(j)
        self.parent[max(a, b)] = min(a, b)

    def roots(self) -> NDArray[np.int64]:
        """Return each member's root, by pointer jumping: roots are smaller than their members."""
        roots = self.parent
        while not np.array_equal(up := roots[roots], roots):
            roots = up
        return roots


def cluster_near_duplicates(
    all_signatures: NDArray[np.uint32], threshold: float, sets: UnionFind
) -> UnionFind:
    """Join, in `sets`, all documents that share a band and agree in at least `threshold` of the signature.

    Args:
        all_signatures: [n_documents, N_HASHES]; may be a memory map, which is read one band at a time.
        threshold: minimum estimated Jaccard similarity, 0 to 1.
        sets: sets of exact duplicates; their members are not compared again.
    """
    distinct = np.flatnonzero(sets.roots() == np.arange(len(all_signatures)))
    for band in range(BANDS):
        columns = all_signatures[distinct, band * ROWS_PER_BAND : (band + 1) * ROWS_PER_BAND].astype(
            np.uint64
        )
        key = np.zeros(len(distinct), np.uint64)
        for k in range(ROWS_PER_BAND):
            key = _mix(key ^ columns[:, k]) * np.uint64(_P)
        order = np.argsort(key, kind="stable")
        bounds = np.flatnonzero(np.diff(key[order])) + 1
        for begin, end in _buckets(bounds, len(order)):
            _union_similar(distinct[order[begin:end]], all_signatures, threshold, sets)
    return sets


def _buckets(bounds: NDArray[np.int64], n: int) -> Iterable[tuple[int, int]]:
    """Yield the runs of equal keys with at least two documents."""
    edges = np.concatenate([[0], bounds, [n]])
    long = np.flatnonzero(np.diff(edges) > 1)
    return zip(edges[long].tolist(), edges[long + 1].tolist(), strict=True)


def _union_similar(
    bucket: NDArray[np.int64], all_signatures: NDArray[np.uint32], threshold: float, sets: UnionFind
) -> None:
    roots = [sets.find(int(i)) for i in bucket]
    if len(set(roots)) == 1:
        return
    signatures = np.asarray(all_signatures[bucket])  # [m, N_HASHES]
    rest = np.arange(len(bucket))
    all_pairs = len(bucket) <= MAX_ALL_PAIRS_BUCKET
    while len(rest) > 1:
        leader, rest = rest[0], rest[1:]
        similar = (signatures[rest] == signatures[leader]).mean(axis=1) >= threshold
        for other in rest[similar]:
            sets.union(int(bucket[leader]), int(bucket[other]))
        if not all_pairs:
            rest = rest[~similar]


def first_occurrence(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return, for each row of 128-bit hashes [n, 2], the first row with the same hash."""
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))  # stable: equal hashes stay in row order
    ordered = hashes[order]
    is_new = np.ones(len(order), bool)
    is_new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    first = np.empty(len(order), np.int64)
    first[order] = order[np.flatnonzero(is_new)][np.cumsum(is_new) - 1]
    return first


def union_exact_duplicates(first: NDArray[np.int64]) -> UnionFind:
    """Return the sets of exact duplicates."""
    sets = UnionFind(len(first))
    sets.parent[:] = first
    return sets

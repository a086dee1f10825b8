"""Clusters of near duplicates: joined by their estimated similarity, by locality-sensitive hashing and union-find.

A signature is cut into bands. Documents that agree in a whole band share a bucket and are compared. With the default of
32 bands of 4, a pair is missed with probability (1 - J^4)^32: 13 % at J = 0.5, 1 % at 0.6. Pairs above
the threshold are joined into clusters, so the ends of a chain may differ: right for a split, which must not divide
copies, and wrong for removal (`verify.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from whorl.corpus.deduplication.native import library, pointer, pointers
from whorl.corpus.deduplication.near.arrays import read_arrays

# Larger buckets are compared with this many leaders only, because m^2 pairs would take too long.
MAX_ALL_PAIRS_BUCKET = 256


def join_buckets(
    keys: NDArray[np.uint32], documents: NDArray[np.int64], signatures: Sequence[NDArray[np.uint16]], threshold: float,
    text_file: NDArray[np.int64], parent: NDArray[np.int64],
) -> None:  # fmt: skip
    """Join, in `parent`, documents of equal keys that agree in at least `threshold` of their signatures.

    Args:
        keys, documents: [n] records; both are overwritten.
        signatures: [n_documents, hashes] of each file. A document is a number over all files in order.
        text_file: [n_documents] documents with the same number, except 0, are not joined (`sign.text_files`).
        parent: [n_documents] a forest in which no parent is larger than its child.
    """
    hashes = signatures[0].shape[1]
    least = math.ceil(threshold * hashes - 1e-9)
    native = library()
    if native is None:
        order = np.argsort(keys, kind="stable")
        _join(keys[order], documents[order], signatures, least, text_file, parent)
        return
    first = np.cumsum([0, *map(len, signatures)], dtype=np.int64)
    scratch = np.empty_like(keys), np.empty_like(documents)
    addresses = pointers(list(signatures))
    native.whorl_sort(pointer(keys), pointer(documents), len(keys), pointer(scratch[0]), pointer(scratch[1]))
    native.whorl_join(
        pointer(keys), pointer(documents), len(keys), pointer(addresses), pointer(first), len(signatures), hashes,
        least, MAX_ALL_PAIRS_BUCKET, pointer(text_file), pointer(parent),
    )  # fmt: skip


def _join(
    keys: NDArray[np.uint32], documents: NDArray[np.int64], signatures: Sequence[NDArray[np.uint16]], least: int,
    text_file: NDArray[np.int64], parent: NDArray[np.int64],
) -> None:  # fmt: skip
    """Compute `join_buckets` in numpy, from sorted keys."""
    first = np.cumsum([0, *map(len, signatures)])
    edges = np.concatenate([[0], np.flatnonzero(np.diff(keys)) + 1, [len(keys)]])
    for i in np.flatnonzero(np.diff(edges) > 1):
        bucket = documents[edges[i] : edges[i + 1]]
        if len({_find(parent, int(d)) for d in bucket}) == 1:
            continue
        file = np.searchsorted(first, bucket, side="right") - 1
        rows = np.stack(
            [signatures[f][d] for f, d in zip(file, (bucket - first[file]).tolist(), strict=True)]
        )
        rest = np.arange(len(bucket))
        for _ in range(MAX_ALL_PAIRS_BUCKET):
            if len(rest) < 2:
                break
            leader, rest = rest[0], rest[1:]
            own, others = text_file[bucket[leader]], text_file[bucket[rest]]
            similar = ((rows[rest] == rows[leader]).sum(axis=1) >= least) & ((own == 0) | (others != own))
            for other in rest[similar].tolist():
                a, b = _find(parent, int(bucket[leader])), _find(parent, int(bucket[other]))
                parent[max(a, b)] = min(a, b)
            if len(bucket) > MAX_ALL_PAIRS_BUCKET:
                rest = rest[~similar]


def _find(parent: NDArray[np.int64], i: int) -> int:
    while (up := int(parent[i])) != i:
        parent[i] = parent[up]  # path halving
        i = up
    return i


def flattened(parent: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each member's root, by pointer jumping: roots are smaller than their members."""
    while not np.array_equal(up := parent[parent], parent):
        parent = up
    return parent


def connected_components(a: NDArray[np.int64], b: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """Return the smallest member of the component of each of n nodes, under the edges a[i] - b[i].

    Every root takes the smallest neighboring root as its parent, then all paths are halved to their ends. A few rounds
    suffice, since at least the larger root of every edge goes (the shortcutting of Shiloach & Vishkin 1982).
    """
    parent = np.arange(n)
    while len(a):
        x, y = parent[a], parent[b]
        differs = x != y
        a, b, x, y = a[differs], b[differs], x[differs], y[differs]
        np.minimum.at(parent, np.maximum(x, y), np.minimum(x, y))
        parent = flattened(parent)
    return parent


def forest(paths: Iterable[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the nodes of files of edges (two arrays of ends), sorted, and the smallest node of the component of each.

    One file at a time: memory is that of the nodes, and of the edges of a file.
    """
    node = root = np.zeros(0, np.int64)
    for path in paths:
        a, b = read_arrays(path)[:2]
        node, index = np.unique(np.concatenate([root, a, node, b]), return_inverse=True)
        a, b = np.split(index, 2)
        root = node[connected_components(a, b, len(node))]
    return node, root


def first_occurrence(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return, for each row of 128-bit hashes [n, 2], the first row with the same hash."""
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))  # stable: equal hashes stay in row order
    ordered = hashes[order]
    is_new = np.ones(len(order), bool)
    is_new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    first = np.empty(len(order), np.int64)
    first[order] = order[np.flatnonzero(is_new)][np.cumsum(is_new) - 1]
    return first

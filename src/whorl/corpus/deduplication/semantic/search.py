"""Semantic duplicates: embeddings whose cosine similarity reaches a threshold, found by multi-probe search.

Vectors are divided into cells by their nearest centroid (an inverted file, IVF). Each is compared with the vectors of its
`probes` nearest cells, so for n vectors in k cells about n^2 probes / k products are computed instead of n^2 / 2.

Subtle: vectors are visited in their order, and one is removed if an earlier one that stays is similar. Of the similar
vectors in a cell the first 64 are considered, so a pair beyond them may both stay.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whorl.corpus.deduplication.semantic.kmeans import default_cells, train_centroids
from whorl.corpus.deduplication.semantic.settings import SearchConfig
from whorl.corpus.deduplication.semantic.vectors import Vectors

MAX_CANDIDATES = 64  # similar vectors of a cell
_BLOCK = 1 << 22  # products at a time
_ROUNDING = 1e-6
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Pairs:
    """Similar pairs, in the order of `later`, then `earlier`: [n] each, later > earlier.

    n_products: dot products of full width, of training, assignment, search and confirmation.
    """

    later: Rows
    earlier: Rows
    cosine: NDArray[np.float64]
    n_products: int


@dataclass(frozen=True)
class SemanticDuplicates:
    """Removed vectors, in order.

    removed: [n] rows; matched: [n] rows of the vectors that stay, counted through `earlier` first where it is given;
    similarity: [n] cosine. n_products: see `Pairs`.
    """

    removed: Rows
    matched: Rows
    similarity: NDArray[np.float64]
    n_products: int


def semantic_duplicates(
    vectors: Vectors, config: SearchConfig | None = None, *, earlier: Vectors | None = None
) -> SemanticDuplicates:
    """Return which vectors are near an earlier one that stays.

    Args:
        vectors: in the order of preference.
        earlier: vectors of earlier corpora, which come first and always stay.

    Raises:
        ConfigError: the settings do not fit the vectors.
        DataError: `earlier` has another encoder or width.
    """
    config = config or SearchConfig()
    n_earlier, values = 0, vectors.values
    if earlier is not None:
        vectors.check_same(earlier)
        n_earlier, values = len(earlier.values), np.concatenate([earlier.values, values])
    if len(values) == 0:
        return SemanticDuplicates(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), 0)
    # Equal vectors are found by sorting, so that a million of them take no products.
    rows = (
        np.ascontiguousarray(values)
        .view(np.dtype((np.void, values.dtype.itemsize * values.shape[1])))
        .ravel()
    )
    _, first, inverse = np.unique(rows, return_index=True, return_inverse=True)
    distinct = np.sort(first)
    pairs = similar_pairs(values[distinct], config)
    matched, cosine = np.full(len(values), -1), np.zeros(len(values))
    ends = distinct[pairs.later].tolist(), distinct[pairs.earlier].tolist(), pairs.cosine.tolist()
    for i, j, value in zip(*ends, strict=True):
        if i >= n_earlier and matched[i] < 0 and matched[j] < 0:
            matched[i], cosine[i] = j, value
    for i in np.setdiff1d(np.arange(n_earlier, len(values)), distinct).tolist():
        original = first[inverse[i]]
        gone = matched[original] >= 0
        matched[i], cosine[i] = (matched[original], cosine[original]) if gone else (original, 1.0)
    removed = np.flatnonzero(matched >= 0)
    return SemanticDuplicates(removed - n_earlier, matched[removed], cosine[removed], pairs.n_products)


def similar_pairs(values: NDArray[np.float32], config: SearchConfig) -> Pairs:
    """Return the pairs of unit vectors [n, d] whose cosine reaches the threshold, as far as the probes find them.

    As many probes as there are cells, or one cell, are an exhaustive search.
    """
    n = len(values)
    cells = min(config.cells or default_cells(n), n)
    if cells == 1:
        centroids, n_products = values[:1], 0
    else:
        points = config.points_per_centroid
        centroids, n_products = train_centroids(values, cells, points_per_centroid=points, seed=config.seed)
    i, j, searched = _candidates(values, centroids, config)
    later, before, near, confirmed = _confirmed(values, i, j, config.similarity)
    return Pairs(later, before, near, n_products + searched + confirmed)


def _candidates(
    values: NDArray[np.float32], centroids: NDArray[np.float32], config: SearchConfig
) -> tuple[Rows, Rows, int]:
    """Return similar pairs of rows, each once or twice, and how many products of full width it took."""
    n, cells = len(values), len(centroids)
    p = min(config.probes, cells)
    parts = np.array_split(values, max(1, n * cells // _BLOCK))
    nearest = (
        np.concatenate([np.argsort(-(part @ centroids.T), axis=1)[:, :p] for part in parts])
        if cells > 1
        else np.zeros((n, 1), np.int64)
    )
    n_products, found = n * cells if cells > 1 else 0, [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
    for members, queries in _cells(nearest, cells):
        n_products += len(members) * len(queries)
        for part in np.array_split(queries, max(1, len(queries) * len(members) // _BLOCK)):
            at, to = np.nonzero(values[part] @ values[members].T >= config.similarity - _ROUNDING)
            i, j = part[at], members[to]
            rank = np.arange(len(at)) - np.searchsorted(at, at)  # members ascend, so the earliest come first
            chosen = (i != j) & (rank < MAX_CANDIDATES)
            found.append((i[chosen], j[chosen]))
    i, j = (np.concatenate(column) for column in zip(*found, strict=True))
    return i, j, n_products


def _cells(nearest: Rows, cells: int) -> Iterator[tuple[Rows, Rows]]:
    """Yield the members of each cell, and the vectors that probe it, both in order."""
    own = np.argsort(nearest[:, 0], kind="stable")
    bounds = np.searchsorted(nearest[own, 0], np.arange(cells + 1))
    probing = np.argsort(nearest.ravel(), kind="stable")
    edges = np.searchsorted(nearest.ravel()[probing], np.arange(cells + 1))
    for (a, b), (c, d) in zip(itertools.pairwise(bounds), itertools.pairwise(edges), strict=True):
        yield own[a:b], probing[c:d] // nearest.shape[1]


def _confirmed(
    values: NDArray[np.float32], i: Rows, j: Rows, similarity: float
) -> tuple[Rows, Rows, NDArray[np.float64], int]:
    """Return the pairs (later, earlier) with the cosine or more, each once and in order, and the products it took."""
    n = len(values)
    index = np.unique(np.maximum(i, j) * n + np.minimum(i, j))
    later, before = index // n, index % n
    cosine = _cosines(values, later, before)
    kept = cosine >= similarity - _ROUNDING
    return later[kept], before[kept], np.minimum(cosine[kept], 1.0), len(index)


def _cosines(values: NDArray[np.float32], i: Rows, j: Rows) -> NDArray[np.float64]:
    """Return the cosine of each pair of unit vectors: [n]."""
    found = np.empty(len(i))
    block = max(1, _BLOCK // values.shape[1])
    for begin in range(0, len(i), block):
        some = slice(begin, begin + block)
        found[some] = (values[i[some]] * values[j[some]]).sum(axis=1, dtype=np.float64)
    return found

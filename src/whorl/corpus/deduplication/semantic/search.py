"""Semantic duplicates: embeddings whose cosine similarity reaches a threshold, found by multi-probe search.

Vectors are divided into cells by their nearest centroid. Each is compared with the vectors of its `probes` nearest
cells, so for n vectors in k cells about n^2 probes / k products are computed instead of n^2 / 2. Every removal is
exact: the similarity of the two vectors is computed, and the one that it names stays.

Subtle: vectors are visited in their order, and one is removed if an earlier one that stays is similar. Of the earlier
similar vectors in a cell the first 64 are considered, so a pair beyond them may both stay.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whorl.corpus.deduplication.semantic.kmeans import default_cells, train_centroids, unit_length
from whorl.errors import ConfigError, DataError

MAX_CANDIDATES = 64  # earlier similar vectors of a cell
_BLOCK = 1 << 22  # products at a time


@dataclass(frozen=True)
class Vectors:
    """Embeddings and their encoder.

    values: [n, d] of unit length. encoder: address of the artifact, or name and version of the model.
    """

    values: NDArray[np.float32]
    encoder: str

    @classmethod
    def of(cls, values: NDArray[np.float32], encoder: str) -> Vectors:
        """Return embeddings scaled to unit length.

        Raises:
            DataError: a row is zero or not finite, or the array is not [n, d].
        """
        if values.ndim != 2:
            raise DataError(f"vectors of {encoder} have the shape {values.shape}", expected="[n, d]")
        values = np.asarray(values, np.float32)
        bad = np.flatnonzero(~(np.isfinite(values).all(axis=1) & values.any(axis=1)))
        if len(bad):
            raise DataError(
                f"vector {bad[0]} of {encoder} is zero or not finite",
                expected="finite vectors with a direction",
                do="leave out documents without an embedding",
            )
        return cls(unit_length(values), encoder)


@dataclass(frozen=True)
class SemanticDuplicates:
    """Removed vectors, in order.

    removed: [n] rows; matched: [n] rows of the vectors that stay, counted through `earlier` first where it is given;
    similarity: [n] cosine. n_products: dot products of training, assignment and search.
    """

    removed: NDArray[np.int64]
    matched: NDArray[np.int64]
    similarity: NDArray[np.float64]
    n_products: int


def semantic_duplicates(
    vectors: Vectors, similarity: float = 0.95, *, earlier: Vectors | None = None, cells: int | None = None,
    probes: int = 3, seed: int = 0,
) -> SemanticDuplicates:  # fmt: skip
    """Return which vectors are near an earlier one that stays.

    Args:
        vectors: in the order of preference.
        similarity: cosine from which a vector is removed.
        earlier: vectors of earlier corpora, which come first and always stay.
        cells: number of centroids; by default the square root of the number of vectors.
        probes: cells with which a vector is compared. As many as there are cells is an exhaustive search.

    Raises:
        ConfigError: `similarity`, `cells` or `probes` is out of range.
        DataError: `earlier` has another encoder or width.
    """
    if not 0 < similarity <= 1 or probes < 1 or (cells is not None and cells < 1):
        raise ConfigError(
            f"semantic duplicates with similarity {similarity}, {cells} cells and {probes} probes",
            expected="a similarity above 0 and at most 1, and at least one cell and probe",
        )
    n_earlier, values = 0, vectors.values
    if earlier is not None:
        theirs, ours = (earlier.encoder, earlier.values.shape[1]), (vectors.encoder, values.shape[1])
        if theirs != ours:
            raise DataError(
                f"vectors of encoder {theirs[0]} (width {theirs[1]}) are compared with those of {ours[0]} (width {ours[1]})",
                expected="one encoder",
                do="embed both corpora with the same encoder",
            )
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
    later, before, near, n_products = _pairs(values[distinct], similarity, cells, probes, seed)
    matched, cosine = np.full(len(values), -1), np.zeros(len(values))
    for i, j, value in zip(distinct[later].tolist(), distinct[before].tolist(), near.tolist(), strict=True):
        if i >= n_earlier and matched[i] < 0 and matched[j] < 0:
            matched[i], cosine[i] = j, value
    for i in np.setdiff1d(np.arange(n_earlier, len(values)), distinct).tolist():
        original = first[inverse[i]]
        gone = matched[original] >= 0
        matched[i], cosine[i] = (matched[original], cosine[original]) if gone else (original, 1.0)
    removed = np.flatnonzero(matched >= 0)
    return SemanticDuplicates(removed - n_earlier, matched[removed], cosine[removed], n_products)


def _pairs(
    values: NDArray[np.float32], similarity: float, cells: int | None, probes: int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64], int]:
    """Return similar pairs (later, earlier) in the order of `later`, then `earlier`; their cosines; and the products."""
    n = len(values)
    cells = min(cells or default_cells(n), n)
    if cells == 1:
        nearest, n_products = np.zeros((n, 1), np.int64), 0
    else:
        centroids, n_products = train_centroids(values, cells, seed=seed)
        n_products += n * cells
        parts = np.array_split(values, max(1, n * cells // _BLOCK))
        p = min(probes, cells)
        nearest = np.concatenate([np.argsort(-(part @ centroids.T), axis=1)[:, :p] for part in parts])
    found = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))]
    own = np.argsort(nearest[:, 0], kind="stable")
    bounds = np.searchsorted(nearest[own, 0], np.arange(cells + 1))
    probing = np.argsort(nearest.ravel(), kind="stable")
    edges = np.searchsorted(nearest.ravel()[probing], np.arange(cells + 1))
    for (a, b), (c, d) in zip(itertools.pairwise(bounds), itertools.pairwise(edges), strict=True):
        members, queries = own[a:b], probing[c:d] // nearest.shape[1]
        n_products += len(members) * len(queries)
        for part in np.array_split(queries, max(1, len(queries) * len(members) // _BLOCK)):
            cosine = values[part] @ values[members].T
            at, to = np.nonzero(cosine >= similarity - 1e-6)
            i, j = part[at], members[to]
            rank = np.arange(len(at)) - np.searchsorted(at, at)  # members ascend, so the earliest come first
            chosen = (i != j) & (rank < MAX_CANDIDATES)
            pair = (
                np.maximum(i, j)[chosen],
                np.minimum(i, j)[chosen],
                cosine[at, to][chosen].astype(np.float64),
            )
            found.append(pair)
    later, before, near = (np.concatenate(column) for column in zip(*found, strict=True))
    _, index = np.unique(later * n + before, return_index=True)
    return later[index], before[index], np.minimum(near[index], 1.0), n_products

"""Smaller vectors for the search of candidates: projection to fewer dimensions, and product quantization.

Neither loses a pair of unit vectors with cosine s or more, since the error of each vector is known.

Projection (PCA without centering, or a random rotation): with P of orthonormal rows and r the length of the rest,
r^2 = 1 - |Px|^2, the cosine is <Px, Py> + <rest, rest>, and the second term is at most r_x r_y (Cauchy and Schwarz).

Product quantization (PQ, Jegou, Douze & Schmid 2011): each of M parts of a vector is replaced by the nearest of 256
centroids, one byte. With q the reconstruction of x and e = x - q, <x, y> = <q, y> + <e, x> + <e, y - x>. <e, x> is
1 - <q, x>, and |<e, y - x>| is at most |e| sqrt(2 - 2 s) for a pair of cosine s or more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whorl.errors import ConfigError

SAMPLE = 1 << 14  # vectors that train a projection
PQ_CENTROIDS, PQ_ROUNDS = 256, 8
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Projected:
    """values: [n, k]; rest: [n] length of what the projection leaves out. products: dot products of width d it took."""

    values: Floats
    rest: Floats
    products: int


def project(values: Floats, kind: str, dimensions: int, seed: int) -> Projected:
    """Return unit vectors [n, d] in `dimensions` dimensions; kind is "pca" or "random"."""
    n, width = values.shape
    if dimensions >= width:
        raise ConfigError(
            f"semantic duplicates: a projection of vectors of width {width} to {dimensions} dimensions",
            expected=f"fewer than {width}", do='lower dimensions, or use projection = "none"',
        )  # fmt: skip
    rng = np.random.default_rng(seed)
    if kind == "pca":
        sample = values[np.sort(rng.choice(n, min(n, SAMPLE), replace=False))].astype(np.float64)
        _, vectors = np.linalg.eigh(sample.T @ sample)
        basis, products = vectors[:, ::-1][:, :dimensions], len(sample) * width
    else:
        basis, products = np.linalg.qr(rng.normal(size=(width, dimensions)))[0], 0
    reduced = (values @ basis.astype(np.float32)).astype(np.float32)
    rest = np.sqrt(np.maximum(1 - np.square(reduced, dtype=np.float64).sum(axis=1), 0)) + 1e-5
    return Projected(reduced, rest.astype(np.float32), products + n * dimensions)


@dataclass(frozen=True)
class Quantized:
    """Vectors as PQ codes.

    codes: [n, M] bytes. codebooks: [M, 256, d / M]. own: [n] 1 - <q, x>; error: [n] |x - q|.
    """

    codes: NDArray[np.uint8]
    codebooks: Floats
    own: Floats
    error: Floats
    products: int

    def decode(self, rows: NDArray[np.int64]) -> Floats:
        """Return the reconstructions of some vectors: [len(rows), d]."""
        parts = np.arange(len(self.codebooks))
        found: Floats = self.codebooks[parts, self.codes[rows]].reshape(len(rows), -1)
        return found


def quantize(values: Floats, n_bytes: int, seed: int) -> Quantized:
    """Return unit vectors [n, d] as codes of `n_bytes` bytes. Raises ConfigError: the width is no multiple of it."""
    n, width = values.shape
    if width % n_bytes:
        raise ConfigError(
            f"semantic duplicates: pq_bytes = {n_bytes} for vectors of width {width}",
            expected="a divisor of the width",
        )
    rng = np.random.default_rng(seed)
    parts = values.reshape(n, n_bytes, -1)
    sample = parts[np.sort(rng.choice(n, min(n, SAMPLE), replace=False))]
    count = min(PQ_CENTROIDS, len(sample))
    codebooks = (
        sample[rng.choice(len(sample), count, replace=False)].transpose(1, 0, 2).copy()
    )  # [M, 256, d / M]
    for part, codebook in enumerate(codebooks):
        for _ in range(PQ_ROUNDS):
            nearest = _nearest(sample[:, part], codebook)
            sizes = np.bincount(nearest, minlength=count)
            order = np.argsort(nearest, kind="stable")
            used = np.flatnonzero(sizes)
            sums = np.add.reduceat(sample[order, part], (np.cumsum(sizes) - sizes)[used], axis=0)
            codebook[used] = sums / sizes[used, None]
    codes = np.stack(
        [_nearest(parts[:, m], codebook) for m, codebook in enumerate(codebooks)], axis=1
    ).astype(np.uint8)
    own, error = np.empty(n, np.float32), np.empty(n, np.float32)
    found = Quantized(codes, codebooks, own, error, (n + PQ_ROUNDS * len(sample)) * count)
    for begin in range(0, n, SAMPLE):
        rows = np.arange(begin, min(begin + SAMPLE, n))
        decoded = found.decode(rows)
        own[rows] = 1 - (decoded * values[rows]).sum(axis=1)
        error[rows] = np.linalg.norm(decoded - values[rows], axis=1)
    return found


def _nearest(points: Floats, codebook: Floats) -> NDArray[np.int64]:
    """Return the nearest centroid of each point, by Euclidean distance: [n]."""
    half = np.square(codebook).sum(axis=1) / 2
    blocks = np.array_split(points, max(1, len(points) // 8192))
    return np.concatenate([(block @ codebook.T - half).argmax(axis=1) for block in blocks])

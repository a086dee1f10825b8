"""Spherical mini-batch k-means (Sculley 2010): each centroid is the running mean of the unit vectors assigned to it."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from whorl.errors import ConfigError

MIN_POINTS, MAX_POINTS = 30, 256  # per centroid: fewer are noise, more cost time and change little
EPOCHS = 4
_BATCH = 4096


def default_cells(n: int) -> int:
    """Return the number of centroids for n vectors: the square root of n, of at least 30 vectors each."""
    return max(1, min(math.isqrt(n), n // MIN_POINTS))


def train_centroids(
    vectors: NDArray[np.float32], n_centroids: int, *, points_per_centroid: int = 64, seed: int = 0
) -> tuple[NDArray[np.float32], int]:
    """Return centroids of unit length, [n_centroids, d], and how many dot products the training took.

    Trained on a sample of `points_per_centroid` vectors for each centroid. An epoch begins with a centroid without
    vectors at a random vector.

    Args:
        vectors: [n, d] of unit length.

    Raises:
        ConfigError: fewer than 30 or more than 256 points per centroid.
    """
    n = len(vectors)
    points = min(points_per_centroid, n // n_centroids) if n_centroids > 1 else points_per_centroid
    if not MIN_POINTS <= points <= MAX_POINTS:
        raise ConfigError(
            f"{n_centroids} centroids from {n} vectors, with points_per_centroid = {points_per_centroid}",
            expected=f"{MIN_POINTS} to {MAX_POINTS} points per centroid",
            do="change the number of centroids or points_per_centroid",
        )
    rng = np.random.default_rng(seed)
    sample = vectors[np.sort(rng.choice(n, min(n, n_centroids * points), replace=False))]
    centroids = sample[rng.choice(len(sample), min(n_centroids, len(sample)), replace=False)].copy()
    counts = np.zeros(len(centroids), np.int64)
    for _ in range(EPOCHS):
        order, seen = rng.permutation(len(sample)), np.zeros(len(centroids), np.int64)
        for begin in range(0, len(sample), _BATCH):
            batch = sample[order[begin : begin + _BATCH]]
            cell = (batch @ centroids.T).argmax(axis=1)
            by_cell = np.argsort(cell, kind="stable")
            used, first, size = np.unique(cell[by_cell], return_index=True, return_counts=True)
            sums = np.add.reduceat(batch[by_cell], first, axis=0)
            seen[used] += size
            counts[used] += size
            step = (sums - size[:, None] * centroids[used]) / counts[used, None]
            centroids[used] = unit_length(centroids[used] + step)
        empty = np.flatnonzero(seen == 0)
        centroids[empty], counts[empty] = sample[rng.choice(len(sample), len(empty))], 0
    return centroids, EPOCHS * len(sample) * len(centroids)


def unit_length(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return vectors divided by their length; a zero vector stays zero."""
    length = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    return (vectors / np.where(length > 0, length, 1)).astype(np.float32)

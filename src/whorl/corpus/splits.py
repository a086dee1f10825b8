"""Splits: which of the kept documents are held out, so that a held-out score means something.

A model that has seen a near copy of a test document scores its memory, not its understanding. So whole
near-duplicate clusters move together: no pair that `duplicates` found alike stands on two sides.

Two rules keep the held-out megabyte representative. No cluster may fill more than a share of it (a tenth by
default): otherwise a single giant file would be the test. The price is stated: documents longer than that
share are never held out. And clusters are taken in the order of a seeded hash, up to the first that does
not fit, rather than on and on until the gap is filled, which would favour small documents.

The hash is of the cluster's first document's id, not of a position in a shuffled list. So when a corpus
grows, an old document keeps its place in the order, and the split changes at its edges only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whorl.corpus.config import CurateConfig
from whorl.errors import DataError

SPLITS = ("train", "validation", "test")


def assign_splits(
    ids: Sequence[str], cluster: NDArray[np.int64], n_bytes: NDArray[np.int64], kept: NDArray[np.bool_],
    config: CurateConfig,
) -> NDArray[Any]:  # fmt: skip
    """A split for every document: "train", "validation", "test", or "" where it is not kept.

    Args:
        ids: [n_documents]
        cluster: [n_documents] row of each document's cluster's first document.
        n_bytes: [n_documents]
        kept: [n_documents] what the selection kept.

    Raises:
        DataError: a held-out split was asked for and no cluster is small enough for it.
    """
    split = np.where(kept, "train", "").astype("U10")
    weight = np.bincount(cluster[kept], n_bytes[kept], minlength=len(cluster)).astype(np.int64)
    members = np.unique(cluster[kept])  # the clusters, each as the row of its first document
    order = sorted(members.tolist(), key=lambda row: _hash_order(config.seed, ids[row]))
    total = int(n_bytes[kept].sum())
    for name, wanted in (("test", config.test_bytes), ("validation", config.validation_bytes)):
        if not wanted:
            continue
        room = int(min(wanted, total * config.max_held_out_fraction))
        # In a small corpus a tenth of a tenth may be less than any document: half the clusters stay eligible.
        largest = min(room, max(room * config.max_cluster_fraction, float(np.median(weight[members]))))
        eligible = [row for row in order if weight[row] <= largest]
        # Where few are small enough, one split must not take them all: a third each is left for the others.
        taken, filled = set[int](), 0
        for row in eligible[: max(len(eligible) // 3, 1)]:
            if filled + weight[row] > room:
                break
            taken.add(row)
            filled += int(weight[row])
        if not taken:
            raise _too_small(name, room, weight[members])
        split[kept & np.isin(cluster, list(taken))] = name
        order = [row for row in order if row not in taken]
    return split


def _hash_order(seed: int, name: str) -> bytes:
    return hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=16).digest()


def _too_small(name: str, room: int, weights: NDArray[np.int64]) -> DataError:
    return DataError(
        f"the corpus is too small to hold out a {name} split: it may take {room} bytes, and of the "
        f"{len(weights)} clusters of alike documents the smallest has {int(weights.min())}",
        expected="some tens of documents at least, unlike each other",
        do=f"add documents, raise curate's {name}_bytes or max_held_out_fraction, or set {name}_bytes = 0",
    )

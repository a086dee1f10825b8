"""Splits: choose the held-out documents among the selected ones.

A model that was trained on a near copy of a test document would be scored on memorization. Whole near-duplicate
clusters are
therefore assigned to one split: no pair found by `deduplication` crosses a boundary.

Two rules keep the held-out data representative. First, no cluster may fill more than a fraction of it (a tenth by
default), so longer documents are never held out. Second, clusters are taken in the order of a seeded hash, up to the
first that does not fit; filling the gap with later clusters would favor small documents.

The hash is of the id of the cluster's first document, not of a position. So when a corpus grows, a document keeps its
place in the order and the split changes only at its edges.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whorl.corpus.config import CurateConfig
from whorl.errors import DataError

SPLITS = ("train", "validation", "test")


def assign_splits(
    ids: NDArray[np.bytes_], cluster: NDArray[np.int64], n_bytes: NDArray[np.int64], kept: NDArray[np.bool_],
    config: CurateConfig,
) -> NDArray[Any]:  # fmt: skip
    """Return a split for every document: "train", "validation", "test", or "" if it is not kept.

    Args:
        ids: [n_documents] in UTF-8.
        cluster: [n_documents] the row of the first document of each document's cluster.
        n_bytes: [n_documents]
        kept: [n_documents] bool, the selected documents.

    Raises:
        DataError: a held-out split is configured and no cluster is small enough for it.
    """
    split = np.full(len(ids), "", object)  # of four strings: 8 bytes each
    split[kept] = "train"
    weight = np.bincount(cluster[kept], n_bytes[kept], minlength=len(cluster)).astype(np.int64)
    members = np.unique(cluster[kept])  # the clusters, each as the row of its first document
    seed = f"{config.seed}\0".encode()
    digests = (hashlib.blake2b(seed + ids[row], digest_size=16).digest() for row in members)
    order = members[np.argsort(np.fromiter(digests, "S16", len(members)), kind="stable")]
    total = int(n_bytes[kept].sum())
    for name, target_bytes in (("test", config.test_bytes), ("validation", config.validation_bytes)):
        if not target_bytes:
            continue
        max_bytes = int(min(target_bytes, total * config.max_held_out_fraction))
        # In a small corpus a tenth of a tenth may be less than any document: half of the clusters stay eligible.
        largest = min(
            max_bytes, max(max_bytes * config.max_cluster_fraction, float(np.median(weight[members])))
        )
        eligible = order[weight[order] <= largest]
        # If few are small enough, each held-out split takes at most a third of them.
        eligible = eligible[: max(len(eligible) // 3, 1)]
        taken = eligible[np.cumsum(weight[eligible]) <= max_bytes]
        if not len(taken):
            raise _too_small(name, max_bytes, weight[members])
        split[kept & np.isin(cluster, taken)] = name
        order = order[~np.isin(order, taken)]
    return split


def _too_small(name: str, max_bytes: int, weights: NDArray[np.int64]) -> DataError:
    return DataError(
        f"the corpus is too small to hold out a {name} split: it may have {max_bytes} bytes, but the smallest of "
        f"{len(weights)} clusters of near duplicates has {int(weights.min())}",
        expected="at least some tens of distinct documents",
        do=f"add documents; or divide texts with --set ingest.split_bytes={max(max_bytes // 3, 200)}; or train without this "
        f"split: curate.{name}_bytes=0",
    )

"""Candidates from an IVF index of FAISS (Johnson, Douze & Jegou 2017), with our centroids and multi-probe."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whorl.corpus.deduplication.semantic.settings import SearchConfig
from whorl.errors import ConfigError

PQ_MARGIN = 0.1  # below the threshold, for the error of product quantization
_QUERIES = 1 << 12


def check_installed(config: SearchConfig) -> None:
    """Raise ConfigError if the configuration needs FAISS and it is not installed."""
    if config.index == "faiss" and importlib.util.find_spec("faiss") is None:
        raise ConfigError(
            'semantic duplicates with index = "faiss", but FAISS is not installed',
            do="pip install 'whorl[faiss]', or use index = \"own\"",
        )


def candidates(
    values: NDArray[np.float32], centroids: NDArray[np.float32], config: SearchConfig
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Return pairs of rows that may be similar, each once or twice, and how many products of width d were computed.

    Args:
        values: [n, d] of unit length; centroids: [k, d].
    """
    import faiss

    library: Any = faiss
    n, width = values.shape
    quantizer = library.IndexFlatIP(width)
    quantizer.add(np.ascontiguousarray(centroids))
    metric = library.METRIC_INNER_PRODUCT
    if config.pq_bytes:
        if width % config.pq_bytes:
            raise ConfigError(
                f"semantic duplicates: pq_bytes = {config.pq_bytes} for vectors of width {width}",
                expected="a divisor of the width",
            )
        index = library.IndexIVFPQ(quantizer, width, len(centroids), config.pq_bytes, 8, metric)
    else:
        index = library.IndexIVFFlat(quantizer, width, len(centroids), metric)
    index.cp.seed = config.seed
    index.train(np.ascontiguousarray(values[: 256 * len(centroids)]))
    index.add(np.ascontiguousarray(values))
    index.nprobe = min(config.probes, len(centroids))
    statistics = library.cvar.indexIVF_stats
    statistics.reset()
    found: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    radius = config.similarity - (PQ_MARGIN if config.pq_bytes else 1e-4)
    for begin in range(0, n, _QUERIES):
        limits, _, labels = index.range_search(np.ascontiguousarray(values[begin : begin + _QUERIES]), radius)
        queries = np.repeat(np.arange(len(limits) - 1) + begin, np.diff(limits.astype(np.int64)))
        found.append((queries, labels.astype(np.int64)))
    i, j = (np.concatenate(column) for column in zip(*found, strict=True))
    return i[i != j], j[i != j], int(statistics.ndis) + n * len(centroids)

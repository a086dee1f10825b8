"""Removal of semantic duplicates among the kept documents of a corpus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from whorl.corpus.deduplication.semantic.search import semantic_duplicates
from whorl.corpus.deduplication.semantic.settings import SemanticConfig
from whorl.corpus.deduplication.semantic.vectors import TextEncoder, Vectors, embed_files
from whorl.corpus.mapreduce import Executor, UnitStore

KIND = "semantic_duplicate"


@dataclass(frozen=True)
class RemovedDocuments:
    """Removed documents in order, the documents that stay for them, and their cosine: [n] each.

    A document is the number of its file << 32 | its row in the file; files of earlier corpora are counted first.
    """

    removed: NDArray[np.int64]
    matched: NDArray[np.int64]
    similarity: NDArray[np.float64]


def find_semantic_duplicates(
    config: SemanticConfig, encoder: TextEncoder, documents: Sequence[Path], kept: NDArray[np.bool_], store: UnitStore,
    executor: Executor, *, ranks: NDArray[np.int64] | None = None, earlier: Sequence[Path] = (),
    earlier_kept: NDArray[np.bool_] | None = None,
) -> RemovedDocuments:  # fmt: skip
    """Return which of the kept documents are removed, and for which ones that stay.

    Args:
        kept: [all rows of `documents`] documents that are compared.
        ranks: [all rows of `documents`] the smallest of several duplicates stays; default: the order of rows.
        earlier: files of earlier corpora, whose documents stay; `earlier_kept`: those that are compared, default all.
    """
    found = embed_files([*earlier, *documents], encoder, config.max_characters, store, executor)
    numbers = np.concatenate([
        np.zeros(0, np.int64), *((np.int64(i) << 32) + np.arange(len(v)) for i, v in enumerate(found))
    ])  # fmt: skip
    n_earlier = len(numbers) - len(kept)
    order = np.arange(len(kept)) if ranks is None else np.argsort(ranks)
    rows = n_earlier + order[kept[order]]
    old = np.arange(n_earlier) if earlier_kept is None else np.flatnonzero(earlier_kept)
    values = np.concatenate([v for v in found if len(v)]) if len(numbers) else np.zeros((0, 0), np.float32)
    new, before = Vectors.of(values[rows], encoder.address), None
    if len(old):
        before = Vectors.of(values[old], encoder.address)
    duplicates = semantic_duplicates(new, config, earlier=before)
    compared = np.concatenate([old, rows])
    removed, matched = numbers[rows[duplicates.removed]], numbers[compared[duplicates.matched]]
    in_order = np.argsort(removed)
    return RemovedDocuments(removed[in_order], matched[in_order], duplicates.similarity[in_order])

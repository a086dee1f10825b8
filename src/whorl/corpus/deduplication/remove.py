"""Near and semantic duplicates of a corpus: found among the documents that all other rules keep, and written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whorl.corpus.deduplication.earlier import EarlierCorpus
from whorl.corpus.deduplication.near.outputs import write_duplicates, write_removed
from whorl.corpus.deduplication.near.stages import find_near_duplicates
from whorl.corpus.deduplication.semantic.remove import KIND as SEMANTIC
from whorl.corpus.deduplication.semantic.remove import find_semantic_duplicates
from whorl.corpus.deduplication.semantic.settings import SemanticConfig
from whorl.corpus.deduplication.semantic.vectors import TextEncoder
from whorl.corpus.deduplication.settings import MinHashConfig
from whorl.corpus.mapreduce import Executor, UnitStore
from whorl.errors import ConfigError


def remove_duplicates(
    documents: Sequence[Path], out: Path, store: UnitStore, executor: Executor, reasons: NDArray[Any], *,
    minhash: MinHashConfig | None, semantic: SemanticConfig | None, encoder: TextEncoder | None,
    earlier: Sequence[EarlierCorpus], ranks: NDArray[np.int64] | None,
) -> None:  # fmt: skip
    """Write the duplicates among the kept documents into `out`, and set their reasons.

    Args:
        reasons: [n_documents] "" for kept ones; changed in place.
        minhash, semantic: which kinds are removed; near duplicates first. `semantic` needs an encoder.
        ranks: [n_documents] the smallest of several duplicates stays; default: the order of rows.

    Raises:
        ConfigError: the encoder is missing.
    """
    import pyarrow.parquet as pq

    if semantic is not None and encoder is None:
        raise ConfigError(
            f"curate.semantic names the encoder {semantic.encoder}, and none is passed",
            expected="curate(..., encoder=TextEncoder(...)), as the step does",
        )
    files = [path for corpus in earlier for path in corpus.files]
    names = [corpus.name for corpus in earlier for _ in corpus.files]
    masks = [
        np.ones(sum(pq.read_metadata(path).num_rows for path in corpus.files), bool)
        if corpus.kept is None
        else corpus.kept
        for corpus in earlier
    ]
    old = np.concatenate(masks) if masks else None
    if minhash is not None:
        found = find_near_duplicates(
            documents, minhash, store, executor, earlier=files, ranks=ranks,
            candidates=np.asarray(reasons == "", bool), earlier_candidates=old,
        )  # fmt: skip
        reasons[write_duplicates(found, documents, out, earlier=files, names=names)] = "near_duplicate"
    if semantic is not None and encoder is not None:
        similar = find_semantic_duplicates(
            semantic, encoder, documents, np.asarray(reasons == "", bool), store, executor, ranks=ranks,
            earlier=files, earlier_kept=old,
        )  # fmt: skip
        reasons[write_removed(SEMANTIC, similar, documents, out, earlier=files, names=names)] = SEMANTIC

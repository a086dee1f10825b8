"""Corpus: the interface through which all later steps read documents.

It joins the output of `ingest` (text and provenance) with that of `curate` (the split) by row, and streams. A row group
without a document of the requested split is not read. The order is that of the document files, the same in every run;
the token loader shuffles.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whorl.corpus.documents import Document
from whorl.corpus.splits import SPLITS
from whorl.errors import ConfigError, DataError, one_of


class Corpus:
    """Documents by split.

    Args:
        ingest: the folder that `ingest` wrote.
        curate: the folder that `curate` wrote for these documents.

    Raises:
        DataError: the two folders have different numbers of documents.
    """

    def __init__(self, ingest: Path, curate: Path) -> None:
        import pyarrow.parquet as pq

        self.files = document_files(ingest)
        self._split: NDArray[Any] = np.array(
            pq.read_table(curate / "selection.parquet", columns=["split"])["split"].to_pylist(), dtype="U10"
        )
        self.n_rows = n_rows = sum(pq.ParquetFile(path).metadata.num_rows for path in self.files)
        if n_rows != len(self._split):
            raise DataError(
                f"{curate} has a selection of {len(self._split)} documents, but {ingest} has {n_rows}",
                expected="a selection computed from these documents",
                do="run curate again on this corpus",
            )

    def documents(self, split: str) -> Iterator[Document]:
        """Stream one split's documents in corpus order. Raises ConfigError for an unknown split."""
        import pyarrow.parquet as pq

        selected = self._mask(split)
        columns = list(Document.__dataclass_fields__)
        begin = 0
        for path in self.files:
            with pq.ParquetFile(path) as file:
                for group in range(file.num_row_groups):
                    end = begin + file.metadata.row_group(group).num_rows
                    mask, begin = selected[begin:end], end
                    if mask.any():
                        for row in file.read_row_group(group, columns=columns).filter(mask).to_pylist():
                            yield Document(**row)

    def rows(self, split: str) -> NDArray[np.int64]:
        """Return the rows of a split's documents, in their order."""
        return np.flatnonzero(self._mask(split))

    def count(self, split: str) -> int:
        """Number of documents in a split."""
        return int(self._mask(split).sum())

    def bytes(self, split: str) -> int:
        """Bytes of UTF-8 text in a split."""
        return sum(document.n_bytes for document in self.documents(split))

    def _mask(self, split: str) -> NDArray[np.bool_]:
        if split not in SPLITS:
            raise ConfigError(f"unknown split {split!r}", expected=one_of(split, SPLITS))
        mask: NDArray[np.bool_] = self._split == split
        return mask


def document_files(ingest: Path) -> list[Path]:
    """Return the document files of an ingest folder, in order."""
    files = sorted(ingest.glob("documents-*.parquet"))
    if not files:
        raise DataError(
            f"{ingest} has no documents", expected="documents-00000.parquet", do="run ingest first"
        )
    return files

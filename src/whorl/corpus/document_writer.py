"""The writer of ingested documents: Parquet files with the columns of `document_schema`, in zstd.

Row groups and files are bounded in bytes of text, so reading needs little memory at any length of documents.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from whorl.corpus.documents import Document, document_schema

ROW_GROUP_BYTES = 4_000_000
ROW_GROUP_ROWS = 4096
FILE_BYTES = 256_000_000


def document_file(number: int) -> str:
    """Return the name of a corpus's file of this number."""
    return f"documents-{number:05d}.parquet"


class DocumentWriter:
    """Writes documents into `out`, in a `with` block; an exception inside leaves the last rows out."""

    def __init__(self, out: Path) -> None:
        self.out, self.schema = out, document_schema()
        self.rows: list[Document] = []
        self.row_bytes = self.file_bytes = self.n_files = 0
        self.file: Any = None

    def __enter__(self) -> DocumentWriter:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self._flush()
        if self.file is not None:
            self.file.close()

    def write(self, document: Document) -> None:
        self.rows.append(document)
        self.row_bytes += document.n_bytes
        if self.row_bytes >= ROW_GROUP_BYTES or len(self.rows) >= ROW_GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not self.rows:
            return
        if self.file is None:
            name = self.out / document_file(self.n_files)
            # No dictionary encoding: it would hold every text of a row group twice, and texts rarely repeat.
            self.file = pq.ParquetWriter(
                name, self.schema, compression="zstd", use_dictionary=["source", "licence", "language"]
            )
            self.n_files += 1
        columns = [
            pa.array([getattr(row, field.name) for row in self.rows], field.type) for field in self.schema
        ]
        self.file.write_table(pa.table(columns, schema=self.schema))
        self.file_bytes += self.row_bytes
        self.rows, self.row_bytes = [], 0
        if self.file_bytes >= FILE_BYTES:
            self.file.close()
            self.file, self.file_bytes = None, 0

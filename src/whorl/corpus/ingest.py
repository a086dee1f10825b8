"""Ingest: read sources into immutable documents, and a quarantine that lists every rejected record.

Output:

- `documents-00000.parquet`, ...: the columns of `document_schema`, zstd. Row groups and files are bounded in bytes of
  text, so reading needs little memory at any document length.
- `quarantine.jsonl`: one line per rejected record, with source, path, offset, length, reason, detail.

Documents never change after this step. Attributes, selection and splits are in side files that are row-aligned with
them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whorl.corpus.config import IngestConfig
from whorl.corpus.documents import Document, RejectedDocument, document_schema
from whorl.corpus.readers import read_documents
from whorl.corpus.sources import SourceFile, fingerprint, list_files
from whorl.errors import DataError

if TYPE_CHECKING:
    from whorl.tracking.progress import Progress

ROW_GROUP_BYTES = 4_000_000
ROW_GROUP_ROWS = 4096
FILE_BYTES = 256_000_000


def ingest(config: IngestConfig, out: Path, progress: Progress) -> dict[str, Any]:
    """Read all sources into `out` and return counts of all records.

    Returns:
        `files`, `excluded_files`, `documents`, `bytes`, `funnel` (found, read), `quarantine` (reason -> documents,
        bytes), and the same two counts by `sources`, `languages` and `licences`.

    Raises:
        DataError: a source is unknown or empty, no document could be read, or files changed since `config.fingerprint`
            was computed.
    """
    files, excluded = list_files(config)
    total = sum(f.size or 0 for f in files)
    stats = _IngestStats()
    with (
        progress.task("Reading", total=total / 1e6, unit="MB") as task,
        _DocumentWriter(out) as documents,
        (out / "quarantine.jsonl").open("w", encoding="utf-8") as quarantine,
    ):
        for file in files:
            for record in _read_file(file, config):
                stats.add(record)
                if isinstance(record, Document):
                    documents.write(record)
                else:
                    quarantine.write(_quarantine_line(record))
            task.advance((file.size or 0) / 1e6)
    if not stats.accepted["documents"]:
        raise DataError(
            f"none of the {len(files)} files in {', '.join(map(repr, config.sources))} has a document: "
            f"{stats.reasons()}",
            expected="UTF-8 text, Markdown, source code, JSONL(.gz/.zst) or Parquet",
            do=f"check the first: {stats.first_rejection}",
        )
    if config.fingerprint and config.fingerprint != fingerprint(config):
        raise DataError(
            "the source files changed while they were read", do="run again when the files no longer change"
        )
    return {"files": len(files), "excluded_files": excluded, **stats.summary()}


def _read_file(file: SourceFile, config: IngestConfig) -> Iterator[Document | RejectedDocument]:
    return read_documents(file, text_field=config.text_field, max_bytes=config.max_document_bytes)


def _quarantine_line(record: RejectedDocument) -> str:
    fields = {name: getattr(record, name) for name in RejectedDocument.__slots__}
    return json.dumps(fields, ensure_ascii=True) + "\n"


class _IngestStats:
    """Counts of documents and bytes by source, language, licence and rejection reason."""

    def __init__(self) -> None:
        self.accepted = {"documents": 0, "bytes": 0}
        self.counts_by: dict[str, dict[str, dict[str, int]]] = {
            kind: {} for kind in ("sources", "languages", "licences", "quarantine")
        }
        self.first_rejection = ""

    def add(self, record: Document | RejectedDocument) -> None:
        if isinstance(record, RejectedDocument):
            self._count("quarantine", record.reason, record.length)
            self.first_rejection = (
                self.first_rejection or f"{record.path} at {record.offset}: {record.reason}, {record.detail}"
            )
            return
        size = record.n_bytes
        self.accepted["documents"] += 1
        self.accepted["bytes"] += size
        self._count("sources", record.source, size)
        self._count("languages", record.language or "unknown", size)
        self._count("licences", record.licence or "unknown", size)

    def _count(self, kind: str, name: str, size: int) -> None:
        counts = self.counts_by[kind].setdefault(name, {"documents": 0, "bytes": 0})
        counts["documents"] += 1
        counts["bytes"] += size

    def reasons(self) -> str:
        return ", ".join(
            f"{reason} {n['documents']}" for reason, n in sorted(self.counts_by["quarantine"].items())
        )

    def summary(self) -> dict[str, Any]:
        total = {
            k: n + sum(c[k] for c in self.counts_by["quarantine"].values()) for k, n in self.accepted.items()
        }
        by = {kind: dict(sorted(counts.items())) for kind, counts in self.counts_by.items()}
        return {
            **self.accepted,
            "funnel": [{"stage": "found", **total}, {"stage": "read", **self.accepted}],
            **by,
        }


class _DocumentWriter:
    """Writes Parquet files of documents, with row groups and files bounded in bytes."""

    def __init__(self, out: Path) -> None:
        self.out, self.schema = out, document_schema()
        self.rows: list[Document] = []
        self.row_bytes = self.file_bytes = self.n_files = 0
        self.file: Any = None

    def __enter__(self) -> _DocumentWriter:
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
            name = self.out / f"documents-{self.n_files:05d}.parquet"
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

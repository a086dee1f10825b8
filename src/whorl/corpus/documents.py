"""The two results of reading a source: a document, or the reason for its rejection.

A document is text with its provenance: source, file below it, and byte offset. Its id is a hash of these three, not of
the text. So a takedown request or a loss spike leads back to bytes on disk, and two copies of a text are two documents
(`curate` removes copies). Ids are stable as long as the source's name and the file's relative path are; they do not
depend on other files.

Text of files and records is decoded strictly as UTF-8. Line ends and white space are kept, so bits per byte refer to the
original bytes; only text that is extracted from pages is normalised. A record that does not
decode becomes a `RejectedDocument` with one of `whorl.data.quarantine.REASONS`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

PROVENANCE = ("url", "title", "time", "media_type")


@dataclass(frozen=True, slots=True)
class Document:
    """One document.

    `offset` is the start of its record in its file, in bytes. It is 0 for a file that is one document (3 after a
    byte-order mark), and the line's offset for JSONL (in the decompressed stream for .gz and .zst). For Parquet it is
    the row number.

    url, title, media_type: of a page; of a record, its fields of these names. time: when it was fetched or published, as
    written in the source.
    """

    id: str
    source: str
    path: str
    licence: str | None
    offset: int
    text: str
    length: int
    language: str | None
    url: str | None = None
    title: str | None = None
    time: str | None = None
    media_type: str | None = None

    @property
    def n_bytes(self) -> int:
        """Size of the text in UTF-8. (`length` is that of the record: a JSONL line is longer than its text.)"""
        return len(self.text) if self.text.isascii() else len(self.text.encode())


@dataclass(frozen=True, slots=True)
class RejectedDocument:
    """A rejected record. `length` is in bytes, as far as it is available without reading the record."""

    source: str
    path: str
    offset: int
    length: int
    reason: str
    detail: str


def document_id(source: str, path: str, offset: int) -> str:
    """Return the 128-bit BLAKE2b of source, path and offset as 32 hex digits. Paths contain no NUL, the separator."""
    key = f"{source}\0{path}\0{offset}".encode()
    return hashlib.blake2b(key, digest_size=16).hexdigest()


def document_schema() -> pa.Schema:
    """Return the columns of `documents-*.parquet`."""
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("id", pa.string(), nullable=False),
            pa.field("source", pa.string(), nullable=False),
            pa.field("path", pa.string(), nullable=False),
            pa.field("licence", pa.string()),
            pa.field("offset", pa.int64(), nullable=False),
            pa.field("length", pa.int64(), nullable=False),
            pa.field("language", pa.string()),
            pa.field("text", pa.string(), nullable=False),
            *(pa.field(name, pa.string()) for name in PROVENANCE),
        ]
    )

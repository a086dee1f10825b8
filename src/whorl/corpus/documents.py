"""The two things that reading a source yields: a document, or the reason why there is none.

A document is text with its provenance: which source, which file below it, at which byte. Its id is a hash
of exactly these three, not of the text: it names a place, so that a takedown request, a loss spike or a
reader's question leads back to bytes on a disk, and so that two copies of a text are two documents
(curation decides about copies, reading does not). Ids are stable as long as the source is called the same
and the file stands at the same path below it; they do not depend on which other files there are.

Text is what `bytes.decode("utf-8")` gives, strictly: line ends and white space stay as they are, so bits
per byte are about the bytes that were really there. What cannot be read that way is `Rejected`, with one of
`REASONS`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

REJECT_REASONS = {
    "binary": "holds NUL bytes, so it is not text",
    "invalid_utf8": "is not valid UTF-8",
    "too_large": "is longer than max_document_bytes",
    "empty": "holds nothing but white space",
    "bad_json": "a line is not a JSON object",
    "no_text_field": "has no such text field, or no string in it",
    "damaged": "compressed or columnar data ends early or does not decode",
    "unreadable": "the operating system refused to read it",
    "not_a_file": "is a pipe, socket, device or broken link",
}


@dataclass(frozen=True, slots=True)
class Document:
    """One document.

    `offset` is where its record begins in its file, in bytes: 0 for a file that is one document (3 after a
    byte-order mark), the line's place for JSONL (in the decompressed stream for .gz and .zst), and the row
    number for Parquet, which has no byte offsets of records.
    """

    id: str
    source: str
    path: str
    licence: str | None
    offset: int
    text: str
    length: int
    language: str | None

    @property
    def n_bytes(self) -> int:
        """The text's size in UTF-8. (`length` is the record's: a JSONL line has more than its text.)"""
        return len(self.text) if self.text.isascii() else len(self.text.encode())


@dataclass(frozen=True, slots=True)
class RejectedDocument:
    """A record that is set aside. `length` is in bytes, as far as it is known without reading it all."""

    source: str
    path: str
    offset: int
    length: int
    reason: str
    detail: str


def document_id(source: str, path: str, offset: int) -> str:
    """128-bit BLAKE2b of source, path and offset, as 32 hex digits. NUL separates: no path holds one."""
    key = f"{source}\0{path}\0{offset}".encode()
    return hashlib.blake2b(key, digest_size=16).hexdigest()


def document_schema() -> pa.Schema:
    """The columns of `documents-*.parquet`."""
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
        ]
    )

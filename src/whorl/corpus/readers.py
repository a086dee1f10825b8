"""Read one file into documents and rejections, in bounded memory for any content.

There are three kinds of files, chosen by suffix. A *text* file is one document (source code, Markdown, anything without
NUL bytes). A *JSONL* file has one record per line, plain, .gz or .zst. A *Parquet* file has one record per row.

The subtle part is hostile or broken files. A 2 GB file without a newline must not be read into one line: sizes are
checked before reading, lines are read up to a limit, and the rest is skipped in blocks. A small compressed file may
expand to
gigabytes: it is decompressed as a stream, under the same limits. A truncated stream yields its whole records, then one
rejection for the rest. Opening a pipe would block, so anything but a regular file is rejected unopened.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from whorl.corpus.documents import Document, RejectedDocument, document_id
from whorl.corpus.sources import SourceFile, exceeds_size_limit, readable_path

LANGUAGES = {
    ".py": "python", ".pyi": "python", ".md": "markdown", ".rst": "restructuredtext", ".txt": "text",
    ".c": "c", ".h": "c",
    ".cc": "c++", ".cpp": "c++", ".hpp": "c++", ".rs": "rust", ".go": "go", ".js": "javascript",
    ".ts": "typescript", ".java": "java", ".rb": "ruby", ".sh": "shell", ".sql": "sql", ".html": "html",
    ".css": "css", ".json": "json", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".xml": "xml",
    ".tex": "latex", ".csv": "csv", ".jl": "julia", ".r": "r", ".swift": "swift", ".kt": "kotlin",
}  # fmt: skip
SPDX_PATTERN = re.compile(rb"SPDX-License-Identifier:\s*([A-Za-z0-9.+\-() ]{2,80})")
SKIP_BLOCK_BYTES = 1 << 20
# A JSONL line holds escaped text and other fields; longer lines are not parsed.
LINE_SLACK = 1 << 20


def read_documents(
    file: SourceFile, *, text_field: str, max_bytes: int
) -> Iterator[Document | RejectedDocument]:
    """Yield every record of one file in order, as a Document or a RejectedDocument.

    Args:
        text_field: the field or column with the text, for JSONL and Parquet.
        max_bytes: maximum size of a text in bytes.
    """
    record = _FileContext(file, max_bytes)
    if file.size is None:
        yield record.rejected("not_a_file", "not a regular file, or a broken link")
        return
    if exceeds_size_limit(file, max_bytes):
        yield record.rejected("too_large", f"{file.size} bytes, the limit is {max_bytes}", length=file.size)
        return
    try:
        if file.suffix == ".parquet":
            yield from _parquet(record, text_field)
        else:
            with _open(file) as stream:
                if file.suffix in (".jsonl", ".ndjson"):
                    yield from _json_lines(record, stream, text_field)
                else:
                    yield _text_file(record, stream)
    except OSError as error:
        # Arrow's streams raise OSError without an errno for damaged data; errors of the system always have one.
        reason = "damaged" if error.errno is None else "unreadable"
        yield record.rejected(reason, error.strerror or str(error), offset=record.position)


class _FileContext:
    """Values shared by all documents of one file, and the read position (bytes or rows)."""

    def __init__(self, file: SourceFile, max_bytes: int) -> None:
        self.source, self.path, self.licence, self.max_bytes = (
            file.source,
            readable_path(file.path),
            file.licence,
            max_bytes,
        )
        self.location, self.size = file.location, file.size or 0
        self.language = LANGUAGES.get(file.suffix)
        self.position = 0

    def rejected(self, reason: str, detail: str, *, offset: int = 0, length: int = 0) -> RejectedDocument:
        return RejectedDocument(self.source, self.path, offset, length, reason, detail)

    def document(self, text: str, offset: int, length: int, licence: str | None) -> Document:
        name = document_id(self.source, self.path, offset)
        return Document(
            name, self.source, self.path, licence or self.licence, offset, text, length, self.language
        )

    def from_value(
        self, value: object, offset: int, length: int, licence: object
    ) -> Document | RejectedDocument:
        """Return the document of a JSON or Parquet value of any type."""
        if not isinstance(value, str):
            return self.rejected(
                "no_text_field",
                f"the text is {type(value).__name__}, not a string",
                offset=offset,
                length=length,
            )
        try:
            size = len(value.encode())
        except UnicodeEncodeError as error:  # "\ud800" is valid JSON but not valid text
            detail = f"lone surrogate at character {error.start}"
            return self.rejected("invalid_utf8", detail, offset=offset, length=length)
        if size > self.max_bytes:
            return self.rejected(
                "too_large", f"{size} bytes, the limit is {self.max_bytes}", offset=offset, length=length
            )
        if "\0" in value:
            return self.rejected(
                "binary", f"NUL at character {value.index(chr(0))}", offset=offset, length=length
            )
        if not value or value.isspace():
            return self.rejected("empty", "nothing but white space", offset=offset, length=length)
        return self.document(value, offset, length, licence if isinstance(licence, str) else None)


def _open(file: SourceFile) -> BinaryIO:
    if file.compression is None or not file.size:
        return file.location.open("rb")
    import pyarrow as pa

    # Unlike the zstd and gzip modules, Arrow's stream bounds its output and reports a truncated end.
    raw: Any = pa.CompressedInputStream(pa.OSFile(str(file.location)), file.compression)
    return io.BufferedReader(raw, 1 << 16)


def _text_file(record: _FileContext, stream: BinaryIO) -> Document | RejectedDocument:
    head = stream.read(8192)
    if b"\0" in head:
        return record.rejected("binary", f"NUL at byte {head.index(0)}", length=record.size)
    data = head + stream.read(record.max_bytes + 4 - len(head)) if len(head) == 8192 else head
    offset = 3 if data.startswith(b"\xef\xbb\xbf") else 0
    length = len(data) - offset
    if length > record.max_bytes:
        return record.rejected(
            "too_large", f"over {record.max_bytes} bytes when decompressed", length=record.size
        )
    if b"\0" in data:
        return record.rejected("binary", f"NUL at byte {data.index(0)}", length=length)
    try:
        text = data[offset:].decode()
    except UnicodeDecodeError as error:
        return record.rejected("invalid_utf8", f"byte {error.start + offset}: {error.reason}", length=length)
    if not text or text.isspace():
        return record.rejected("empty", "nothing but white space", length=length)
    return record.document(text, offset, length, _spdx(data[:4096]))


def _spdx(head: bytes) -> str | None:
    match = SPDX_PATTERN.search(head)
    return match[1].decode().strip() if match else None


def _json_lines(
    record: _FileContext, stream: BinaryIO, text_field: str
) -> Iterator[Document | RejectedDocument]:
    longest = 2 * record.max_bytes + LINE_SLACK
    while line := stream.readline(longest):
        offset = record.position
        record.position += len(line)
        if not line.endswith(b"\n") and len(line) == longest:
            record.position += _skip_line(stream)
            length = record.position - offset
            yield record.rejected("too_large", f"a line of {length} bytes", offset=offset, length=length)
        elif not line.isspace():
            yield _json_record(record, line, offset, text_field)


def _skip_line(stream: BinaryIO) -> int:
    """Skip to the end of the line in blocks, and return the number of bytes skipped."""
    skipped = 0
    while block := stream.readline(SKIP_BLOCK_BYTES):
        skipped += len(block)
        if block.endswith(b"\n"):
            break
    return skipped


def _json_record(
    record: _FileContext, line: bytes, offset: int, text_field: str
) -> Document | RejectedDocument:
    length = len(line.rstrip(b"\r\n"))
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return record.rejected(
            "invalid_utf8", f"byte {error.start}: {error.reason}", offset=offset, length=length
        )
    except (ValueError, RecursionError) as error:
        reason = "binary" if b"\0" in line else "bad_json"
        return record.rejected(reason, str(error)[:200], offset=offset, length=length)
    if not isinstance(value, dict):
        found = type(value).__name__
        return record.rejected("bad_json", f"expected an object, found {found}", offset=offset, length=length)
    if text_field not in value:
        fields = ", ".join(map(ascii, list(value)[:10]))[:200]
        return record.rejected(
            "no_text_field", f"no {text_field!r} among {fields or 'no fields'}", offset=offset, length=length
        )
    return record.from_value(value[text_field], offset, length, value.get("licence", value.get("license")))


def _parquet(record: _FileContext, text_field: str) -> Iterator[Document | RejectedDocument]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(record.location) as table:
            names = table.schema_arrow.names
            if text_field not in names:
                detail = f"no column {text_field!r} among {', '.join(names[:10])[:200]}"
                yield record.rejected("no_text_field", detail, length=record.size)
                return
            licence = next((n for n in ("licence", "license") if n in names), None)
            columns = [text_field] if licence is None else [text_field, licence]
            # Small batches: a batch is held in memory as a whole, and each text may reach the limit.
            for batch in table.iter_batches(batch_size=16, columns=columns):
                licences = batch.column(licence) if licence else [None] * len(batch)
                for text, terms in zip(batch.column(text_field), licences, strict=True):
                    row, record.position = record.position, record.position + 1
                    yield _parquet_record(record, text, row, terms and terms.as_py())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        yield record.rejected("damaged", str(error)[:200], offset=record.position, length=record.size)


def _parquet_record(
    record: _FileContext, text: Any, row: int, licence: object
) -> Document | RejectedDocument:
    try:
        value = text.as_py()
    except UnicodeDecodeError as error:
        return record.rejected("invalid_utf8", f"byte {error.start}: {error.reason}", offset=row)
    length = len(value.encode("utf-8", "surrogatepass")) if isinstance(value, str) else 0
    return record.from_value(value, row, length, licence)

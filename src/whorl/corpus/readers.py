"""Records of source files as documents, or as rejections, in bounded memory for any content.

The formats of `whorl.data` read records. A record becomes a document if its text is a string of UTF-8 within the limit,
without NUL and with more than white space. Its licence is the record's, the file's SPDX line, or that of the source.

Sizes of plain files are checked before reading. Opening a pipe would block, so anything but a regular file is rejected
unopened.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date, datetime

from whorl.corpus.config import IngestConfig
from whorl.corpus.documents import Document, RejectedDocument, document_id
from whorl.corpus.sources import SPLIT_READ_BYTES, SourceFile, exceeds_limit, readable_path, split_size
from whorl.data.extraction.normalise import STEPS, normalise
from whorl.data.formats import Record, format_name, open_format, table_formats
from whorl.data.formats.table import CSV
from whorl.data.formats.text import TextFile
from whorl.data.forms import unknown_form
from whorl.data.quarantine import BadRecordError
from whorl.data.secrets import has_secret_name, is_private_key

LANGUAGES = {
    ".py": "python", ".pyi": "python", ".md": "markdown", ".rst": "restructuredtext", ".txt": "text",
    ".c": "c", ".h": "c",
    ".cc": "c++", ".cpp": "c++", ".hpp": "c++", ".rs": "rust", ".go": "go", ".js": "javascript",
    ".ts": "typescript", ".java": "java", ".rb": "ruby", ".sh": "shell", ".sql": "sql", ".html": "html",
    ".css": "css", ".json": "json", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".xml": "xml",
    ".tex": "latex", ".csv": "csv", ".ipynb": "markdown", ".jl": "julia", ".r": "r", ".swift": "swift", ".kt": "kotlin",
}  # fmt: skip
SPDX_PATTERN = re.compile(rb"SPDX-License-Identifier:\s*([A-Za-z0-9.+\-() ]{2,80})")
# A JSONL line holds escaped text and other fields; longer lines are not parsed.
LINE_SLACK = 1 << 20
BLANK = "nothing but white space"
LICENCE_FIELDS = ("licence", "license")
# Column -> the fields of records that hold it, of which the first with a text counts; also those of the field "meta".
PROVENANCE_FIELDS = {
    "url": ("url", "uri"),
    "title": ("title",),
    "time": ("time", "timestamp", "date", "created"),
    "media_type": ("media_type",),
}
MAX_PROVENANCE = 4000  # characters
META_FIELDS = ("meta", "metadata")
FIELDS = (*LICENCE_FIELDS, *META_FIELDS, *(name for names in PROVENANCE_FIELDS.values() for name in names))


def read_file(
    file: SourceFile, config: IngestConfig, start: int = 0, stop: int | None = None
) -> Iterator[Document | RejectedDocument]:
    """Yield every record of a file, or of a block of it (`data/formats/format.py`), in order.

    Args:
        config: with `split_bytes`.
    """
    if file.size is None:
        yield _rejected(file, BadRecordError("not_a_file", "", "not a regular file, or a broken link"))
        return
    if has_secret_name(file.path, config.formats):
        detail = "by its name it holds passwords or keys; to read it, rename it, or name its suffix in ingest.formats"
        yield _rejected(file, BadRecordError("secret", "", detail), length=file.size)
        return
    formats = table_formats(file.location, config.formats, config.text_field)
    config = config.model_copy(update={"formats": formats})
    limit, split = config.max_document_bytes, split_size(file, config)
    if exceeds_limit(file, config):
        detail = f"{file.size} bytes, the limit is {limit} (ingest.max_document_bytes), and split_bytes is 0"
        yield _rejected(file, BadRecordError("too_large", "", detail), length=file.size)
        return
    is_text = format_name(file.location, formats) == "text"
    longest = max(SPLIT_READ_BYTES, 2 * split) if split else limit if is_text else 2 * limit + LINE_SLACK
    reader = open_format(file.location, formats, fields=[config.text_field, *FIELDS], longest=longest)
    if isinstance(reader, TextFile):
        reader.in_pieces = bool(split)
    steps = (tuple(STEPS) if reader.extracts else ()) if config.normalise is None else config.normalise
    language = None if reader.extracts or isinstance(reader, CSV) else LANGUAGES.get(file.suffix)
    for record in reader.records(file.location, start, stop):
        try:
            most = longest if split else limit
            document = _document(file, record, config.text_field, most, is_text, steps, language)
            if split and document.n_bytes > split:
                yield from _pieces(document, min(split, limit // 2), limit)
            else:
                yield document
        except BadRecordError as error:
            yield _rejected(file, error, offset=record.offset, length=record.length)


def _pieces(document: Document, size: int, limit: int) -> Iterator[Document]:
    """Yield consecutive parts of a document that together are its text."""
    offset = document.offset
    for text in divide(document.text, size, limit):
        n_bytes = len(text.encode())
        id = document_id(document.source, document.path, offset)
        yield replace(document, id=id, offset=offset, text=text, length=n_bytes)
        offset += n_bytes


def divide(text: str, size: int, limit: int = 1 << 62) -> Iterator[str]:
    """Yield consecutive parts of about `size` bytes: cut at an empty line, from 1.5 times the size on at any line end.

    limit: bytes of a part; a line that exceeds it is cut. Only white space before the first word may be more.
    """
    longest = max(1, min(2 * size, limit // 4))  # characters of up to four bytes
    part: list[str] = []
    length, has_words = 0, False
    for line in text.splitlines(keepends=True):
        for piece in (line[i : i + longest] for i in range(0, len(line), longest)):
            n_bytes = len(piece.encode())
            ends = length >= size and (part[-1].isspace() or 2 * length >= 3 * size) and not piece.isspace()
            if has_words and (ends or length + n_bytes > limit):
                yield "".join(part)
                part, length, has_words = [], 0, False
            part.append(piece)
            length += n_bytes
            has_words = has_words or not piece.isspace()
    if part:
        yield "".join(part)


def _rejected(
    file: SourceFile, error: BadRecordError, *, offset: int = 0, length: int = 0
) -> RejectedDocument:
    return RejectedDocument(
        file.source, readable_path(file.path), offset, length, error.reason, error.detail[:300]
    )


def _document(
    file: SourceFile, record: Record, text_field: str, max_bytes: int, is_text: bool,
    steps: Sequence[str], language: str | None,
) -> Document:  # fmt: skip
    """Return the document of a record. Raises BadRecordError: it has no usable text."""
    if isinstance(record.value, BadRecordError):
        raise record.value
    text = _checked_text(record.value, text_field, max_bytes, steps)
    if is_text and is_private_key(text):
        raise BadRecordError("secret", "", "it is a private key")
    if is_text:
        match = SPDX_PATTERN.search(text[:4096].encode())
        licence = match[1].decode().strip() if match else None
    else:
        found = next((record.value[f] for f in LICENCE_FIELDS if f in record.value), None)
        licence = found if isinstance(found, str) else None
    path = readable_path(file.path)
    return Document(
        document_id(file.source, path, record.offset), file.source, path, licence or file.licence,
        record.offset, text, record.length, language, **_provenance(record.value),
    )  # fmt: skip


def _provenance(value: Mapping[str, object]) -> dict[str, str | None]:
    """Return the columns that a record's fields hold, or those of its field "meta" (the Pile's records)."""
    places = [value, *(meta for name in META_FIELDS if isinstance(meta := value.get(name), Mapping))]
    found: dict[str, str | None] = {}
    for column, names in PROVENANCE_FIELDS.items():
        texts = (_as_text(place.get(name)) for place in places for name in names)
        found[column] = next((text for text in texts if text), None)
    return found


def _as_text(value: object) -> str | None:
    if isinstance(value, datetime | date):
        return value.isoformat()
    if not isinstance(value, str):
        return None
    return value[:MAX_PROVENANCE].encode("utf-8", "replace").decode()


def _checked_text(value: Mapping[str, object], field: str, max_bytes: int, steps: Sequence[str]) -> str:
    if field not in value:
        error = unknown_form(value, "texts", [(field,)])
        raise BadRecordError("no_text_field", field, f"{error.detail}; ingest.text_field names another field")
    text = value[field]
    if not isinstance(text, str):
        raise BadRecordError("no_text_field", field, f"the text is {type(text).__name__}, not a string")
    if steps:
        text = normalise(text, steps)
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as error:  # "\ud800" is valid JSON but not valid text
        raise BadRecordError("invalid_utf8", field, f"lone surrogate at character {error.start}") from None
    if size > max_bytes:
        raise BadRecordError("too_large", field, f"{size} bytes, the limit is {max_bytes}")
    if "\0" in text:
        raise BadRecordError("binary", field, f"NUL at character {text.index(chr(0))}")
    if not text or text.isspace():
        raise BadRecordError("empty", field, BLANK)
    return text

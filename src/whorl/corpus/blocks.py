"""Raw files as numbered blocks: ranges of documents that can be read in any order, without an index.

Blocks have similar sizes, and each is readable alone (`data/formats`). Files are local paths or fsspec URLs. Unreadable
records are counted, with their reasons, in a quarantine.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from whorl.data.files import compression, format_suffix
from whorl.data.files import expand_globs as expand_globs
from whorl.data.formats import SUFFIXES, Format, open_format
from whorl.data.quarantine import BadRecordError, Quarantine
from whorl.errors import ConfigError, DataError

MAX_DOCUMENT_BYTES = 1 << 20
DEFAULT_BLOCK_BYTES = 1 << 18


@dataclass(frozen=True)
class FileBlock:
    """A range [begin, end) of a file, in the unit of its format (`data/formats/format.py`). size: in bytes."""

    file: str
    begin: int
    end: int
    size: int


@dataclass(frozen=True)
class Source:
    """Files and their weight in the mixture at the beginning and at the end of the run (by default equal).

    formats: suffix -> format, for suffixes that are not in `whorl.data.formats.SUFFIXES`.
    """

    files: Sequence[str]
    weight: float = 1.0
    final_weight: float | None = None
    text_field: str = "text"
    formats: Mapping[str, str] = field(default_factory=dict)

    def open(self, block_bytes: int = DEFAULT_BLOCK_BYTES) -> RawFiles:
        """Return the blocks of the files. Raises as `RawFiles`."""
        return RawFiles(self.files, self.text_field, block_bytes, self.formats)


@dataclass
class RawFiles:
    """Blocks of some files, in the order of the file names.

    Args:
        files: paths or URLs of .jsonl, .ndjson, .parquet, .tar or .arrow files, and of those in `formats`.
        text_field: the text's field in JSONL records, Parquet columns and .json members.
        formats: suffix -> format, for those that are not in `whorl.data.formats.SUFFIXES`.

    Raises:
        ConfigError: no files, or an unsupported suffix.
        DataError: a file is missing or damaged.
    """

    files: Sequence[str]
    text_field: str = "text"
    block_bytes: int = DEFAULT_BLOCK_BYTES
    formats: Mapping[str, str] = field(default_factory=dict)
    blocks: list[FileBlock] = field(init=False)
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        if not self.files:
            raise ConfigError("no files to read", expected="at least one")
        self.blocks, digest = [], hashlib.sha256()
        allowed = {**SUFFIXES, **self.formats}
        for name in sorted(self.files):
            if compression(name) or format_suffix(name) not in allowed:
                raise ConfigError(
                    f"{name} has no supported suffix",
                    expected=f"one of {', '.join(allowed)}, not compressed",
                )
            try:
                found = list(self._reader(name).blocks(name, self.block_bytes))
            except (OSError, tarfile.TarError, ValueError) as error:
                raise DataError(
                    f"{name} cannot be read: {error}", do="use an existing, undamaged file"
                ) from error
            blocks = [FileBlock(name, b.start, b.stop, b.size) for b in found]
            self.blocks += blocks
            digest.update(
                json.dumps([PurePosixPath(name).name, [(b.begin, b.end, b.size) for b in blocks]]).encode()
            )
        if not self.blocks:
            raise DataError("the files contain no records", expected="records with text")
        self.fingerprint = digest.hexdigest()[:16]

    def texts(self, number: int, rejects: Quarantine) -> Iterator[str]:
        """Yield the texts of a block in order; unreadable records are counted in `rejects`."""
        block = self.blocks[number]
        for record in self._reader(block.file).records(block.file, block.begin, block.end):
            value = record.value
            text = None if isinstance(value, BadRecordError) else value.get(self.text_field)
            if isinstance(value, BadRecordError):
                rejects.add(block.file, record.number, value)
            elif not isinstance(text, str):
                error = BadRecordError("no_text_field", self.text_field, type(text).__name__)
                rejects.add(block.file, record.number, error)
            elif len(text) > MAX_DOCUMENT_BYTES or (
                not text.isascii() and len(text.encode("utf-8", "replace")) > MAX_DOCUMENT_BYTES
            ):
                error = BadRecordError(
                    "too_large", self.text_field, f"more than {MAX_DOCUMENT_BYTES:,} bytes"
                )
                rejects.add(block.file, record.number, error)
            elif text:
                yield text

    def _reader(self, name: str) -> Format:
        return open_format(name, self.formats, fields=[self.text_field], longest=2 * MAX_DOCUMENT_BYTES)

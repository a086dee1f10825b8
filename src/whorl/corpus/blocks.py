"""Raw files as numbered blocks: ranges of documents that can be read in any order, without an index.

Blocks have similar sizes, and each is readable alone. A JSONL file is cut at multiples of `block_bytes`. A line belongs
to the block that contains its first byte, so each line is read exactly once and blocks are independent. A Parquet file
gives one block per row group; a tar file (webdataset) gives one per run of whole members. Files are local paths or
fsspec URLs.

Unreadable records are counted, with the first reason per block.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path, PurePosixPath
from typing import Any

import orjson

from whorl.errors import ConfigError, DataError

MAX_DOCUMENT_BYTES = 1 << 20
FORMAT_OF_SUFFIX = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".tar": "tar"}


@dataclass(frozen=True)
class FileBlock:
    """A range of a file: bytes [begin, end) of a JSONL or tar file, or row group `begin` of a Parquet file.

    size: in bytes.
    """

    file: str
    kind: str
    begin: int
    end: int
    size: int


@dataclass(frozen=True)
class Source:
    """Files and their weight in the mixture at the beginning and at the end of the run (by default equal)."""

    files: Sequence[str]
    weight: float = 1.0
    final_weight: float | None = None
    text_field: str = "text"


@dataclass
class RejectCounter:
    """Number of unreadable records, and the reason of the first."""

    count: int = 0
    first_reason: str = ""

    def add(self, reason: str) -> None:
        self.count += 1
        self.first_reason = self.first_reason or reason


@dataclass
class RawFiles:
    """Blocks of some files, in the order of the file names.

    Args:
        files: paths or URLs of .jsonl, .ndjson, .parquet or .tar files.
        text_field: the text's field in JSONL records, Parquet columns and .json members.

    Raises:
        ConfigError: no files, or an unsupported suffix.
        DataError: a file is missing or damaged.
    """

    files: Sequence[str]
    text_field: str = "text"
    block_bytes: int = 1 << 18
    blocks: list[FileBlock] = field(init=False)
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        if not self.files:
            raise ConfigError("no files to read", expected="at least one")
        self.blocks, digest = [], hashlib.sha256()
        for name in sorted(self.files):
            kind = FORMAT_OF_SUFFIX.get(PurePosixPath(name).suffix.lower())
            if kind is None:
                raise ConfigError(
                    f"{name} has no supported suffix",
                    expected=f"one of {', '.join(FORMAT_OF_SUFFIX)}",
                )
            try:
                blocks = list(getattr(self, f"_{kind}_blocks")(name))
            except (OSError, tarfile.TarError, ValueError) as error:
                raise DataError(
                    f"{name} cannot be read: {error}", do="use an existing, undamaged file"
                ) from error
            self.blocks += blocks
            digest.update(
                json.dumps([PurePosixPath(name).name, [(b.begin, b.end, b.size) for b in blocks]]).encode()
            )
        if not self.blocks:
            raise DataError("the files contain no records", expected="records with text")
        self.fingerprint = digest.hexdigest()[:16]

    def _jsonl_blocks(self, name: str) -> Iterator[FileBlock]:
        size = _file_size(name)
        for begin in range(0, size, self.block_bytes):
            end = min(size, begin + self.block_bytes)
            yield FileBlock(name, "jsonl", begin, end, end - begin)

    def _parquet_blocks(self, name: str) -> Iterator[FileBlock]:
        import pyarrow.parquet as pq

        with _open(name) as stream, pq.ParquetFile(stream) as table:
            if self.text_field not in table.schema_arrow.names:
                raise ValueError(
                    f"no column {self.text_field!r} among {', '.join(table.schema_arrow.names[:10])}"
                )
            for group in range(table.num_row_groups):
                yield FileBlock(
                    name, "parquet", group, group + 1, table.metadata.row_group(group).total_byte_size
                )

    def _tar_blocks(self, name: str) -> Iterator[FileBlock]:
        begin = end = 0
        with _open(name) as stream, tarfile.open(fileobj=stream) as archive:
            for member in archive:
                after = member.offset_data + -(-member.size // 512) * 512
                if after - begin > self.block_bytes and end > begin:
                    yield FileBlock(name, "tar", begin, end, end - begin)
                    begin = end
                end = after
        if end > begin:
            yield FileBlock(name, "tar", begin, end, end - begin)

    def texts(self, number: int, rejects: RejectCounter) -> Iterator[str]:
        """Yield the texts of a block in order; count unreadable records in `rejects`."""
        block = self.blocks[number]
        for text in getattr(self, f"_{block.kind}_texts")(block, rejects):
            if not isinstance(text, str):
                rejects.add(f"{block.file}: {self.text_field!r} is no text")
            elif len(text) > MAX_DOCUMENT_BYTES or (
                not text.isascii() and len(text.encode("utf-8", "replace")) > MAX_DOCUMENT_BYTES
            ):
                rejects.add(f"{block.file}: a text of more than {MAX_DOCUMENT_BYTES:,} bytes")
            elif text:
                yield text

    def _jsonl_texts(self, block: FileBlock, rejects: RejectCounter) -> Iterator[Any]:
        with _open(block.file) as stream:
            # One byte earlier: a line that begins exactly at `begin` follows the line end at `begin - 1`.
            stream.seek(max(0, block.begin - 1))
            data = stream.read(block.end - max(0, block.begin - 1))
            start = 0 if block.begin == 0 else data.find(b"\n") + 1
            if block.begin and not start:
                return  # no line begins in this block
            if start < len(data) and not data.endswith(b"\n"):
                data += stream.readline(2 * MAX_DOCUMENT_BYTES)
                if not data.endswith(b"\n") and stream.read(1):
                    last = data.rfind(b"\n") + 1
                    data = data[:last]
                    rejects.add(f"{block.file}: a line of more than {2 * MAX_DOCUMENT_BYTES:,} bytes")
        for line in data[start:].splitlines():
            if line.isspace() or not line:
                continue
            try:
                yield orjson.loads(line)[self.text_field]
            except (ValueError, KeyError, TypeError) as error:
                rejects.add(f"{block.file}: {type(error).__name__}: {str(error)[:100]}")

    def _parquet_texts(self, block: FileBlock, rejects: RejectCounter) -> Iterator[Any]:
        import pyarrow.parquet as pq

        try:
            with _open(block.file) as stream, pq.ParquetFile(stream) as table:
                yield from table.read_row_group(block.begin, columns=[self.text_field])[
                    self.text_field
                ].to_pylist()
        except (OSError, ValueError) as error:  # pyarrow raises either
            rejects.add(f"{block.file}: row group {block.begin}: {str(error)[:100]}")

    def _tar_texts(self, block: FileBlock, rejects: RejectCounter) -> Iterator[Any]:
        with _open(block.file) as stream:
            stream.seek(block.begin)
            data = stream.read(block.end - block.begin)
        with tarfile.open(fileobj=io.BytesIO(data + bytes(1024))) as archive:
            for member in archive:
                inside = archive.extractfile(member)
                if inside is None:
                    continue
                try:
                    text = inside.read().decode()
                    yield orjson.loads(text)[self.text_field] if member.name.endswith(".json") else text
                except (ValueError, KeyError, TypeError) as error:
                    rejects.add(f"{block.file}: {member.name}: {type(error).__name__}: {str(error)[:100]}")


def expand_globs(files: Sequence[str]) -> list[str]:
    """Return the names with each pattern (`*`, `?`, `[...]`; local or a URL) replaced by its matches, in order.

    Raises:
        DataError: a pattern has no match.
    """
    expanded: list[str] = []
    for name in files:
        if not any(c in name for c in "*?["):
            expanded.append(name)
            continue
        if "://" in name:
            import fsspec

            system, path = fsspec.core.url_to_fs(name)
            matches = [system.unstrip_protocol(match) for match in system.glob(path)]
        else:
            matches = glob(str(Path(name).expanduser()), recursive=True)  # noqa: PTH207 - patterns may be absolute
        if not matches:
            raise DataError(f"no file matches {name}", do="check the pattern and the current folder")
        expanded += sorted(matches)
    return expanded


def _open(name: str) -> Any:
    """Open a seekable binary stream of a local path or an fsspec URL."""
    if "://" not in name:
        return open(name, "rb")  # noqa: PTH123 - the caller's `with` closes it
    import fsspec

    return fsspec.open(name, "rb").open()


def _file_size(name: str) -> int:
    with _open(name) as stream:
        size: int = stream.seek(0, io.SEEK_END)
        return size

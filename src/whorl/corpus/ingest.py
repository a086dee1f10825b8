"""Ingest: read sources into immutable documents, and a quarantine that lists every rejected record.

Output:

- `documents-00000.parquet`, ...: the columns of `document_schema`, zstd. Row groups and files are bounded in bytes of
  text, so reading needs little memory at any document length.
- `quarantine.jsonl`: one line per rejected record, with source, path, offset, length, reason, detail.

Documents never change after this step. Attributes, selection and splits are in side files that are row-aligned with
them.

The input is divided into blocks of about `BLOCK_BYTES`: whole files, or ranges of a large one. Blocks depend on the input
only, and each writes its own document files, so any number of processes gives the same bytes. A finished block has a
manifest in the scratch folder. A run that was killed continues there: a block whose manifest has the same configuration
and the same input is not read again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whorl.corpus.config import IngestConfig
from whorl.corpus.documents import Document, RejectedDocument, document_schema
from whorl.corpus.readers import read_documents
from whorl.corpus.sources import (
    MAX_SPLIT_FILE_BYTES,
    SourceFile,
    exceeds_limit,
    fingerprint,
    is_divided,
    list_files,
    with_split_size,
)
from whorl.data.formats import open_format
from whorl.data.formats.format import DAMAGE
from whorl.data.quarantine import Quarantine
from whorl.errors import DataError
from whorl.machine.process import die_with_parent

if TYPE_CHECKING:
    from whorl.tracking.progress import Progress

BLOCK_BYTES = 64_000_000
ROW_GROUP_BYTES = 4_000_000
ROW_GROUP_ROWS = 4096
FILE_BYTES = 256_000_000
LOGGED_DAMAGED_FILES = 5


@dataclass(frozen=True)
class FilePart:
    """A file, or a range of it in the unit of its format. size: in bytes."""

    file: SourceFile
    start: int
    stop: int | None
    size: int


def ingest(
    config: IngestConfig, out: Path, progress: Progress, *, workers: int = 1, scratch: Path | None = None
) -> dict[str, Any]:
    """Read all sources into `out` and return counts of all records.

    Args:
        workers: processes; with more than one, a script must start under `if __name__ == "__main__"`.
        scratch: folder of finished blocks, from which a killed run continues; by default below `out`.

    Returns:
        `files`, `excluded_files`, `documents`, `bytes`, `funnel` (found, read), `quarantine` (reason -> documents,
        bytes), and the same two counts by `sources`, `languages` and `licences`.

    Raises:
        DataError: a source is unknown or empty, no document could be read, files changed since `config.fingerprint`
            was computed, or a worker was killed.
    """
    files, excluded = list_files(config)
    given, config = config, with_split_size(config, files)
    blocks = plan_blocks(files, config)
    folder = (out if scratch is None else scratch) / "blocks"
    folder.mkdir(parents=True, exist_ok=True)
    total = sum(f.size or 0 for f in files)
    with progress.task("Reading", total=total / 1e6, unit="MB") as task:
        _read_blocks(blocks, config, folder, workers, task.advance)
    stats = _collect(blocks, config, folder, out)
    for line in stats.damaged:
        progress.log(f"    damaged: {line}")
    if not stats.accepted["documents"]:
        raise DataError(
            f"none of the {len(files)} files in {', '.join(map(repr, config.sources))} has a document: "
            f"{stats.reasons() or 'all are empty'}",
            expected="UTF-8 text, Markdown, source code, JSONL(.gz/.zst), Parquet or tar",
            do=f"check the first: {stats.first_rejection}" if stats.first_rejection else "",
        )
    if config.fingerprint and config.fingerprint != fingerprint(given):
        raise DataError(
            "the source files changed while they were read", do="run again when the files no longer change"
        )
    return {"files": len(files), "excluded_files": excluded, **stats.summary()}


def plan_blocks(files: Sequence[SourceFile], config: IngestConfig) -> list[list[FilePart]]:
    """Return the blocks, each a list of consecutive parts with about BLOCK_BYTES, or one larger part."""
    blocks: list[list[FilePart]] = []
    room = 0
    for part in (part for file in files for part in _parts(file, config)):
        if part.size > room or not blocks:
            blocks.append([])
            room = BLOCK_BYTES
        blocks[-1].append(part)
        room -= part.size
    return blocks


def _parts(file: SourceFile, config: IngestConfig) -> list[FilePart]:
    size = file.size or 0
    whole = [FilePart(file, 0, None, size)]
    if size <= BLOCK_BYTES or exceeds_limit(file, config):
        return whole
    try:
        reader = open_format(file.location, config.formats, fields=[config.text_field])
        found = [FilePart(file, b.start, b.stop, b.size) for b in reader.blocks(file.location, BLOCK_BYTES)]
    except DAMAGE:
        return whole  # reading it gives the rejection
    return found if len(found) > 1 else whole


def _read_blocks(
    blocks: list[list[FilePart]], config: IngestConfig, folder: Path, workers: int,
    advance: Callable[[float], Any],
) -> None:  # fmt: skip
    waiting = []
    for number, block in enumerate(blocks):
        if _manifest(block, config, folder / f"{number:05d}") is None:
            waiting.append((number, block))
        else:
            advance(_megabytes(block))
    if workers <= 1 or len(waiting) <= 1:
        for number, block in waiting:
            read_block(block, config, folder / f"{number:05d}", advance)
        return
    try:
        with ProcessPoolExecutor(
            min(workers, len(waiting)), mp_context=get_context("spawn"),
            initializer=die_with_parent, initargs=(signal.SIGKILL,),
        ) as pool:  # fmt: skip
            futures = {
                pool.submit(read_block, block, config, folder / f"{number:05d}"): block
                for number, block in waiting
            }
            for future in as_completed(futures):
                future.result()
                advance(_megabytes(futures[future]))
    except BrokenProcessPool as error:
        raise DataError(
            "a process that read a block was killed, perhaps for its memory",
            do="run again, with fewer workers or a smaller max_document_bytes: finished blocks are kept",
        ) from error


def read_block(
    block: Sequence[FilePart], config: IngestConfig, folder: Path,
    advance: Callable[[float], Any] = lambda megabytes: None,
) -> None:  # fmt: skip
    """Write a block's documents, its quarantine and, last, its manifest into `folder`, which is emptied before."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    stats = _IngestStats()
    quarantine = Quarantine(folder / "quarantine.jsonl", max_kept=0)
    with _DocumentWriter(folder) as documents:
        for part in block:
            for record in _read_part(part, config):
                stats.add(record)
                if isinstance(record, Document):
                    documents.write(record)
                else:
                    quarantine.store(record)
            advance(part.size / 1e6)
    manifest = {"key": _key(block, config), "files": documents.n_files, "stats": vars(stats)}
    unfinished = folder / "manifest.tmp"
    unfinished.write_text(json.dumps(manifest))
    unfinished.replace(folder / "manifest.json")


def _read_part(part: FilePart, config: IngestConfig) -> Iterator[Document | RejectedDocument]:
    divided = is_divided(part.file, config)
    return read_documents(
        part.file, text_field=config.text_field, formats=config.formats, start=part.start, stop=part.stop,
        max_bytes=MAX_SPLIT_FILE_BYTES if divided else config.max_document_bytes,
        split_bytes=config.split_bytes or 0 if divided else 0,
    )  # fmt: skip


def _manifest(block: Sequence[FilePart], config: IngestConfig, folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a finished block with this input; or None."""
    try:
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError):
        return None
    whole = manifest["key"] == _key(block, config) and all(
        (folder / _document_file(n)).is_file() for n in range(manifest["files"])
    )
    return manifest if whole else None


def _key(block: Sequence[FilePart], config: IngestConfig) -> str:
    inputs = json.dumps([config.model_dump(mode="json"), [asdict(part) for part in block]])
    return hashlib.blake2b(inputs.encode(), digest_size=16).hexdigest()


def _collect(
    blocks: Sequence[Sequence[FilePart]], config: IngestConfig, folder: Path, out: Path
) -> _IngestStats:
    """Move the files of all blocks to `out`, in order, and return the sum of their counts."""
    stats, n_files = _IngestStats(), 0
    with (out / "quarantine.jsonl").open("wb") as quarantine:
        for number, block in enumerate(blocks):
            part = folder / f"{number:05d}"
            manifest = _manifest(block, config, part)
            assert manifest is not None
            stats.merge(manifest["stats"])
            if (part / "quarantine.jsonl").exists():
                quarantine.write((part / "quarantine.jsonl").read_bytes())
            for n in range(manifest["files"]):
                shutil.move(part / _document_file(n), out / _document_file(n_files))
                n_files += 1
    shutil.rmtree(folder)
    return stats


def _document_file(number: int) -> str:
    return f"documents-{number:05d}.parquet"


def _megabytes(block: Sequence[FilePart]) -> float:
    return sum(part.size for part in block) / 1e6


class _IngestStats:
    """Counts of documents and bytes by source, language, licence and rejection reason."""

    def __init__(self) -> None:
        self.accepted = {"documents": 0, "bytes": 0}
        self.counts_by: dict[str, dict[str, dict[str, int]]] = {
            kind: {} for kind in ("sources", "languages", "licences", "quarantine")
        }
        self.first_rejection = ""
        self.damaged: list[str] = []  # the first files of which a part is lost

    def add(self, record: Document | RejectedDocument) -> None:
        if isinstance(record, RejectedDocument):
            self._count("quarantine", record.reason, record.length)
            if record.reason == "damaged" and len(self.damaged) < LOGGED_DAMAGED_FILES:
                self.damaged.append(f"{record.path}: {record.detail}")
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

    def merge(self, other: Mapping[str, Any]) -> None:
        """Add the counts of a later block (its `vars`)."""
        self.accepted = {k: n + other["accepted"][k] for k, n in self.accepted.items()}
        for kind, names in other["counts_by"].items():
            for name, counts in names.items():
                self._count(kind, name, counts["bytes"], counts["documents"])
        self.first_rejection = self.first_rejection or other["first_rejection"]
        self.damaged = [*self.damaged, *other["damaged"]][:LOGGED_DAMAGED_FILES]

    def _count(self, kind: str, name: str, size: int, documents: int = 1) -> None:
        counts = self.counts_by[kind].setdefault(name, {"documents": 0, "bytes": 0})
        counts["documents"] += documents
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
            name = self.out / _document_file(self.n_files)
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

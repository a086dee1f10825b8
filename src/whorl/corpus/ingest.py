"""Ingest: read sources into immutable documents, and a quarantine that lists every rejected record.

Output:

- `documents-00000.parquet`, ...: the columns of `document_schema`, zstd. Row groups and files are bounded in bytes of
  text, so reading needs little memory at any document length.
- `quarantine.jsonl`: one line per rejected record, with source, path, offset, length, reason, detail.
- `copies.jsonl`: one line per file that was not read, since an earlier one has the same content, suffix and licence.

Documents never change after this step. Attributes, selection and splits are in side files that are row-aligned with
them.

The input is divided into blocks of about `BLOCK_BYTES`: whole files, or ranges of a large one. A block is a unit of work
(`mapreduce`): it depends on its files' contents and on the settings that read them, and writes its own document files. So
any number of processes gives the same bytes, a killed run continues, and a run with another file reads that file's block.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from whorl.corpus.config import IngestConfig
from whorl.corpus.document_writer import DocumentWriter, document_file
from whorl.corpus.documents import Document, RejectedDocument
from whorl.corpus.links import GoodLinks, LinkFile, find_links, good_links
from whorl.corpus.mapreduce import (
    ENGINE_FIELDS,
    Executor,
    Input,
    LocalPool,
    Output,
    Stage,
    Unit,
    UnitStore,
    link_or_copy,
)
from whorl.corpus.provenance.catalog import Catalog, CatalogFile, media_type
from whorl.corpus.provenance.hashes import ContentHashes
from whorl.corpus.readers import read_file
from whorl.corpus.sources import (
    SourceFile,
    exceeds_limit,
    file_versions,
    fingerprint,
    is_content_hash,
    list_files,
    readable_path,
    with_split_size,
)
from whorl.data.files import is_url
from whorl.data.formats import SUFFIXES, format_name, open_format
from whorl.data.formats.format import DAMAGE
from whorl.data.quarantine import BadRecordError, Quarantine
from whorl.errors import DataError

if TYPE_CHECKING:
    from whorl.tracking.progress import Progress

VERSION = 4  # of `read_block`
BLOCK_BYTES = 64_000_000
LOGGED_DAMAGED_FILES = 5
# Their readers are Python, which does not crash.
PLAIN_FORMATS = {"text", "jsonl", "gutenberg", "csv", "tsv", "notebook", "docx"}
COPIES_FILE = "copies.jsonl"
# Settings that choose the files or the links, whose effect on a block is in its arguments, or the engine, which has none.
CHOICE_OF_FILES = {
    "sources",
    "include",
    "exclude",
    "licences",
    "equal_files",
    "fingerprint",
    "links",
    "min_link_score",
    *ENGINE_FIELDS,
}


@dataclass(frozen=True)
class FilePart:
    """A file, or a range of it in the unit of its format. size: in bytes."""

    file: SourceFile
    start: int
    stop: int | None
    size: int


def ingest(
    config: IngestConfig, out: Path, progress: Progress, *, workers: int = 1, units: Path | None = None,
    catalog: Catalog | None = None, address: str = "", executor: Executor | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Read all sources into `out` and return counts of all records.

    Args:
        workers: processes; with more than one, a script must start under `if __name__ == "__main__"`.
        units: folder of finished blocks, which later runs reuse; default a temporary folder.
        catalog: gets a row for each file, under this address, and keeps the hashes of the files.
        executor: where blocks are read; default a pool of `workers`.

    Returns:
        `files`, `excluded_files`, `equal_files` (files and bytes that were not read), `documents`, `bytes`, `funnel`
        (found, read), `quarantine` (reason -> documents, bytes), and the same two counts by `sources`, `languages` and
        `licences`.

    Raises:
        DataError: a source is unknown or empty, no document could be read, files changed since `config.fingerprint`
            was computed, or a worker was killed.
    """
    files, excluded = list_files(config)
    given, config = config, with_split_size(config, files)
    hashes = ContentHashes(catalog)
    versions = file_versions(files, config, hashes)
    copies = _equal_files(files, versions) if config.equal_files == "once" else {}
    read = [number for number in range(len(files)) if number not in copies]
    blocks = plan_blocks([files[number] for number in read], config)
    total = sum(files[number].size or 0 for number in read)
    out.mkdir(parents=True, exist_ok=True)
    temporary = tempfile.TemporaryDirectory(dir=out, prefix="units-") if units is None else nullcontext(units)
    with temporary as folder, progress.task("Reading", total=total / 1e6, unit="MB") as task:
        found = UnitStore(Path(folder)).run(
            _stage(config, files), _units(blocks, files, versions, config), executor or LocalPool(workers),
            advance=lambda unit: task.advance(sum(part["size"] for part in unit.arguments["parts"]) / 1e6),
        )  # fmt: skip
        stats = _collect(found, out)
    _write_copies(out / COPIES_FILE, [(files[copy], files[first]) for copy, first in copies.items()])
    for line in stats.damaged:
        progress.log(f"    damaged: {line}")
    if not stats.accepted["documents"]:
        raise DataError(
            f"none of the {len(files)} files in {', '.join(map(repr, config.sources))} has a document: "
            f"{stats.reasons() or 'all are empty'}",
            expected=f"text in UTF-8, or a file of {', '.join(SUFFIXES)}",
            do=f"check the first: {stats.first_rejection}" if stats.first_rejection else "",
        )
    if config.fingerprint and config.fingerprint != fingerprint(given, hashes):
        raise DataError(
            "the source files changed while they were read", do="run again when the files no longer change"
        )
    if catalog is not None:
        catalog.add(_catalog_files(files, versions, address))
    size = sum(files[copy].size or 0 for copy in copies)
    equal = {"files": len(copies), "bytes": size}
    return {"files": len(files), "excluded_files": excluded, "equal_files": equal, **stats.summary()}


def _equal_files(files: Sequence[SourceFile], versions: Sequence[str]) -> dict[int, int]:
    """Return the number of each file that is read as an earlier one -> that one's.

    The documents of two files are equal but for their path if content, suffix and licence are. Empty files have nothing
    to store, and remain in the quarantine's counts.
    """
    first: dict[tuple[str, str, str | None], int] = {}
    copies = {}
    for number, (file, version) in enumerate(zip(files, versions, strict=True)):
        if file.size and is_content_hash(version):
            # All suffixes: `.jsonl.gz` is read in another way than `.gz`.
            suffixes = "".join(PurePosixPath(file.path).suffixes)
            earlier = first.setdefault((version, suffixes, file.licence), number)
            if earlier != number:
                copies[number] = earlier
    return copies


def _write_copies(path: Path, copies: Sequence[tuple[SourceFile, SourceFile]]) -> None:
    """Write one line per file that was not read, with the file of the same content that was."""
    if copies:
        with path.open("w", encoding="utf-8") as stream:
            for copy, first in copies:
                line = {
                    "source": copy.source, "path": readable_path(copy.path),
                    "of_source": first.source, "of_path": readable_path(first.path),
                }  # fmt: skip
                stream.write(json.dumps(line) + "\n")


def _catalog_files(
    files: Sequence[SourceFile], versions: Sequence[str], address: str
) -> Iterator[CatalogFile]:
    now = time.time()
    for file, version in zip(files, versions, strict=True):
        path = readable_path(file.path)
        digest = version if is_content_hash(version) else None
        modified = None if is_url(file.location) else file.modified_ns / 1e9
        yield CatalogFile(
            address, file.source, path, digest, file.size, media_type(path), file.licence, modified, now
        )


def plan_blocks(files: Sequence[SourceFile], config: IngestConfig) -> list[list[FilePart]]:
    """Return the blocks, each a list of consecutive parts with at most BLOCK_BYTES, or one larger part.

    From half of that size on, a hash of the next file's path may end the block. So where a file is added or removed, the
    blocks around it change, and not all after it.
    """
    blocks: list[list[FilePart]] = []
    size = 0
    for part in (part for file in files for part in _parts(file, config)):
        may_end = size >= BLOCK_BYTES // 2 and _chance(part.file.path) < 4 * part.size / BLOCK_BYTES
        if not blocks or may_end or size + part.size > BLOCK_BYTES:
            blocks.append([])
            size = 0
        blocks[-1].append(part)
        size += part.size
    return blocks


def _chance(path: str) -> float:
    """Return a number in [0, 1) that depends on the path."""
    digest = hashlib.blake2b(path.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


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


def _stage(config: IngestConfig, files: Sequence[SourceFile]) -> Stage:
    kept_apart = {format_name(file.location, config.formats) for file in files} - PLAIN_FORMATS
    return Stage(
        f"{__name__}:read_block", VERSION, config.model_dump(mode="json", exclude=CHOICE_OF_FILES),
        isolate=bool(kept_apart),
    )  # fmt: skip


def _units(
    blocks: Sequence[Sequence[FilePart]], files: Sequence[SourceFile], versions: Sequence[str],
    config: IngestConfig,
) -> list[Unit]:  # fmt: skip
    """Return a unit per block. Its inputs are the files of its parts, then those of the links."""
    version_of = dict(zip(map(id, files), versions, strict=True))
    links = find_links(config.links)
    inputs = tuple(Input(link.path, link.digest) for link in links)
    arguments: dict[str, Any] = {}
    if links:
        arguments = {"links": [link.digest for link in links], "min_link_score": config.min_link_score}
    return [
        Unit(
            tuple(Input(part.file.location, version_of[id(part.file)]) for part in block) + inputs,
            {"parts": [_describe(part) for part in block], **arguments},
        )
        for block in blocks
    ]


def _describe(part: FilePart) -> dict[str, Any]:
    """Return all of a part but its location and time, which no document depends on."""
    file = asdict(part.file)
    del file["location"], file["modified_ns"]
    file["path"] = os.fsencode(part.file.path).hex()
    return {"file": file, "start": part.start, "stop": part.stop, "size": part.size}


def read_block(
    inputs: Sequence[str], out: Path, config: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Write a block's documents and its quarantine into `out` (a unit's function); return their counts."""
    settings, n_parts = IngestConfig(**config), len(arguments["parts"])
    links = None
    if digests := arguments.get("links"):
        link_files = map(LinkFile, inputs[n_parts:], digests)
        links = good_links(tuple(link_files), arguments["min_link_score"])
    stats = _IngestStats()
    quarantine = Quarantine(out / "quarantine.jsonl", max_kept=0)
    with DocumentWriter(out) as documents:
        for location, part in zip(inputs[:n_parts], arguments["parts"], strict=True):
            path = os.fsdecode(bytes.fromhex(part["file"]["path"]))
            file = SourceFile(**{**part["file"], "path": path}, location=location, modified_ns=0)
            for record in read_file(file, settings, part["start"], part["stop"]):
                if links is not None and isinstance(record, Document):
                    record = _checked_link(record, links)
                stats.add(record)
                if isinstance(record, Document):
                    documents.write(record)
                else:
                    quarantine.store(record)
    return vars(stats)


def _checked_link(document: Document, links: GoodLinks) -> Document | RejectedDocument:
    try:
        links.check(document.url)
    except BadRecordError as error:
        return RejectedDocument(
            document.source, document.path, document.offset, document.length, error.reason, error.detail[:300]
        )
    return document


def _collect(blocks: Sequence[Output], out: Path) -> _IngestStats:
    """Link the files of all blocks into `out`, in order, and return the sum of their counts."""
    stats, n_files = _IngestStats(), 0
    with (out / "quarantine.jsonl").open("wb") as quarantine:
        for block in blocks:
            stats.merge(block.summary)
            for name in sorted(block.files):
                if name == "quarantine.jsonl":
                    quarantine.write((block.folder / name).read_bytes())
                else:
                    link_or_copy(block.folder / name, out / document_file(n_files))
                    n_files += 1
    return stats


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

"""Changes of the files below a folder, by the hashes of their contents.

The corpus's readers cut files into documents and give their ids (`corpus/readers.py`). The state of each file is folded
from the topic. A renamed file is a deletion and an insertion, in one transaction. Links to folders are not followed, so
a circle of links ends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import orjson
import xxhash

from whorl.corpus.config import DEFAULT_EXCLUDE, IngestConfig
from whorl.corpus.documents import Document
from whorl.corpus.provenance.hashes import ContentHashes, hash_content
from whorl.corpus.readers import read_file
from whorl.corpus.sources import SourceFile, file_versions, is_content_hash, list_files
from whorl.errors import DataError
from whorl.loop.capture.change import Row, RowChange, Transaction
from whorl.loop.capture.source import ChangeSource, SourceOptions, SourceUnavailableError

LIMIT = 500  # changes of a transaction, more if one file has more documents
SLOW = 0.05  # seconds of a listing; after a slower one, three times as long a pause
HIDDEN = (".*", "*~", "#*#")  # files of editors
FIELDS = ("path", "language", "licence", "url", "time", "media_type")


class FolderSource(ChangeSource):
    """See the top of this file. Its position is the number of transactions so far."""

    connector = "folder"

    def __init__(self, options: SourceOptions) -> None:
        super().__init__(options)
        self.root = Path(options.target).expanduser().absolute()
        self._config = IngestConfig(sources=[str(self.root)], exclude=[*DEFAULT_EXCLUDE, *HIDDEN])
        self._config = self._config.model_copy(update={"split_bytes": self._config.max_document_bytes})
        self._hashes = ContentHashes()
        self._pause_until = 0.0
        self._rejected = list[tuple[str, str]]()
        self._position: Mapping[str, Any] | None = None
        self._versions = dict[str, str]()  # path -> hash of its content
        self._documents = dict[str, dict[str, str]]()  # path -> id -> hash of the row

    def read(self, position: Mapping[str, Any] | None) -> Iterator[Transaction]:
        if position is None or position != self._position:
            self._restore()
        elif time.monotonic() < self._pause_until:
            return
        self._position = position or {"number": 0}
        files = self._list()
        changes = list[RowChange]()
        for path in [path for path in self._versions if path not in files]:
            changes += self._compare(path, {})
            del self._versions[path]
        for path, (file, version) in files.items():
            if self._versions.get(path) != version:
                rows, rejected = dict[str, Row](), list[tuple[str, str]]()
                for found in read_file(file, self._config):
                    if isinstance(found, Document):
                        rows[found.id] = self._row(found, version)
                    else:
                        rejected.append((found.path, f"{found.reason}: {found.detail}"))
                if is_content_hash(version) and hash_content(file.location) != version:
                    continue  # it changed while it was read
                self._rejected += rejected
                changes += self._compare(path, rows)
                self._versions[path] = version
            if len(changes) >= LIMIT:
                yield self._transaction(changes)
                changes = []
        if changes:
            yield self._transaction(changes)

    def rejected(self) -> list[tuple[str, str]]:
        found, self._rejected = self._rejected, []
        return found

    def _restore(self) -> None:
        """Fold the topic into the documents of each file."""
        self._versions, self._documents, places = {}, {}, dict[str, str]()
        for event in self.options.history():
            data = event.data or {}
            if (old := places.pop(event.key, None)) is not None:
                del self._documents[old][event.key]
            if row := data.get("after"):
                places[event.key] = row["path"]
                self._versions[row["path"]] = row["file"]["hash"]
                self._documents.setdefault(row["path"], {})[event.key] = _digest(row)

    def _list(self) -> dict[str, tuple[SourceFile, str]]:
        """Return path -> file and version, sorted. Raises SourceUnavailableError: the folder is gone, or not readable."""
        began = time.monotonic()
        try:
            next(self.root.iterdir(), None)
            files = list_files(self._config, may_be_empty=True)[0]
        except (OSError, DataError) as error:
            raise SourceUnavailableError(f"the folder {self.root}: {error}", do="mount it again") from error
        versions = file_versions(files, self._config, self._hashes)
        if (seconds := time.monotonic() - began) > SLOW:
            self._pause_until = time.monotonic() + 3 * seconds
        return {file.path: (file, version) for file, version in zip(files, versions, strict=True)}

    def _row(self, document: Document, version: str) -> Row:
        """Return a row. Its hash is in an object, which search has as no field."""
        fields = {name: value for name in FIELDS if (value := getattr(document, name)) is not None}
        title = document.title or PurePosixPath(document.path).stem
        return {"title": title, "text": document.text, **fields, "file": {"hash": version}}

    def _compare(self, path: str, rows: Mapping[str, Row]) -> list[RowChange]:
        """Return the changes of the documents of a file, and keep its new state."""
        before, after = self._documents.pop(path, {}), {id: _digest(row) for id, row in rows.items()}
        if after:
            self._documents[path] = after
        gone = [RowChange("d", id, {"path": path}, None, "") for id in before if id not in after]
        return gone + [
            RowChange("u" if id in before else "c", id, None, row, "")
            for id, row in rows.items()
            if before.get(id) != after[id]
        ]

    def _transaction(self, changes: list[RowChange]) -> Transaction:
        assert self._position is not None
        self._position = {"number": self._position["number"] + 1}
        digest = xxhash.xxh3_64_hexdigest(orjson.dumps([(c.op, c.key, c.after) for c in changes]))
        return Transaction(f"{self._position['number']}/{digest}", self._position, changes, time.time())


def _digest(row: Row) -> str:
    return xxhash.xxh3_64_hexdigest(orjson.dumps({**row, "file": None}, option=orjson.OPT_SORT_KEYS))

"""Responses on disk, by model address and request: another metric sends no request.

    key = SHA-256(canonical JSON of (version, model address, kind and fields of the request))

One SQLite file in WAL mode. Responses are committed in batches, so `kill -9` loses at most the last one; two processes may
write at the same time. A `Missing` response is not stored: the next run requests it again.

The subtle point is the contents of the key. Everything that changes a response is in the model's address or in the request
(seed and temperature included); what only changes speed, such as the batch size, is in neither.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from whorl.errors import DataError
from whorl.evals.model.requests import (
    Completion,
    Missing,
    ModelBackend,
    Request,
    Response,
    Score,
    WrappedBackend,
)
from whorl.store.address import canonical_json

VERSION = 1
BATCH_RESPONSES = 256  # written in one transaction
BATCH_SECONDS = 2.0  # a transaction is at most so old when it is written
BUSY_SECONDS = 60.0  # wait for another process's transaction
KEYS_PER_QUERY = 500

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    key BLOB PRIMARY KEY,
    model TEXT NOT NULL,
    response TEXT NOT NULL
) WITHOUT ROWID
"""


def request_key(address: str, request: Request) -> bytes:
    """Return the key of a request to the model at `address`."""
    fields = asdict(request)
    for name in ("answer_ids", "top_k"):  # no part of the key of earlier versions
        if not fields.get(name, True):
            del fields[name]
    content = [VERSION, address, type(request).__name__, fields]
    return hashlib.sha256(canonical_json(content)).digest()


class ResponseCache:
    """Responses in one SQLite file. A context manager.

    Args:
        batch: responses of one transaction; what `kill -9` may lose.

    Raises:
        DataError: the file is not a database.
    """

    def __init__(self, path: Path, batch: int = BATCH_RESPONSES) -> None:
        self.path, self.batch = path, batch
        path.parent.mkdir(parents=True, exist_ok=True)
        self._pending: list[tuple[bytes, str, str]] = []
        self._first_pending = 0.0  # seconds, when the oldest of them arrived
        try:
            self._database = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.execute(_SCHEMA)
        except sqlite3.DatabaseError as error:
            raise DataError(
                f"{path} cannot be read: {error}",
                expected="a cache of responses, a SQLite file",
                do="delete the file; the responses are requested again",
            ) from error

    def get(self, keys: Sequence[bytes]) -> dict[bytes, Response]:
        """Return the stored responses of `keys`, as far as there are any."""
        found: dict[bytes, Response] = {}
        for start in range(0, len(keys), KEYS_PER_QUERY):
            some = keys[start : start + KEYS_PER_QUERY]
            marks = ",".join("?" * len(some))
            query = f"SELECT key, response FROM responses WHERE key IN ({marks})"
            for key, text in self._database.execute(query, some):
                found[key] = _parse_response(json.loads(text))
        return found

    def put(self, key: bytes, address: str, response: Score | Completion) -> None:
        """Store a response, with the next transaction."""
        if not self._pending:
            self._first_pending = time.monotonic()
        content = {"kind": type(response).__name__, **asdict(response)}
        self._pending.append((key, address, json.dumps(content, separators=(",", ":"))))
        if len(self._pending) >= self.batch or time.monotonic() - self._first_pending >= BATCH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write all responses."""
        if not self._pending:
            return
        self._database.execute("BEGIN IMMEDIATE")
        try:
            self._database.executemany("INSERT OR IGNORE INTO responses VALUES (?, ?, ?)", self._pending)
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")
        self._pending.clear()

    def close(self) -> None:
        """Write all responses and close the file."""
        self.flush()
        self._database.close()

    def __len__(self) -> int:
        n: int = self._database.execute("SELECT COUNT(*) FROM responses").fetchone()[0]
        return n + len(self._pending)

    def __enter__(self) -> ResponseCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class CachedBackend(WrappedBackend):
    """A backend that answers from a cache what it can, and sends each other distinct request once.

    n_sent, n_cached: requests sent to the backend, and answered without it.
    """

    def __init__(self, backend: ModelBackend, cache: ResponseCache) -> None:
        super().__init__(backend)
        self.cache = cache
        self.n_sent = self.n_cached = 0

    def respond(self, requests: Sequence[Request], on_response: Callable[[int, Response], None]) -> None:
        """See `ModelBackend`. All responses are on disk when it returns."""
        numbers: dict[bytes, list[int]] = {}
        for n, request in enumerate(requests):
            numbers.setdefault(request_key(self.address, request), []).append(n)
        found = self.cache.get(list(numbers))
        for key, response in found.items():
            for n in numbers[key]:
                on_response(n, response)
        self.n_cached += len(requests) - sum(len(own) for key, own in numbers.items() if key not in found)
        keys = [key for key in numbers if key not in found]
        self.n_sent += len(keys)

        def store(index: int, response: Response) -> None:
            key = keys[index]
            if not isinstance(response, Missing):
                self.cache.put(key, self.address, response)
            for n in numbers[key]:
                on_response(n, response)

        try:
            if keys:
                self.backend.respond([requests[numbers[key][0]] for key in keys], store)
        finally:
            self.cache.flush()


def _parse_response(content: dict[str, Any]) -> Response:
    made = Score if content.pop("kind") == "Score" else Completion
    return made(**{**content, "ids": tuple(content["ids"]), "log_probs": tuple(content["log_probs"])})

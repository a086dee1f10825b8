"""A log in one SQLite file, which several processes may share.

`sqlite:FILE`. One thread of each process writes. It commits everything that waits in one transaction, so that many writers
share one flush of the disk (group commit; DeWitt et al. 1984, "Implementation techniques for main memory database
systems"). WAL with `synchronous=FULL`: a record that was acknowledged survives a power failure. Offsets
are given inside the transaction, under SQLite's write lock, so they have no gap and appear in order.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import apsw

from whorl.errors import ConfigError, DataError
from whorl.log.event import Event, LogRecord
from whorl.log.partitioning import partition_of
from whorl.log.port import (
    Guarantees,
    Log,
    LogUnavailableError,
    OffsetRange,
    OffsetRemovedError,
    Position,
    TopicConfig,
    check_same_partitions,
    checked,
)

BUSY_SECONDS = 60  # wait for another process's transaction
BATCH = 4096  # events of one transaction
_SCHEMA = """
CREATE TABLE IF NOT EXISTS topics (name TEXT PRIMARY KEY, config TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ends (
    topic TEXT, partition INTEGER, first INTEGER NOT NULL, next INTEGER NOT NULL, PRIMARY KEY (topic, partition)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS records (
    topic TEXT, partition INTEGER, offset INTEGER, id TEXT NOT NULL, key TEXT NOT NULL, recorded REAL NOT NULL,
    value BLOB NOT NULL, PRIMARY KEY (topic, partition, offset)
) WITHOUT ROWID;
CREATE UNIQUE INDEX IF NOT EXISTS one_id ON records (id, topic);
CREATE TABLE IF NOT EXISTS documents (name TEXT PRIMARY KEY, content BLOB NOT NULL, version INTEGER NOT NULL) WITHOUT ROWID;
"""
_Submission = tuple[str, Sequence[Event], list[bytes], "Future[list[Position]]"]


class SqliteLog(Log):
    """See the top of this file. Raises ConfigError: the URL names no file; DataError: the file is no log."""

    guarantees = Guarantees(
        survives="kill -9 and power failure of this machine; not the loss of its disk",
        duplicates="an id that the topic still holds",
    )

    def __init__(self, url: str) -> None:
        self.url, path = url, Path(url.removeprefix("sqlite:").removeprefix("//"))
        if not url.removeprefix("sqlite:"):
            raise ConfigError(f"the log {url!r} names no file", expected="sqlite:FILE")
        self.path, self._local, self._topics = path, threading.local(), dict[str, TopicConfig]()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            connection = self._connection()
            connection.execute(_SCHEMA)
        except apsw.Error as error:
            raise DataError(
                f"{path} cannot be opened: {error}", expected="the file of a log, or a new name",
                do="give another file, or free space on the disk",
            ) from error  # fmt: skip
        self._waiting: queue.SimpleQueue[_Submission | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write_all, name="whorl-log", daemon=True)
        self._writer.start()
        self._closed = False

    def create(self, topic: str, config: TopicConfig | None = None) -> TopicConfig:
        asked = config or TopicConfig()
        database = self._connection()
        with _transaction(database, self.url):
            rows = [(topic, p, 0, 0) for p in range(asked.partitions)]
            made = "INSERT INTO topics VALUES (?, ?) ON CONFLICT DO NOTHING RETURNING name"
            if database.execute(made, (topic, asked.model_dump_json())).fetchall():
                database.executemany("INSERT INTO ends VALUES (?, ?, ?, ?)", rows)
        return check_same_partitions(topic, self.topic(topic), config)

    def topics(self) -> dict[str, TopicConfig]:
        rows = self._connection().execute("SELECT name, config FROM topics ORDER BY name")
        return {name: TopicConfig.model_validate_json(config) for name, config in rows}

    def topic(self, name: str) -> TopicConfig:
        if name not in self._topics:  # settings do not change
            self._topics[name] = super().topic(name)
        return self._topics[name]

    def submit(self, topic: str, events: Sequence[Event]) -> Future[list[Position]]:
        if self._closed:
            raise LogUnavailableError(f"{self.url} is closed")
        future: Future[list[Position]] = Future()
        self._waiting.put((topic, events, checked(self.topic(topic), topic, events), future))
        return future

    def bounds(self, topic: str) -> list[OffsetRange]:
        self.topic(topic)
        rows = self._connection().execute(
            "SELECT first, next FROM ends WHERE topic = ? ORDER BY partition", (topic,)
        )
        return [OffsetRange(*row) for row in rows]

    def fetch(self, topic: str, partition: int, offset: int, limit: int = 1000) -> list[LogRecord]:
        database = self._connection()
        with database:  # one snapshot: a trim between the two queries would look like the end
            rows: list[Any] = database.execute(
                "SELECT partition, offset, key, recorded, value FROM records "
                "WHERE topic = ? AND partition = ? AND offset >= ? ORDER BY offset LIMIT ?",
                (topic, partition, offset, limit),
            ).fetchall()
            if not rows or rows[0][1] > offset:
                query = "SELECT first FROM ends WHERE topic = ? AND partition = ?"
                found: Any = database.execute(query, (topic, partition)).fetchone()
                if found is not None and offset < found[0]:
                    raise OffsetRemovedError(topic, partition, offset, found[0] - 1)
        return [LogRecord(topic, *row) for row in rows]

    def trim(self, topic: str, partition: int, offset: int) -> None:
        database = self._connection()
        with _transaction(database, self.url):
            query = "UPDATE ends SET first = max(first, min(next, ?)) WHERE topic = ? AND partition = ? RETURNING first"
            ((first,),) = database.execute(query, (offset, topic, partition)).fetchall()
            database.execute(
                "DELETE FROM records WHERE topic = ? AND partition = ? AND offset < ?",
                (topic, partition, first),
            )

    def compact(self, topic: str, now: float | None = None) -> int:
        oldest = (now or time.time()) - self.topic(topic).tombstone_seconds
        database = self._connection()
        with _transaction(database, self.url):
            before = database.total_changes()
            _delete_superseded(database, topic)
            database.execute(
                "DELETE FROM records WHERE topic = ? AND recorded < ? "
                "AND json_extract(CAST(value AS TEXT), '$.data') IS NULL",
                (topic, oldest),
            )
            return database.total_changes() - before

    def find_offset(self, topic: str, partition: int, when: float) -> int:
        row = self._connection().execute(
            "SELECT min(offset) FROM records WHERE topic = ? AND partition = ? AND recorded >= ?",
            (topic, partition, when),
        ).fetchone()  # fmt: skip
        return int(row[0]) if row and row[0] is not None else self.bounds(topic)[partition].next

    def document(self, name: str) -> tuple[bytes, int]:
        query = "SELECT content, version FROM documents WHERE name = ?"
        return self._connection().execute(query, (name,)).fetchone() or (b"", 0)

    def put_document(self, name: str, content: bytes, version: int) -> bool:
        database = self._connection()
        with _transaction(database, self.url):
            if version == 0:
                query = "INSERT INTO documents VALUES (?2, ?1, ?3 + 1) ON CONFLICT DO NOTHING RETURNING 1"
            else:
                query = "UPDATE documents SET content = ?1, version = ?3 + 1 WHERE name = ?2 AND version = ?3 RETURNING 1"
            return bool(database.execute(query, (content, name, version)).fetchall())

    def document_names(self, prefix: str) -> list[str]:
        rows = self._connection().execute(
            "SELECT name FROM documents WHERE substr(name, 1, ?) = ?", (len(prefix), prefix)
        )
        return [name for (name,) in rows]

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._waiting.put(None)
            self._writer.join()

    def _connection(self) -> apsw.Connection:
        """Return the connection of this thread."""
        if (found := getattr(self._local, "connection", None)) is None:
            found = self._local.connection = apsw.Connection(str(self.path))
            found.set_busy_timeout(BUSY_SECONDS * 1000)
            for setting in ("journal_mode=WAL", "synchronous=FULL", "wal_autocheckpoint=4000"):
                found.execute(f"PRAGMA {setting}").fetchall()
        return found

    def _write_all(self) -> None:
        """Commit what waits, until the log is closed."""
        while (first := self._waiting.get()) is not None:
            batch, size, last = [first], len(first[1]), False
            while size < BATCH and not self._waiting.empty():
                more = self._waiting.get()
                if last := more is None:
                    break
                batch.append(more)
                size += len(more[1])
            try:
                places = self._write(batch)
            except BaseException as error:  # of this transaction; the next may succeed
                for *_, future in batch:
                    future.set_exception(_unavailable(self.url, error))
            else:
                for (*_, future), own in zip(batch, places, strict=True):
                    future.set_result(own)
            if last:
                return

    def _write(self, batch: Sequence[_Submission]) -> list[list[Position]]:
        """Append all submissions in one transaction."""
        database, now = self._connection(), time.time()
        with _transaction(database, self.url):
            ends = dict[str, list[int]]()
            known = dict[tuple[str, str], Position]()
            for topic in {topic for topic, *_ in batch}:
                query = "SELECT next FROM ends WHERE topic = ? ORDER BY partition"
                ends[topic] = [n for (n,) in database.execute(query, (topic,))]
                ids = [event.id for other, events, *_ in batch if other == topic for event in events]
                query = "SELECT id, partition, offset FROM records WHERE topic = ? AND id IN carray(?)"
                for name, *place in database.execute(query, (topic, apsw.carray(tuple(ids)))):
                    known[topic, name] = Position(*place)
            rows, all_places = list[tuple[Any, ...]](), list[list[Position]]()
            for topic, events, values, _ in batch:
                own = list[Position]()
                for event, value in zip(events, values, strict=True):
                    if (place := known.get((topic, event.id))) is None:
                        partition = partition_of(event.key, len(ends[topic]))
                        place = known[topic, event.id] = Position(partition, ends[topic][partition])
                        ends[topic][partition] += 1
                        rows.append((topic, *place, event.id, event.key, now, value))
                    own.append(place)
                all_places.append(own)
            database.executemany("INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            database.executemany(
                "UPDATE ends SET next = ? WHERE topic = ? AND partition = ?",
                [(end, topic, p) for topic, own in ends.items() for p, end in enumerate(own)],
            )
        return all_places


def _delete_superseded(database: apsw.Connection, topic: str) -> None:
    """Delete the records that have a newer one of their key."""
    database.execute(
        "DELETE FROM records WHERE topic = ?1 AND (partition, offset) NOT IN "
        "(SELECT partition, max(offset) FROM records WHERE topic = ?1 GROUP BY partition, key)",
        (topic,),
    )


class _transaction:
    """BEGIN IMMEDIATE and COMMIT, or ROLLBACK. Raises LogUnavailableError."""

    def __init__(self, database: apsw.Connection, url: str) -> None:
        self.database, self.url = database, url

    def __enter__(self) -> None:
        try:
            self.database.execute("BEGIN IMMEDIATE")
        except apsw.Error as error:
            raise _unavailable(self.url, error) from error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self.database.execute("COMMIT")
                return
        except apsw.Error as failed:
            error = failed
        if self.database.in_transaction:
            self.database.execute("ROLLBACK")
        if isinstance(error, apsw.Error):
            raise _unavailable(self.url, error) from error


def _unavailable(url: str, error: BaseException) -> BaseException:
    if not isinstance(error, apsw.Error):
        return error
    full = isinstance(error, apsw.FullError)
    return LogUnavailableError(
        f"{url}: {'the disk is full' if full else error}", expected="room for the records",
        do="free space; the same events may be sent again" if full else "send the same events again",
    )  # fmt: skip

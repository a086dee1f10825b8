"""The log in a SQL database: tables and statements that sqlite.py and postgres.py share.

Offsets are given inside the transaction of the append, under a lock on the rows of the topic in `ends`: they have no gap,
and records appear in the order of their offsets.
"""

from __future__ import annotations

import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from typing import Any, ClassVar

from whorl.log.event import TOMBSTONE_END, Event, LogRecord
from whorl.log.partitioning import partition_of
from whorl.log.port import Log, OffsetRange, OffsetRemovedError, Position, TopicConfig, checked
from whorl.log.writer import BATCH, GroupCommit, Submission

TABLES = """
CREATE TABLE IF NOT EXISTS ends (
    topic TEXT, partition BIGINT, first BIGINT NOT NULL, next BIGINT NOT NULL, recorded DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (topic, partition)
) {rows};
CREATE TABLE IF NOT EXISTS records (
    topic TEXT, partition BIGINT, "offset" BIGINT, id TEXT NOT NULL, key {bytes} NOT NULL,
    recorded DOUBLE PRECISION NOT NULL, value {bytes} NOT NULL, PRIMARY KEY (topic, partition, "offset")
) {rows};
CREATE UNIQUE INDEX IF NOT EXISTS one_id ON records (id, topic);
CREATE TABLE IF NOT EXISTS documents (name TEXT PRIMARY KEY, content {bytes} NOT NULL, version BIGINT NOT NULL) {rows};
"""
_SUPERSEDED = """
DELETE FROM records WHERE topic = ? AND (partition, "offset") IN (
    SELECT partition, "offset" FROM (
        SELECT partition, "offset", max("offset") OVER (PARTITION BY partition, key) AS newest
        FROM records WHERE topic = ?
    ) AS every WHERE "offset" < newest
) RETURNING 1
"""
_OLD_TOMBSTONES = """
DELETE FROM records WHERE topic = ? AND recorded < ? AND substr(value, length(value) - 11) = ? RETURNING 1
"""
_PUT = """
INSERT INTO documents (name, content, version) VALUES (?, ?, 1)
ON CONFLICT (name) DO UPDATE SET content = excluded.content, version = documents.version + 1
WHERE documents.version = ? RETURNING 1
"""


_MOVE_END = "ON CONFLICT (topic, partition) DO UPDATE SET next = excluded.next, recorded = excluded.recorded"


class SqlLog(Log):
    """A back end gives connections and transactions. Statements have `?` for arguments.

    lock: what a SELECT of `ends` needs to lock its rows. id_in: the condition that an id is in an `array`.
    """

    lock: ClassVar[str]
    id_in: ClassVar[str]
    array: ClassVar[Callable[[tuple[str, ...]], Any]]

    def __init__(self, url: str, batch: int = BATCH) -> None:
        super().__init__(url)
        self._local, self._connections = threading.local(), weakref.WeakSet[Any]()
        self._writer = GroupCommit(self._write, batch)

    @abstractmethod
    def _connect(self) -> Any:
        """Return a new connection."""

    @abstractmethod
    def _transaction(self) -> AbstractContextManager[Any]:
        """Yield a cursor in a transaction that writes. Raises LogUnavailableError."""

    @abstractmethod
    def _rows(self, statement: str, *arguments: Any) -> list[Any]:
        """Return the rows of a statement that reads. Raises LogUnavailableError."""

    def _connection(self) -> Any:
        """Return the connection of this thread."""
        self._check_open()
        if (found := getattr(self._local, "connection", None)) is None:
            found = self._local.connection = self._connect()
            self._connections.add(found)
        return found

    def _make(self, topic: str, config: TopicConfig) -> None:
        rows = [(topic, p, 0, 0, 0.0) for p in range(config.partitions)]
        with self._transaction() as cursor:
            cursor.executemany("INSERT INTO ends VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING", rows)

    def submit(self, topic: str, events: Sequence[Event]) -> Future[list[Position]]:
        self._check_open()
        return self._writer.submit(topic, events, checked(self.topic(topic), topic, events))

    def bounds(self, topic: str) -> list[OffsetRange]:
        self.topic(topic)
        rows = self._rows("SELECT first, next FROM ends WHERE topic = ? ORDER BY partition", topic)
        return [OffsetRange(*row) for row in rows]

    def fetch(self, topic: str, partition: int, offset: int, limit: int = 1000) -> list[LogRecord]:
        rows = self._rows(
            'SELECT partition, "offset", key, recorded, value FROM records '
            'WHERE topic = ? AND partition = ? AND "offset" >= ? ORDER BY "offset" LIMIT ?',
            topic, partition, offset, limit,
        )  # fmt: skip
        if not rows or rows[0][1] > offset:  # after the records: a trim before them is seen here
            query = "SELECT first FROM ends WHERE topic = ? AND partition = ?"
            for (first,) in self._rows(query, topic, partition):
                if offset < first:
                    raise OffsetRemovedError(topic, partition, offset, first - 1)
        return [LogRecord(topic, p, n, bytes(key).decode(), *rest) for p, n, key, *rest in rows]

    def trim(self, topic: str, partition: int, offset: int) -> None:
        bound = min(offset, self.bounds(topic)[partition].next)
        with self._transaction() as cursor:
            query = "UPDATE ends SET first = ? WHERE topic = ? AND partition = ? AND first < ?"
            cursor.execute(query, (bound, topic, partition, bound))
            query = 'DELETE FROM records WHERE topic = ? AND partition = ? AND "offset" < ?'
            cursor.execute(query, (topic, partition, bound))

    def compact(self, topic: str, now: float | None = None) -> int:
        oldest = (now or time.time()) - self.topic(topic).tombstone_seconds
        with self._transaction() as cursor:
            removed = len(cursor.execute(_SUPERSEDED, (topic, topic)).fetchall())
            return removed + len(cursor.execute(_OLD_TOMBSTONES, (topic, oldest, TOMBSTONE_END)).fetchall())

    def document(self, name: str) -> tuple[bytes, int]:
        rows = self._rows("SELECT content, version FROM documents WHERE name = ?", name)
        return (bytes(rows[0][0]), rows[0][1]) if rows else (b"", 0)

    def put_document(self, name: str, content: bytes, version: int) -> bool:
        with self._transaction() as cursor:
            return bool(cursor.execute(_PUT, (name, content, version)).fetchall())

    def document_names(self, prefix: str) -> list[str]:
        rows = self._rows("SELECT name FROM documents WHERE substr(name, 1, ?) = ?", len(prefix), prefix)
        return [name for (name,) in rows]

    def close(self) -> None:
        if not self._closed:
            self._writer.close()
            self._closed = True
            for connection in list(self._connections):
                with suppress(Exception):  # another thread uses it
                    connection.close()

    def _write(self, batch: Sequence[Submission]) -> list[list[Position]]:
        """Append all submissions in one transaction."""
        names = tuple({topic for topic, *_ in batch})
        ends = {topic: list[int]() for topic in names}
        known, rows = dict[tuple[str, str], Position](), list[tuple[Any, ...]]()
        places, now = list[list[Position]](), time.time()
        with self._transaction() as cursor:
            query = f"SELECT topic, next, recorded FROM ends WHERE topic IN ({', '.join('?' * len(names))})"
            query = f"{query} ORDER BY topic, partition {self.lock}"
            for topic, end, last in cursor.execute(query, names).fetchall():
                ends[topic].append(end)
                now = max(now, last)  # a clock that was set back
            for topic in names:
                ids = tuple(event.id for other, events, *_ in batch if other == topic for event in events)
                query = f'SELECT id, partition, "offset" FROM records WHERE topic = ? AND {self.id_in}'
                for name, *place in cursor.execute(query, (topic, type(self).array(ids))).fetchall():
                    known[topic, name] = Position(*place)
            for topic, events, values, _ in batch:
                places.append([])
                for event, value in zip(events, values, strict=True):
                    if (place := known.get((topic, event.id))) is None:
                        partition = partition_of(event.key, len(ends[topic]))
                        place = known[topic, event.id] = Position(partition, ends[topic][partition])
                        ends[topic][partition] += 1
                        rows.append((topic, *place, event.id, event.key.encode(), now, value))
                    places[-1].append(place)
            _insert(cursor, "records", rows)
            changed = [(topic, p, 0, ends[topic][p], now) for topic, p in {row[:2] for row in rows}]
            _insert(cursor, "ends", changed, _MOVE_END)
        return places


def _insert(cursor: Any, table: str, rows: Sequence[tuple[Any, ...]], conflict: str = "") -> None:
    """Insert rows in few statements: each one is a round trip, or gives the interpreter's lock away."""
    start = 0
    for size in (256, 32, 4, 1):  # a statement of each size is prepared once
        while len(rows) - start >= size:
            some = rows[start : start + size]
            row = f"({', '.join('?' * len(some[0]))})"
            values = [value for each in some for value in each]
            cursor.execute(f"INSERT INTO {table} VALUES {', '.join([row] * size)} {conflict}", values)
            start += size

"""The store of views: rows, offsets and owners in one database, changed in one transaction per batch.

`sqlite:FILE` or `postgresql://...`, the same SQL in both. Each partition of a view has an offset and an epoch, which grows
when a worker takes the partition. A transaction names the epoch and the offset that it continues from, and fails if either
has changed. So a batch counts once, also after a crash, a second delivery, or a takeover while its owner slept. The epoch is
a fencing token (Kleppmann 2016, "How to do distributed locking"). Transactions of one view run one after the other.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import orjson

from whorl.errors import ConfigError, DataError, WhorlError
from whorl.log.groups import FencedError, Partition
from whorl.loop.streams.view import END, ViewState

KEYS = 500  # of one query
_SCHEMA = """
CREATE TABLE IF NOT EXISTS view_rows (
    view TEXT, name TEXT, key TEXT COLLATE {binary}, value TEXT NOT NULL, PRIMARY KEY (view, name, key)
);
CREATE TABLE IF NOT EXISTS view_offsets (
    view TEXT, topic TEXT, partition INTEGER, next BIGINT NOT NULL, epoch BIGINT NOT NULL,
    PRIMARY KEY (view, topic, partition)
)"""
_PUT = "INSERT INTO view_rows VALUES (%s, %s, %s, %s) ON CONFLICT (view, name, key) DO UPDATE SET value = excluded.value"
_DELETE = "DELETE FROM view_rows WHERE view = %s AND name = %s AND key = %s"
_TAKE = """INSERT INTO view_offsets VALUES (%s, %s, %s, %s, 1)
ON CONFLICT (view, topic, partition) DO UPDATE SET epoch = view_offsets.epoch + 1 RETURNING next, epoch"""
_RESET = """INSERT INTO view_offsets VALUES (%s, %s, %s, %s, 1)
ON CONFLICT (view, topic, partition) DO UPDATE SET epoch = view_offsets.epoch + 1, next = excluded.next"""


class ViewsUnavailableError(WhorlError):
    """The store of views does not answer. Work in progress is rolled back and may be repeated."""


class _Dialect(NamedTuple):
    """The differences between the two databases."""

    connect: Callable[[], Any]
    errors: tuple[type[Exception], ...]
    create: Sequence[str]
    begin: str = "BEGIN"
    lock: str = " FOR UPDATE"
    mark: str = "%s"


def _sqlite(url: str) -> _Dialect:
    path = url.removeprefix("sqlite:")

    def connect() -> sqlite3.Connection:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        opened = sqlite3.connect(path, timeout=60.0, isolation_level=None, check_same_thread=False)
        opened.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL")
        return opened

    create = _SCHEMA.format(binary="BINARY").split(";")
    return _Dialect(connect, (sqlite3.OperationalError,), create, "BEGIN IMMEDIATE", "", "?")


def _postgresql(url: str) -> _Dialect:
    import psycopg

    once = "SELECT pg_advisory_xact_lock(46)"  # two processes that create one table at a time fail
    create = [once, *_SCHEMA.format(binary='"C"').split(";")]
    errors = psycopg.OperationalError, psycopg.InterfaceError
    return _Dialect(lambda: psycopg.connect(url, autocommit=True, connect_timeout=10), errors, create)


_DIALECTS = {"sqlite": _sqlite, "postgresql": _postgresql}


class ViewStore:
    """A connection to `sqlite:FILE` or `postgresql://...`. A context manager; its methods may be called from any thread.

    A connection that was lost is opened again by the next call.

    Raises:
        ConfigError: another scheme. DataError: the file is no store. From all methods, ViewsUnavailableError: no answer.
    """

    def __init__(self, url: str) -> None:
        scheme, _, rest = url.partition(":")
        if scheme not in _DIALECTS or not rest:
            raise ConfigError(f"the store of views {url!r}", expected="sqlite:FILE or postgresql://...")
        self.url, self._lock, self._inside = url, threading.RLock(), False
        self._connection: Any = None
        self._dialect = _DIALECTS[scheme](url)
        try:
            with self.transaction():
                for statement in self._dialect.create:
                    self.execute(statement)
        except sqlite3.DatabaseError as error:
            raise DataError(f"{url}: {error}", expected="the file of views, or a new name") from error

    def execute(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a query with %s for values."""
        with self._cursor() as cursor:
            cursor.execute(query.replace("%s", self._dialect.mark), tuple(values))
            return cursor.fetchall() if cursor.description else []

    def execute_many(self, query: str, rows: Sequence[Sequence[Any]]) -> None:
        with self._cursor() as cursor:
            cursor.executemany(query.replace("%s", self._dialect.mark), rows)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit at the end, or roll back at an error."""
        with self._lock:
            self.execute(self._dialect.begin)
            self._inside = True  # a new connection lacks what was written
            try:
                yield
                self.execute("COMMIT")
            except BaseException:
                with suppress(*self._dialect.errors):
                    self._connection.execute("ROLLBACK")
                raise
            finally:
                self._inside = False

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    @contextmanager
    def _cursor(self) -> Iterator[Any]:
        with self._lock:
            try:
                if not self._inside and (
                    self._connection is None or getattr(self._connection, "closed", False)
                ):
                    self._connection = self._dialect.connect()
                yield self._connection.cursor()
            except self._dialect.errors as error:
                raise ViewsUnavailableError(f"{self.url}: {error}") from error

    def load(self, view: str, table: str, keys: Sequence[str]) -> dict[str, Any]:
        """Return key -> value of the rows that exist."""
        found = dict[str, Any]()
        for start in range(0, len(keys), KEYS):
            some = [_storable(key) for key in keys[start : start + KEYS]]
            marks = ", ".join(["%s"] * len(some))
            query = f"SELECT key, value FROM view_rows WHERE view = %s AND name = %s AND key IN ({marks})"
            found |= {key: orjson.loads(value) for key, value in self.execute(query, (view, table, *some))}
        return found

    def scan(
        self, view: str, table: str, low: str = "", high: str = END, limit: int | None = None
    ) -> dict[str, Any]:
        """Return the rows with low <= key < high, sorted by key; with a limit the last ones, the greatest key first."""
        query = "SELECT key, value FROM view_rows WHERE view = %s AND name = %s AND key >= %s AND key < %s ORDER BY key"
        values: tuple[Any, ...] = (view, table, _storable(low), _storable(high))
        if limit is not None:
            query, values = f"{query} DESC LIMIT %s", (*values, limit)
        return {key: orjson.loads(value) for key, value in self.execute(query, values)}

    def offsets(self, view: str, lock: str = "") -> dict[Partition, tuple[int, int]]:
        """Return partition -> next offset and epoch."""
        query = "SELECT topic, partition, next, epoch FROM view_offsets WHERE view = %s ORDER BY 1, 2"
        return {
            (topic, number): (end, epoch) for topic, number, end, epoch in self.execute(query + lock, (view,))
        }

    def take(self, view: str, first: Mapping[Partition, int]) -> dict[Partition, tuple[int, int]]:
        """Own partitions; return the next offset and the new epoch of each. first: where a new view begins."""
        with self.transaction():
            rows = {p: self.execute(_TAKE, (view, *p, first[p])) for p in sorted(first)}
        return {p: (row[0][0], row[0][1]) for p, row in rows.items()}

    def reset(self, view: str, first: Mapping[Partition, int]) -> None:
        """Delete a view, so that it is folded again from `first`; its owners are fenced."""
        with self.transaction():
            self.offsets(view, self._dialect.lock)
            self.execute("DELETE FROM view_rows WHERE view = %s", (view,))
            self.execute_many(_RESET, [(view, *p, first[p]) for p in sorted(first)])

    @contextmanager
    def batch(
        self, view: str, moves: Mapping[Partition, tuple[int, int]], epochs: Mapping[Partition, int],
        partitions: Sequence[Partition] = (),
    ) -> Iterator[ViewState]:  # fmt: skip
        """Yield the state; at the end commit its writes and the offsets. moves: partition -> offset before and after.

        Raises:
            FencedError: another worker took a partition, or the offset moved.
        """
        with self.transaction():
            now = self.offsets(view, self._dialect.lock)
            for place, (start, _) in moves.items():
                self.check_fence(f"the view {view}, {place}", now.get(place), (start, epochs[place]))
            yield (state := ViewState(self, view, partitions))
            self.write(view, state)
            query = "UPDATE view_offsets SET next = %s WHERE view = %s AND topic = %s AND partition = %s"
            self.execute_many(query, [(end, view, *place) for place, (_, end) in moves.items()])

    def write(self, view: str, state: ViewState) -> None:
        """Write what changed, within a transaction."""
        rows = [
            (view, t, _storable(k), orjson.dumps(v).decode()) for (t, k), v in sorted(state.written.items())
        ]
        self.execute_many(_PUT, [row for row in rows if row[3] != "null"])
        self.execute_many(_DELETE, [row[:3] for row in rows if row[3] == "null"])

    def check_fence(self, place: str, found: tuple[int, int] | None, own: tuple[int, int]) -> None:
        if found != own:
            raise FencedError(
                f"{place}: offset and epoch are {found}, not {own}", expected="the owner of the partition"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def default_views(store: str | Path) -> str:
    """Return the URL of the views that belong to a store: a SQLite file in its folder."""
    return f"sqlite:{Path(store) / 'log' / 'views.db'}"


def _storable(key: str) -> str:
    return key.replace("\0", "\ufffd")  # no text of PostgreSQL has NUL

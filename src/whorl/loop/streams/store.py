"""The store of views: rows, offsets and owners in one database, changed in one transaction per batch.

`sqlite:FILE` or `postgresql://...`, the same SQL in both. Each partition of a view has an offset and an epoch, which grows
when a worker takes the partition. A transaction names the epoch and the offset that it continues from, and fails if either
has changed. So a batch counts once, also after a crash, a second delivery, or a takeover while its owner slept. The epoch is
a fencing token (Kleppmann 2016, "How to do distributed locking"). Transactions of one view run one after the other.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import apsw
import orjson

from whorl.errors import ConfigError, DataError, WhorlError
from whorl.log.groups import FencedError, Partition
from whorl.loop.streams.view import END, Epochs, Rows, ViewState

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


class ViewStore(ABC):
    """A connection to the store. A context manager; its methods may be called from any thread."""

    lock_rows = ""

    def __init__(self, url: str) -> None:
        self.url, self._lock = url, threading.RLock()

    @abstractmethod
    def execute(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a query with %s for values. Raises ViewsUnavailableError."""

    @abstractmethod
    def execute_many(self, query: str, rows: Sequence[Sequence[Any]]) -> None: ...

    @abstractmethod
    def transaction(self) -> AbstractContextManager[None]:
        """Commit at the end, or roll back at an error. Raises ViewsUnavailableError."""

    @abstractmethod
    def close(self) -> None: ...

    def load(self, view: str, table: str, keys: Sequence[str]) -> Rows:
        """Return key -> value of the rows that exist."""
        found: Rows = {}
        for start in range(0, len(keys), KEYS):
            some = [_storable(key) for key in keys[start : start + KEYS]]
            marks = ", ".join(["%s"] * len(some))
            query = f"SELECT key, value FROM view_rows WHERE view = %s AND name = %s AND key IN ({marks})"
            found |= {key: orjson.loads(value) for key, value in self.execute(query, (view, table, *some))}
        return found

    def scan(self, view: str, table: str, low: str = "", high: str = END, limit: int | None = None) -> Rows:
        """Return the rows with low <= key < high, sorted by key; with a limit the last ones, the greatest key first."""
        query = "SELECT key, value FROM view_rows WHERE view = %s AND name = %s AND key >= %s AND key < %s ORDER BY key"
        values: tuple[Any, ...] = (view, table, _storable(low), _storable(high))
        if limit is not None:
            query, values = f"{query} DESC LIMIT %s", (*values, limit)
        return {key: orjson.loads(value) for key, value in self.execute(query, values)}

    def offsets(self, view: str) -> dict[Partition, tuple[int, int]]:
        """Return partition -> next offset and epoch."""
        query = (
            "SELECT topic, partition, next, epoch FROM view_offsets WHERE view = %s ORDER BY topic, partition"
        )
        rows = self.execute(query + self.lock_rows, (view,))
        return {(topic, number): (end, epoch) for topic, number, end, epoch in rows}

    def take(self, view: str, first: Mapping[Partition, int]) -> dict[Partition, tuple[int, int]]:
        """Own partitions; return the next offset and the new epoch of each. first: where a new view begins."""
        with self.transaction():
            rows = {p: self.execute(_TAKE, (view, *p, first[p])) for p in sorted(first)}
        return {p: (row[0][0], row[0][1]) for p, row in rows.items()}

    def reset(self, view: str, first: Mapping[Partition, int]) -> None:
        """Delete a view, so that it is folded again from `first`; its owners are fenced."""
        with self.transaction():
            self.offsets(view)
            self.execute("DELETE FROM view_rows WHERE view = %s", (view,))
            self.execute_many(_RESET, [(view, *p, first[p]) for p in sorted(first)])

    @contextmanager
    def batch(
        self, view: str, moves: Mapping[Partition, tuple[int, int]], epochs: Epochs,
        partitions: Sequence[Partition] = (),
    ) -> Iterator[ViewState]:  # fmt: skip
        """Yield the state; at the end commit its writes and the offsets. moves: partition -> offset before and after.

        Raises:
            FencedError: another worker took a partition, or the offset moved.
        """
        with self.transaction():
            now = self.offsets(view)
            for partition, (start, _) in moves.items():
                self._check_fence(view, partition, now.get(partition), (start, epochs[partition]))
            state = ViewState(
                lambda table, keys: self.load(view, table, keys),
                lambda table, low, high: self.scan(view, table, low, high), partitions,
            )  # fmt: skip
            yield state
            self.write(view, state)
            self.execute_many(
                "UPDATE view_offsets SET next = %s WHERE view = %s AND topic = %s AND partition = %s",
                [(end, view, *partition) for partition, (_, end) in moves.items()],
            )

    def write(self, view: str, state: ViewState) -> None:
        """Write what changed, within a transaction."""
        rows = sorted((table, _storable(key), value) for (table, key), value in state.written.items())
        encoded = [(view, t, k, orjson.dumps(v).decode()) for t, k, v in rows if v is not None]
        self.execute_many(_PUT, encoded)
        self.execute_many(_DELETE, [(view, t, k) for t, k, v in rows if v is None])

    def _check_fence(
        self, view: str, partition: Partition, found: tuple[int, int] | None, own: tuple[int, int]
    ) -> None:
        if found != own:
            raise FencedError(
                f"the view {view}, {partition[0]}/{partition[1]}: offset and epoch are {found}, not {own}",
                expected="the owner of the partition", do="take the partition again",
            )  # fmt: skip

    def __enter__(self) -> ViewStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SqliteViews(ViewStore):
    """Rows in a SQLite file (WAL, `synchronous=FULL`); `sqlite::memory:` for tests."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        path = url.removeprefix("sqlite:")
        if path != ":memory:":
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        try:
            self._database = apsw.Connection(path)
            self._database.set_busy_timeout(60_000)
            self._database.execute("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL").fetchall()
            self._database.execute(_SCHEMA.format(binary="BINARY"))
        except apsw.Error as error:
            raise DataError(
                f"{path or url} cannot be opened: {error}", expected="the file of views, or a new name",
                do="give another file, or free space on the disk",
            ) from error  # fmt: skip

    def execute(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._lock, self._errors():
            return self._database.execute(query.replace("%s", "?"), tuple(values)).fetchall()

    def execute_many(self, query: str, rows: Sequence[Sequence[Any]]) -> None:
        with self._lock, self._errors():
            self._database.executemany(query.replace("%s", "?"), [tuple(row) for row in rows])

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with self._lock:
            self.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.execute("COMMIT")
            finally:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")

    def close(self) -> None:
        self._database.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (apsw.BusyError, apsw.FullError, apsw.IOError, apsw.CantOpenError) as error:
            raise ViewsUnavailableError(f"{self.url}: {error}", expected="a store that answers") from error


class PostgresViews(ViewStore):
    """Rows in PostgreSQL, by psycopg. A lost connection is opened again by the next call."""

    lock_rows = " FOR UPDATE"

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._connection: Any = None
        with self.transaction():
            self.execute("SELECT pg_advisory_xact_lock(46)")  # two processes that create one table fail
            for statement in _SCHEMA.format(binary='"C"').split(";"):
                self.execute(statement)

    def execute(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._cursor() as cursor:
            cursor.execute(query, values)
            return cursor.fetchall() if cursor.description else []

    def execute_many(self, query: str, rows: Sequence[Sequence[Any]]) -> None:
        with self._cursor() as cursor:
            cursor.executemany(query, rows)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with self._cursor() as cursor, cursor.connection.transaction():
            yield

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    @contextmanager
    def _cursor(self) -> Iterator[Any]:
        import psycopg

        with self._lock:
            try:
                if self._connection is None or self._connection.closed:
                    self._connection = psycopg.connect(self.url, autocommit=True, connect_timeout=10)
                with self._connection.cursor() as cursor:
                    yield cursor
            except (psycopg.OperationalError, psycopg.InterfaceError) as error:
                self.close()
                raise ViewsUnavailableError(
                    f"{self.url}: {error}", expected="a store that answers"
                ) from error


def open_views(url: str) -> ViewStore:
    """Open a store of views: `sqlite:FILE` or `postgresql://...`.

    Raises:
        ConfigError: another scheme. DataError: the file cannot be opened. ViewsUnavailableError: no answer.
    """
    scheme, _, rest = url.partition(":")
    kinds: dict[str, type[ViewStore]] = {"sqlite": SqliteViews, "postgresql": PostgresViews}
    if scheme not in kinds or not rest:
        raise ConfigError(f"the store of views {url!r}", expected="sqlite:FILE or postgresql://...")
    return kinds[scheme](url)


def default_views(store: str | Path) -> str:
    """Return the URL of the views that belong to a store: a SQLite file in its folder."""
    return f"sqlite:{Path(store) / 'log' / 'views.db'}"


def _storable(key: str) -> str:
    return key.replace("\0", "\ufffd")  # no text of PostgreSQL has NUL

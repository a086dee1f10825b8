"""Changes of a table in PostgreSQL, from its write-ahead log: a logical slot with `pgoutput`, read by SQL functions.

A slot is peeked, and advances once its changes are durable in the topic. So it is never ahead of the newest position of the
topic, unless it was dropped and made again. If the table is quiet, a heartbeat in the topic lets it advance.

The snapshot runs under live writes in windows (DBLog, Andreakis and Papapanagiotou 2020, arXiv:2010.12597): a chunk of
rows is selected, then a watermark is written into the write-ahead log. The chunk is emitted where the log has the watermark,
without the rows that were changed by a transaction which the chunk's snapshot does not see. (DBLog takes the changes
after a first watermark for those, but a transaction is in PostgreSQL's log shortly before it is visible.)
"""

from __future__ import annotations

import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import psycopg
import xxhash

from whorl.errors import ConfigError
from whorl.loop.capture import tables
from whorl.loop.capture.change import Row, RowChange, Transaction
from whorl.loop.capture.pgoutput import PgDecoder, PgTransaction, convert
from whorl.loop.capture.source import SourceLostError, SourceOptions, SourceUnavailableError
from whorl.loop.capture.tables import HEARTBEAT_BYTES, TableSource

PEEK = 20_000  # messages, more if a transaction has more
WATERMARK = "whorl"
_SETTINGS = (
    "client_encoding=UTF8", "datestyle=ISO", "timezone=UTC", "intervalstyle=postgres", "bytea_output=hex",
    "extra_float_digits=1", "synchronous_commit=local",
)  # fmt: skip
_TABLES = "SELECT schemaname || '.' || tablename FROM pg_tables WHERE schemaname !~ '^(pg_|information_schema)' ORDER BY 1"
_COLUMNS = """
SELECT format('%%I.%%I', n.nspname, c.relname), a.attname, a.atttypid::bigint, array_position(i.indkey::int2[], a.attnum)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
LEFT JOIN pg_index i ON i.indrelid = c.oid
    AND CASE c.relreplident WHEN 'i' THEN i.indisreplident WHEN 'n' THEN false ELSE i.indisprimary END
WHERE c.oid = to_regclass(%s) AND c.relkind IN ('r', 'p') ORDER BY 4 NULLS LAST, a.attnum
"""
_SLOT = """
SELECT confirmed_flush_lsn - '0/0', wal_status <> 'lost' AND EXISTS (SELECT FROM pg_publication WHERE pubname = slot_name),
    pg_current_wal_flush_lsn() - '0/0', pg_current_wal_lsn() - coalesce(restart_lsn, pg_current_wal_lsn())
FROM (SELECT) AS one LEFT JOIN pg_replication_slots ON slot_name = %s
"""
_PEEK = """
SELECT data FROM pg_logical_slot_peek_binary_changes(
    %s, NULL, %s, 'proto_version', '1', 'publication_names', %s, 'messages', 'true')
"""


@dataclass
class _Chunk:
    """Rows that wait for their watermark. sees: whether their snapshot sees a transaction. after: key of the last."""

    watermark: str
    sees: Callable[[int], bool]
    rows: dict[str, Row]
    after: list[str]


class PostgresSource(TableSource):
    """See the top of this file. Position: lsn; columns: a hash; snapshot: its name, and the key that it came to."""

    connector = "postgresql"

    def __init__(self, options: SourceOptions) -> None:
        super().__init__(options)
        digest = _digest([str(options.state.absolute()), options.table])
        self.slot = f"whorl_{re.sub('[^a-z0-9]', '_', options.name.lower())[:40]}_{digest[:8]}"
        self._lsn, self._columns = 0, ""
        self._chunk: _Chunk | None = None
        self._recent: deque[int] = deque(maxlen=1000)  # transactions
        self._connect()

    def read(self, position: Mapping[str, Any] | None) -> Iterator[Transaction]:
        self._continue(position)
        while True:
            if self.snapshot and self._chunk is None:
                self._chunk = self._read_chunk()
            end, messages = int(self._slot()[2]), self._peek()
            for transaction in PgDecoder(self.types).transactions(messages):
                if transaction.lsn > self._lsn:
                    yield from self._emit(transaction)
            if (
                len(messages) >= PEEK
            ):  # the next peek begins behind what is acknowledged, which a heartbeat makes sure of
                yield self.transaction(self._place(), [], time.time(), f"{self._lsn:x}/peek")
            elif not self.snapshot:
                break
        if end - self._lsn > HEARTBEAT_BYTES:  # all that was committed before `end` was read
            self._lsn = end
            yield self.transaction(self._place(), [], time.time(), f"{end:x}")

    def acknowledge(self, position: Mapping[str, Any] | None) -> None:
        if position is not None:
            query = "SELECT pg_replication_slot_advance(%s, '0/0'::pg_lsn + %s::numeric)"
            self._rows(query, self.slot, position["lsn"])

    def retained(self) -> int:
        return int(self._slot()[3])

    def release(self) -> None:
        query = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s"
        self._rows(query, self.slot)

    def close(self) -> None:
        self._connection.close()

    def _slot(self) -> tuple[Any, ...]:
        """Return the confirmed position (None: no slot), whether it is usable, the end of the log, retained bytes."""
        return self._rows(_SLOT, self.slot)[0]

    def _place(self) -> dict[str, Any]:
        return {"lsn": self._lsn, "columns": self._columns}

    def _continue(self, position: Mapping[str, Any] | None) -> None:
        """Take up the state of a position. Without one, make the slot unless it exists, and begin a snapshot."""
        if self._connection.closed:
            self._connect()
        confirmed, usable, end, _ = self._slot()
        if confirmed is not None and not usable:
            self.release()
            confirmed = None
        self._chunk = None
        if position is None:
            if confirmed is None:
                self._rows(f"DROP PUBLICATION IF EXISTS {self.slot}")
                options = "WITH (publish_via_partition_root = true)"
                self._rows(f"CREATE PUBLICATION {self.slot} FOR TABLE {self.table} {options}")
                self._rows("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", self.slot)
                confirmed = self._slot()[0]
            self._lsn = int(confirmed)
            self.begin_snapshot()
        elif confirmed is None or not confirmed <= position["lsn"] <= end:
            problem = "is gone" if confirmed is None else "is not at the position of the topic"
            expected = "a slot that nothing else drops or advances"
            raise SourceLostError(f"the slot {self.slot} {problem}", expected=expected)
        else:
            self._lsn, (self.snapshot, self.after) = position["lsn"], position["snapshot"]
            if not self.snapshot and position["columns"] != self._columns:
                self.begin_snapshot()

    def _emit(self, transaction: PgTransaction) -> Iterator[Transaction]:
        self._lsn = transaction.lsn
        self._recent.append(transaction.xid)
        digest = _digest(transaction.columns) if transaction.columns else self._columns
        if digest != self._columns or transaction.truncated:
            # a new column has a default in all rows; a complete snapshot deletes the rows that it did not find
            self._find_table()
            self._columns, self._chunk = digest, None
            self.begin_snapshot()
        changes = [change for each in transaction.changes for change in self.changes_of(*each)]
        changes = [self._whole(c, transaction.columns) if c.op == "c" else c for c in changes]
        if changes:
            yield self.transaction(self._place(), changes, transaction.time, f"{self._lsn:x}")
        if (chunk := self._chunk) is None:
            return
        if not chunk.sees(transaction.xid):
            for change in changes:
                chunk.rows.pop(change.key, None)
        if (WATERMARK, chunk.watermark.encode()) in transaction.messages:
            self._chunk = None
            name, when = chunk.watermark, transaction.time
            yield self.chunk_transaction(self._place(), chunk.rows, when, name, chunk.after)

    def _read_chunk(self) -> _Chunk:
        """Select the next rows of the snapshot, and write a watermark behind them."""
        while True:
            with _available(self.options), self._connection.transaction():
                self._rows("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
                sees = visible(self._rows("SELECT pg_current_snapshot()::text")[0][0])
                texts = self._select(self.chunk_query([*map(self.quoted, self.types)]), *self.after)
            if all(map(sees, self._recent)):
                break
            time.sleep(0.01)  # a transaction that was read already is not yet visible
        watermark = secrets.token_hex(8)
        self._rows("SELECT pg_logical_emit_message(true, %s, %s)", WATERMARK, watermark)
        rows = {self.key_of(row): row for row in map(self._row, texts)}
        last = [(texts[-1][name] or b"").decode() for name in self.key] if len(texts) == tables.CHUNK else []
        return _Chunk(watermark, sees, rows, last)

    def _whole(self, change: RowChange, columns: Sequence[tuple[str, int]]) -> RowChange:
        """Return an insertion, which a changed key gave, with the values that the log lacks, as they are now."""
        row = change.after or {}
        if missing := [name for name, _ in columns if name not in row and name in self.types]:
            where = " AND ".join(f"{self.quoted(name)} = %s" for name in self.key)
            query = f"SELECT {', '.join(map(self.quoted, missing))} FROM {self.table} WHERE {where}"
            for found in self._select(query, *(str(row[name]) for name in self.key)):
                return replace(change, after={**row, **self._row(found)})
        return change

    def _connect(self) -> None:
        settings = " ".join(f"-c {setting}" for setting in _SETTINGS)
        with _available(self.options):
            self._connection = psycopg.connect(
                self.options.target, autocommit=True, connect_timeout=10, options=settings, application_name="whorl",
            )  # fmt: skip
        try:
            self._find_table()
        except BaseException:
            self.close()
            raise

    def _find_table(self) -> None:
        if self._rows("SHOW wal_level") != [("logical",)] or self._connection.info.server_version < 140000:
            raise ConfigError(
                f"{self.options.target} has no logical write-ahead log", expected="PostgreSQL 14, wal_level = logical",
                do="run `ALTER SYSTEM SET wal_level = logical`, and restart the server",
            )  # fmt: skip
        found = self._rows(_COLUMNS, self.options.table)
        self.types = {name: type for _, name, type, _ in found}
        self.key = [name for _, name, _, place in found if place is not None]
        self.check_table([name for (name,) in self._rows(_TABLES)])
        self.table, self._columns = found[0][0], _digest([(name, type) for _, name, type, _ in found])
        names = ", ".join(map(self.quoted, self.types))
        result = self._execute(f"SELECT {names} FROM {self.table} LIMIT 0").pgresult
        self.types = {name: result.ftype(i) for i, name in enumerate(self.types)}  # below a domain

    def _peek(self) -> list[bytes]:
        with _available(self.options), self._connection.cursor(binary=True) as cursor:
            return [content for (content,) in cursor.execute(_PEEK, (self.slot, PEEK, self.slot))]

    def _execute(self, query: str, *arguments: Any) -> Any:
        with _available(self.options):
            return self._connection.execute(query, arguments or None)

    def _rows(self, query: str, *arguments: Any) -> list[tuple[Any, ...]]:
        return cursor.fetchall() if (cursor := self._execute(query, *arguments)).description else []

    def _select(self, query: str, *arguments: str) -> list[dict[str, bytes | None]]:
        """Return rows with the texts of their values."""
        cursor = self._execute(query, *arguments)
        names, get = [column.name for column in cursor.description], cursor.pgresult.get_value
        return [{name: get(row, i) for i, name in enumerate(names)} for row in range(cursor.pgresult.ntuples)]

    def _row(self, texts: Mapping[str, bytes | None]) -> Row:
        return {name: None if t is None else convert(self.types[name], t) for name, t in texts.items()}


def visible(snapshot: str) -> Callable[[int], bool]:
    """Return whether a snapshot (the text of pg_current_snapshot) sees a transaction, by the lower 32 bits of its id."""
    _, end, running = snapshot.split(":")
    hidden = {int(xid) % (1 << 32) for xid in running.split(",") if xid}
    return lambda xid: (xid - int(end)) % (1 << 32) >= 1 << 31 and xid not in hidden


@contextmanager
def _available(options: SourceOptions) -> Iterator[None]:
    try:
        yield
    except psycopg.errors.InsufficientPrivilege as error:
        raise ConfigError(
            f"{options.target}: {str(error).strip()}", expected="a user with REPLICATION that owns the table",
            do="ALTER ROLE ... REPLICATION; ALTER TABLE ... OWNER TO ...",
        ) from error  # fmt: skip
    except psycopg.Error as error:
        problem = f"{options.target}: {str(error).strip()}"
        raise SourceUnavailableError(problem, do="check the server") from error


def _digest(values: Sequence[Any]) -> str:
    return xxhash.xxh3_64_hexdigest(repr(sorted(values)).encode())

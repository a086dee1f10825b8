"""Changes of a table in MariaDB, from its binary log of whole rows.

The snapshot runs under live writes, in chunks: a transaction WITH CONSISTENT SNAPSHOT has the exact position of the binary
log that it sees (binlog_snapshot_position). A chunk is emitted at that position, so it needs no watermarks.
"""

from __future__ import annotations

import time
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import date, timedelta
from decimal import Decimal
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import pymysql
import xxhash
from pymysqlreplication import BinLogStreamReader
from pymysqlreplication.event import MariadbGtidEvent, QueryEvent, XidEvent
from pymysqlreplication.row_event import DeleteRowsEvent, UpdateRowsEvent, WriteRowsEvent

from whorl.errors import ConfigError
from whorl.loop.capture import tables
from whorl.loop.capture.change import Row, RowChange, Transaction, json_value
from whorl.loop.capture.source import SourceLostError, SourceOptions, SourceUnavailableError
from whorl.loop.capture.tables import HEARTBEAT_BYTES, TableSource

NO_ENCODING = "none"  # a name with which mysql-replication leaves a text as bytes
NO_LOG = 1236  # error: the server does not have the position
SETTINGS = {
    "log_bin": "ON",
    "binlog_format": "ROW",
    "binlog_row_image": "FULL",
    "binlog_row_metadata": "FULL",
}
OPS: dict[type, Literal["c", "u", "d"]] = {WriteRowsEvent: "c", UpdateRowsEvent: "u", DeleteRowsEvent: "d"}
EVENTS = (MariadbGtidEvent, QueryEvent, XidEvent, *OPS)
# Type of a column -> expression whose value is that of the binary log.
EXPRESSIONS = {"float": "CAST({} AS DOUBLE)", "bit": "CAST({} AS UNSIGNED)", "set": "NULLIF({}, '')"}
_COLUMNS = """
SELECT column_name, data_type FROM information_schema.columns
WHERE table_schema = DATABASE() AND table_name = %s AND extra NOT LIKE '%%GENERATED%%' ORDER BY ordinal_position
"""
Place = tuple[str, int]  # file and position


class MariadbSource(TableSource):
    """See the top of this file. Position: place in the binary log; snapshot: its name, and the key that it came to."""

    connector, quote = "mariadb", "`"

    def __init__(self, options: SourceOptions) -> None:
        super().__init__(options)
        url = urlsplit(options.target)
        self.table = self.quoted(options.table)
        self._login: dict[str, Any] = {
            "host": url.hostname or "localhost", "port": url.port or 3306, "user": unquote(url.username or ""),
            "password": unquote(url.password or ""), "database": url.path.strip("/"), "charset": "utf8mb4",
            "autocommit": True,
        }  # fmt: skip
        self._server_id = 1000 + xxhash.xxh32_intdigest(str(options.state.absolute()).encode()) // 2
        self._connection: Any = None
        self._place: Place = ("", 0)
        self._encodings = dict[str, str]()  # of the columns with texts in the binary log
        self._find_table()

    def read(self, position: Mapping[str, Any] | None) -> Iterator[Transaction]:
        if not self._connection.open:
            self._find_table()
        if position is None:
            self._place = self._end()
            self.begin_snapshot()
        else:
            self._place, (self.snapshot, self.after) = tuple(position["place"]), position["snapshot"]
        known = self._place  # in the topic
        while True:
            name, chunk = self.snapshot, self._read_chunk() if self.snapshot else None
            for changes, when, place in self._transactions():
                if chunk is not None and name == self.snapshot and _order(place) > _order(chunk[0]):
                    yield self._emit(*chunk)
                    chunk = None
                self._place = place
                if changes:
                    yield self._transaction(changes, when)
                    known = place
            if chunk is not None and name == self.snapshot:  # else another one has begun
                yield self._emit(*chunk)
                known = self._place
            if not self.snapshot:
                break
        if self._place[0] != known[0] or self._place[1] - known[1] > HEARTBEAT_BYTES:
            yield self._transaction([], time.time())

    def close(self) -> None:
        if self._connection is not None and self._connection.open:
            self._connection.close()

    def _read_chunk(self) -> tuple[Place, dict[str, Row], list[Any]]:
        """Return the place in the log that the snapshot has seen, its next rows, and the key of the last."""
        columns = [EXPRESSIONS.get(type, "{}").format(self.quoted(name)) for name, type in self.types.items()]
        self._rows("START TRANSACTION WITH CONSISTENT SNAPSHOT")
        status = dict(self._rows("SHOW STATUS LIKE 'binlog_snapshot_%'"))
        after = [
            b64decode(value) if self.types[name].endswith("binary") else value
            for name, value in zip(self.key, self.after, strict=bool(self.after))
        ]
        found = self._rows(self.chunk_query(columns), *after)
        self._rows("COMMIT")
        rows = [self._row(dict(zip(self.types, values, strict=True))) for values in found]
        last = [rows[-1][name] for name in self.key] if len(rows) == tables.CHUNK else []
        place = status["Binlog_snapshot_file"], int(status["Binlog_snapshot_position"])
        return place, {self.key_of(row): row for row in rows}, last

    def _emit(self, place: Place, rows: Mapping[str, Row], after: list[Any]) -> Transaction:
        self._place = place
        return self.chunk_transaction(
            {"place": place}, rows, time.time(), f"{place[0]}/{place[1]}/rows", after
        )

    def _transaction(self, changes: list[RowChange], when: float) -> Transaction:
        return self.transaction({"place": self._place}, changes, when, f"{self._place[0]}/{self._place[1]}")

    def _transactions(self) -> Iterator[tuple[list[RowChange], float, Place]]:
        """Yield changes, time and end of each transaction up to the end of the log; no changes: of other tables."""
        if self._place == self._end():
            return
        reader = BinLogStreamReader(
            {**self._login}, self._server_id, resume_stream=True, log_file=self._place[0], log_pos=self._place[1],
            only_events=EVENTS, only_schemas=[self._login["database"]], only_tables=[self.options.table],
            enable_logging=False,
        )  # fmt: skip
        changes, alone = list[RowChange](), False
        try:
            with _available(self.options):
                for event in reader:
                    query = getattr(event, "query", "COMMIT")
                    if isinstance(event, MariadbGtidEvent):
                        changes, alone = [], bool(event.flags & 1)  # a statement without a transaction
                    elif not isinstance(event, XidEvent | QueryEvent):
                        changes += self._changes(event)
                    elif alone or query in ("COMMIT", "ROLLBACK"):
                        if self.options.table in query:  # TRUNCATE, ALTER, ...
                            self._find_table()
                            self.begin_snapshot()
                        yield changes, float(event.timestamp), (reader.log_file, reader.log_pos)
            yield [], 0.0, (reader.log_file, reader.log_pos)
        finally:
            reader.close()

    def _changes(self, event: Any) -> Iterator[RowChange]:
        op = OPS[type(event)]
        for column in event.columns:  # texts stay bytes, since one that is wrong would end the stream
            if (charset := column.character_set_name) not in (None, "binary", NO_ENCODING):
                self._encodings[column.name] = event.charset_to_encoding(charset)
                column.character_set_name = NO_ENCODING
        for values in event.rows:
            old, new = values.get("before_values"), values.get("after_values", values.get("values"))
            old, new = (new, None) if op == "d" else (old, new)
            yield from self.changes_of(
                op, None if old is None else self._row(old), None if new is None else self._row(new)
            )

    def _row(self, values: Mapping[str, Any]) -> Row:
        """Return a row as JSON. A text that does not decode has surrogates, which the log refuses."""
        texts = {
            name: values[name].decode(encoding, "surrogateescape")
            for name, encoding in self._encodings.items()
            if isinstance(values.get(name), bytes)
        }
        found = {**values, **texts}
        return {name: _value(type, found[name]) for name, type in self.types.items() if name in found}

    def _end(self) -> Place:
        return tuple(self._rows("SHOW MASTER STATUS")[0][:2])

    def _find_table(self) -> None:
        if self._connection is None or not self._connection.open:
            with _available(self.options):
                self._connection = pymysql.connect(**self._login, init_command="SET time_zone = '+00:00'")
        if "MariaDB" not in self._rows("SELECT version()")[0][0]:
            expected = "MariaDB; MySQL has no position of a snapshot in its binary log"
            raise ConfigError(f"{self.options.target} is another server", expected=expected)
        for name, expected in SETTINGS.items():
            if (found := dict(self._rows("SHOW VARIABLES LIKE %s", name)).get(name, "none")) != expected:
                do = f"set {name}={expected} in the server's settings, and restart it"
                raise ConfigError(f"{name} of {self.options.target} is {found}", expected=expected, do=do)
        self.types = dict(self._rows(_COLUMNS, self.options.table))
        keys = self._rows(f"SHOW INDEX FROM {self.table} WHERE Key_name = 'PRIMARY'") if self.types else []
        self.key = [row[4] for row in keys]
        self.check_table([name for (name,) in self._rows("SHOW TABLES")])

    def _rows(self, query: str, *arguments: Any) -> list[tuple[Any, ...]]:
        with _available(self.options), self._connection.cursor() as cursor:
            cursor.execute(query, arguments or None)
            return list(cursor.fetchall())


@contextmanager
def _available(options: SourceOptions) -> Iterator[None]:
    try:
        yield
    except (pymysql.MySQLError, OSError) as error:
        if error.args and error.args[0] == NO_LOG:
            expected = "a longer binlog_expire_logs_seconds"
            raise SourceLostError(f"{options.target}: {error.args[1]}", expected=expected) from error
        raise SourceUnavailableError(f"{options.target}: {error}", do="check the server") from error


def _value(type: str, value: Any) -> Any:
    """Return a value as JSON: equal for the binary log and for a query."""
    if type == "set" and value:
        return ",".join(sorted(value.split(",") if isinstance(value, str) else value))
    if type == "bit" and isinstance(value, str):
        return int(value, 2)
    if isinstance(value, Decimal):
        return float(value)
    return str(value) if isinstance(value, date | timedelta) else json_value(value)


def _order(place: Place) -> tuple[int, int]:
    return int(place[0].rpartition(".")[2]), place[1]

"""The common part of the sources of tables in a server: columns and key, and a snapshot that is read in chunks by key."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from whorl.errors import ConfigError, one_of
from whorl.loop.capture.change import Row, RowChange, Transaction, row_key
from whorl.loop.capture.source import ChangeSource, SourceOptions

CHUNK = 1000  # rows of a snapshot that are read at a time
HEARTBEAT_BYTES = 1 << 20  # of the log of the server, with changes of other tables


class TableSource(ChangeSource):
    """See the top of this file.

    Attributes:
        types: column -> type, without generated columns. key: its columns. table: its name in SQL.
        snapshot: the name of the one that is being read, "" if it is complete. after: the key up to which it has come.
    """

    quote = '"'

    def __init__(self, options: SourceOptions) -> None:
        super().__init__(options)
        self.types, self.key, self.table = dict[str, Any](), list[str](), options.table
        self.snapshot, self.after = "", list[Any]()

    def begin_snapshot(self) -> None:
        self.snapshot, self.after = secrets.token_hex(4), []

    def quoted(self, name: str) -> str:
        return self.quote + name.replace(self.quote, 2 * self.quote) + self.quote

    def chunk_query(self, columns: Sequence[str]) -> str:
        """Return SQL of the next rows of the snapshot, for the values of `after`."""
        key = ", ".join(map(self.quoted, self.key))
        where = f"WHERE ({key}) > ({', '.join(['%s'] * len(self.key))}) " if self.after else ""
        return f"SELECT {', '.join(columns)} FROM {self.table} {where}ORDER BY {key} LIMIT {CHUNK}"

    def check_table(self, tables: Sequence[str]) -> None:
        """Raise ConfigError if the table does not exist or has no key."""
        name = self.options.table
        if not self.types:
            raise ConfigError(f"{self.options.target} has no table {name!r}", expected=one_of(name, tables))
        if not self.key:
            do = f"ALTER TABLE {name} ADD PRIMARY KEY (...)"
            raise ConfigError(f"the table {name} has no key", expected="a primary key", do=do)

    def key_of(self, row: Row) -> str:
        return row_key([row[name] for name in self.key])

    def changes_of(self, op: Literal["c", "u", "d"], old: Row | None, new: Row | None) -> list[RowChange]:
        """Return the changes of one row: two, if its key has changed."""
        table, key = self.options.table, self.key_of(new or old or {})
        if op == "u" and old is not None and (former := self.key_of(old)) != key:
            return [RowChange("d", former, old, None, table), RowChange("c", key, None, new, table)]
        return [RowChange(op, key, old, new, table)]

    def transaction(
        self, place: Mapping[str, Any], changes: Sequence[RowChange], when: float, id: str, snapshot: str = "",
        last: bool = False,
    ) -> Transaction:  # fmt: skip
        """Return a transaction. Its id has the time: places begin again in a database that was made again."""
        position = {**place, "snapshot": [self.snapshot, self.after]}
        return Transaction(f"{id}/{when:.6f}", position, changes, when, snapshot, last)

    def chunk_transaction(
        self, place: Mapping[str, Any], rows: Mapping[str, Row], when: float, id: str, after: Sequence[Any]
    ) -> Transaction:
        """Return the transaction of a chunk, the last of the snapshot unless it ends at the key `after`."""
        name, self.after = self.snapshot, list(after)
        self.snapshot = name if after else ""
        changes = [RowChange("r", key, None, row, self.options.table) for key, row in rows.items()]
        return self.transaction(place, changes, when, id, name, not after)

"""A log in one SQLite file, which several processes may share: `sqlite:FILE`.

WAL with `synchronous=FULL`: a record that was acknowledged survives a power failure. One thread of each process commits
(`writer.py`), under SQLite's write lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw

from whorl.errors import ConfigError, DataError
from whorl.log.port import Guarantees, LogUnavailableError, unavailable
from whorl.log.sql import TABLES, SqlLog
from whorl.log.writer import BATCH

BUSY_SECONDS = 60  # wait for another process's transaction


class SqliteLog(SqlLog):
    """See the top of this file. Raises ConfigError: the URL names no file; DataError: the file is no log."""

    guarantees = Guarantees(
        survives="kill -9 and power failure of this machine; not the loss of its disk",
        duplicates="an id that the topic still holds",
    )
    lock, id_in, array = "", "id IN carray(?)", apsw.carray

    def __init__(self, url: str, batch: int = BATCH) -> None:
        self.path = Path(url.removeprefix("sqlite:").removeprefix("//"))
        if not url.removeprefix("sqlite:").strip("/"):
            raise ConfigError(f"the log {url!r} names no file", expected="sqlite:FILE")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(url, batch)
        try:
            self._connection().execute(TABLES.format(rows="WITHOUT ROWID", bytes="BLOB"))
        except apsw.Error as error:
            self.close()
            raise DataError(
                f"{self.path} cannot be opened: {error}", expected="the file of a log, or a new name",
                do="give another file, or free space on the disk",
            ) from error  # fmt: skip

    def _connect(self) -> apsw.Connection:
        connection = apsw.Connection(str(self.path))
        connection.set_busy_timeout(BUSY_SECONDS * 1000)
        for setting in ("journal_mode=WAL", "synchronous=FULL", "wal_autocheckpoint=4000"):
            connection.execute(f"PRAGMA {setting}").fetchall()
        return connection

    @contextmanager
    def _transaction(self) -> Iterator[apsw.Connection]:
        database = self._connection()
        try:
            database.execute("BEGIN IMMEDIATE")
            try:
                yield database
                database.execute("COMMIT")
            finally:
                if database.in_transaction:
                    database.execute("ROLLBACK")
        except apsw.Error as error:
            raise _unavailable(self.url, error) from error

    def _rows(self, statement: str, *arguments: Any) -> list[Any]:
        try:
            return list(self._connection().execute(statement, arguments))
        except apsw.Error as error:
            raise _unavailable(self.url, error) from error


def _unavailable(url: str, error: apsw.Error) -> LogUnavailableError:
    full = isinstance(error, apsw.FullError)
    return unavailable(
        url, "the disk is full" if full else error, "room for the records" if full else "a log"
    )

"""A log in PostgreSQL: `postgresql://USER@HOST/DATABASE`. Its tables are in the schema `whorl_log`.

A transaction holds the rows of `ends` until its commit, so a reader never sees an offset before a smaller one: with a
sequence, a transaction that commits late would insert records behind the readers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg

from whorl.log.port import Guarantees, LogUnavailableError, unavailable
from whorl.log.sql import TABLES, SqlLog
from whorl.log.writer import BATCH

_SETUP = f"""
SELECT pg_advisory_xact_lock(4611686018427387846);
CREATE SCHEMA IF NOT EXISTS whorl_log;
{TABLES.format(rows="", bytes="BYTEA")}
"""


class PostgresLog(SqlLog):
    """See the top of this file. Raises LogUnavailableError: the server does not answer."""

    guarantees = Guarantees(
        survives="kill -9 and power failure of the server, unless its fsync is off; its disk with a replica",
        duplicates="an id that the topic still holds",
    )
    lock, id_in, array = "FOR UPDATE", "id = ANY(?)", list

    def __init__(self, url: str, batch: int = BATCH) -> None:
        super().__init__(url, batch)
        try:
            with self._transaction() as cursor:
                cursor.execute(_SETUP)
        except BaseException:
            self.close()
            raise

    def _connect(self) -> Any:
        try:
            return psycopg.connect(
                self.url, autocommit=True, connect_timeout=10, cursor_factory=_Cursor, application_name="whorl",
                options="-c search_path=whorl_log -c synchronous_commit=on -c client_encoding=UTF8",
                keepalives_idle=10, keepalives_interval=5, keepalives_count=3,
            )  # fmt: skip
        except psycopg.Error as error:
            raise self._unavailable(error) from error

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        self._rows("SELECT 1")  # replaces the connection of a server that was away
        connection = self._connection()
        try:
            cursor = connection.execute("BEGIN")
            yield cursor
            connection.execute("COMMIT")
        except BaseException as error:
            with suppress(psycopg.Error):
                connection.execute("ROLLBACK")
            if isinstance(error, psycopg.Error):
                raise self._unavailable(error) from error
            raise

    def _rows(self, statement: str, *arguments: Any) -> list[Any]:
        for attempt in (1, 2):
            try:
                connection = self._connection()
                return list(connection.execute(statement, arguments).fetchall())
            except psycopg.Error as error:
                if attempt == 2 or not connection.broken:
                    raise self._unavailable(error) from error
                self._local.connection = None
        raise AssertionError

    def _unavailable(self, error: Exception) -> LogUnavailableError:
        return unavailable(self.url, str(error).strip(), "a PostgreSQL server that takes writes")


class _Cursor(psycopg.Cursor[Any]):
    """Takes `?` for arguments, as SQLite does."""

    def execute(self, query: Any, params: Any = None, **options: Any) -> Any:
        return super().execute(query.replace("?", "%s"), params, **options)

    def executemany(self, query: Any, params_seq: Any, **options: Any) -> None:
        super().executemany(query.replace("?", "%s"), params_seq, **options)

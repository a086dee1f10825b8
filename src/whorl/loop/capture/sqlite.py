"""Changes of a table of SQLite, from the write-ahead log of its file. The writer needs no change.

An open read transaction keeps the log from being reset before its frames are read (as Litestream does). The frames of each
transaction are laid over a copy of the database (`sqlite_shadow.py`), the rows of changed pages are named
(`sqlite_format.py`), and compared before and after. If the log was reset while no capture ran, the whole file is compared
with the copy, as one transaction: it has every deletion, but not the order of the commits.

A new read transaction begins before the old one ends, so the log is kept without a gap. It has lock 0, which permits a
reset, only if the database has all frames; then they were read, as checkpoints stop at the old one. No checkpoint passes
lock 0, so a second reset has to wait.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import apsw

from whorl.errors import ConfigError
from whorl.loop.capture.change import RowChange, Transaction
from whorl.loop.capture.source import ChangeSource, SourceLostError, SourceOptions, SourceUnavailableError
from whorl.loop.capture.sqlite_format import START, PageCommit, WalChangedError, WriteAheadLog, changed_rowids
from whorl.loop.capture.sqlite_shadow import STATE, ShadowCopy, TableState, json_row, row_changes

BATCH_BYTES = 32 << 20  # of pages that are kept in memory, more if one transaction has more
CHECKPOINT_BYTES = 4 << 20  # of the log: it is moved into the database
LOCK_BYTES = 64 << 20  # with writers locked out
SNAPSHOT_ROWS = 2000  # of one transaction


class SqliteSource(ChangeSource):
    """See the top of this file. Raises ConfigError: rollback-journal mode, no such table, a table without a key."""

    connector = "sqlite"

    def __init__(self, options: SourceOptions) -> None:
        super().__init__(options)
        self.path, self._file, self._held, self._is_read = Path(options.target).expanduser(), -1, False, False
        self._shadow: ShadowCopy | None = None
        self._last: Mapping[str, Any] | None = None  # position of the newest change
        self._acknowledged: Mapping[str, Any] | None = None
        with self._errors():
            self._connect()

    def _connect(self) -> None:
        self._file = os.open(self.path, os.O_RDONLY)  # closed last: that drops all locks of the process on it
        head = os.pread(self._file, 100, 0)
        if head[18:20] != b"\2\2":
            raise ConfigError(
                f"{self.path} is in rollback-journal mode, which keeps no log", expected="write-ahead log",
                do=f'sqlite3 {self.path} "PRAGMA journal_mode=WAL", once: the file keeps the mode',
            )  # fmt: skip
        self.page_size = int.from_bytes(head[16:18], "big") % 65535 or 65536
        self.usable = self.page_size - head[20]
        flags = apsw.SQLITE_OPEN_READWRITE
        self._readers = [apsw.Connection(str(self.path), flags) for _ in range(3)]
        for reader in self._readers:
            reader.set_busy_timeout(5000)
        TableState(self._readers[0], self.options.table, needed=True)
        self._wal, self._held = WriteAheadLog(self.path, self.page_size), False

    def read(self, position: Mapping[str, Any] | None) -> Iterator[Transaction]:
        with self._errors():
            if self._file < 0 or self.path.stat().st_ino != os.fstat(self._file).st_ino:  # another file
                self._disconnect()
                self._connect()
            shadow = self._copy(position)
            if position is None or "row" in position:
                yield from self._snapshot(shadow, position)
                return
            self._last, self._is_read = None, False
            for commit in shadow.pending or self._next(shadow):
                shadow.after.advance(commit)
                changes = self._changes(shadow, commit)
                shadow.before.advance(commit)
                if changes:
                    self._last = commit.position.json()
                    yield Transaction(commit.id, self._last, changes, commit.time)
            self._is_read = True
            self.acknowledge(self._acknowledged if self._last else None)

    def acknowledge(self, position: Mapping[str, Any] | None) -> None:
        self._acknowledged, shadow = position, self._shadow
        if self._is_read and shadow is not None and shadow.pending and position == self._last:
            shadow.apply(position or shadow.logged)

    def retained(self) -> int:
        return self._wal.end()[0].frame * self._wal.width if self._file >= 0 else 0

    def release(self) -> None:
        for reader in self._readers:
            _end(reader)
        self._held = False

    def close(self) -> None:
        self._disconnect()
        if self._shadow is not None:
            self._shadow.close()
            self._shadow = None

    def _disconnect(self) -> None:
        if self._file >= 0:
            for reader in self._readers:
                reader.close()
            self._wal.close()
            os.close(self._file)
            self._file = -1

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (apsw.Error, OSError) as error:
            raise SourceUnavailableError(f"{self.path}: {error}", expected="a SQLite database") from error

    def _copy(self, position: Mapping[str, Any] | None) -> ShadowCopy:
        """Return the copy with nothing laid over it; make it first if needed."""
        folder = self.options.state
        is_new = position is None and self._shadow is None  # the topic is empty
        if is_new or not (folder / STATE).exists():
            if position is not None:
                raise SourceLostError(f"{folder} lacks the copy of {self.path} that the topic was made of")
            ShadowCopy.create(folder, self._file, self.page_size, self._now())
        if self._shadow is None:
            self._shadow = ShadowCopy(folder, self.page_size)
        shadow = self._shadow
        places = [shadow.position, *(commit.position for commit in shadow.pending)]
        if position is None:
            shadow.pending = []
        elif {"wal": position.get("wal")} not in (shadow.logged, *(place.json() for place in places)):
            raise SourceLostError(f"{folder} has no copy of {self.path} at the position of the topic")
        shadow.reset()
        return shadow

    def _now(self) -> PageCommit:
        """Hold the log from now on; return the state of the database: pages that are newer in the log."""
        self.release()
        while not self._held:
            _end(self._readers[0])
            end, size = self._wal.end()
            _begin(self._readers[0])
            self._held = self._wal.end() == (end, size)
        if not end.frame:  # the log has no size yet
            size = os.fstat(self._file).st_size // self.page_size
        pages = dict[int, bytes]()
        try:
            for commit in self._wal.commits(START, end):
                pages |= commit.pages
        except WalChangedError:  # reset since, which needs all of them in the database
            pages = {}
        return PageCommit(f"{end.salt}-{end.frame}-compared", end, size, self.page_size, pages)

    def _next(self, shadow: ShadowCopy) -> Sequence[PageCommit]:
        """Return the next transactions, which are durable from now on."""
        if not self._held:
            state = self._now()
            if not self._wal.continues(shadow.position):
                return self._compare(shadow, state)
        batch, size = list[PageCommit](), 0
        try:
            end, _ = self._wal.end()
            unread = (end.frame - shadow.position.frame) * self._wal.width
            if self.retained() > LOCK_BYTES and unread < CHECKPOINT_BYTES:  # other writers wait a moment
                with suppress(apsw.BusyError):
                    self._readers[2].execute("BEGIN IMMEDIATE")
                end, _ = self._wal.end()
            for commit in self._wal.commits(shadow.position, end):
                batch.append(commit)
                if (size := size + len(commit.pages) * self.page_size) >= BATCH_BYTES:
                    break
            if batch:
                shadow.expect(batch)
            if not batch or batch[-1].position.frame == end.frame:
                self._move_hold()
                if end.frame * self._wal.width > CHECKPOINT_BYTES:
                    with suppress(apsw.BusyError):
                        self._readers[1].execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
                    if self._wal.end()[0] == end:
                        self._move_hold()
            return batch
        except WalChangedError:
            return self._compare(shadow, self._now())
        finally:
            _end(self._readers[2])

    def _move_hold(self) -> None:
        """Hold the log from now on only: all that the old transaction held was read."""
        _begin(self._readers[1])
        _end(self._readers[0])
        self._readers[:2] = self._readers[1::-1]

    def _compare(self, shadow: ShadowCopy, state: PageCommit) -> Sequence[PageCommit]:
        """Return one transaction from the copy to the database as it is now."""
        pages, step = dict[int, bytes](), self.page_size
        for number in range(1, state.size + 1):
            at = (number - 1) * step
            page = state.pages.get(number) or os.pread(self._file, step, at)
            if page != os.pread(shadow.before.file, step, at):
                pages[number] = page
        return shadow.expect([replace(state, pages=pages)])

    def _snapshot(self, shadow: ShadowCopy, position: Mapping[str, Any] | None) -> Iterator[Transaction]:
        """Yield the rows of the copy."""
        place, done, last = shadow.position.json(), int((position or {}).get("row", 0)), False
        shadow.logged, when = place, self.options.state.stat().st_mtime
        name = f"{shadow.position.salt}-{shadow.position.frame}-snapshot"
        table = TableState(shadow.connections[0], self.options.table, needed=True)
        while not last:
            some = [row for _, row in table.rows(tail=f"LIMIT {SNAPSHOT_ROWS} OFFSET {done}")]
            last, done = len(some) < SNAPSHOT_ROWS, done + len(some)
            changes = [RowChange("r", table.key_of(row), None, json_row(row), table.name) for row in some]
            at = place if last else {**place, "row": done}
            yield Transaction(f"{name}/{done}", at, changes, when, name, last)

    def _changes(self, shadow: ShadowCopy, commit: PageCommit) -> list[RowChange]:
        """Return the changes of the table between the states before and after."""
        before, after = (TableState(each, self.options.table) for each in shadow.connections)
        ids: Sequence[int] | None = None  # all rows
        if before.schema == after.schema is not None and before.rowid:
            pages = shadow.before.page, shadow.after.page
            ids = sorted(changed_rowids(commit.pages, *pages, self.usable, before.overflow_cells))
        elif all(table.schema is None or table.rowid for table in (before, after)):
            ids = sorted({*before.rowids(), *after.rowids()})
        return row_changes(before, after, ids, self.options.table)


def _begin(connection: apsw.Connection) -> None:
    connection.execute("BEGIN")
    connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()


def _end(connection: apsw.Connection) -> None:
    if connection.in_transaction:
        connection.execute("ROLLBACK")

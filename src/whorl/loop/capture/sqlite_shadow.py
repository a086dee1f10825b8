"""A copy of a database at a position of its log, and the transactions behind it, as two states that SQL can query.

`before` and `after` are read-only files of SQLite in a VFS: the copy, overlaid by pages of transactions in memory. These are
durable (`pending`) before their events leave. Once the log has the events, the new position is stored, then the pages are
written; a crash in between is seen by equal positions, and they are written again.
"""

from __future__ import annotations

import os
import pickle
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import apsw

from whorl.errors import ConfigError, one_of
from whorl.files import fsync_path, write_atomic
from whorl.loop.capture.change import Row, RowChange, json_value, row_key
from whorl.loop.capture.sqlite_format import PageCommit

QUERY_ROWS = 10_000
STATE, PENDING, PAGES = "position", "pending", "shadow.db"  # files
_TABLES = "SELECT name, rootpage, sql FROM sqlite_schema WHERE type = 'table' AND rootpage > 0"
_COLUMNS = "SELECT pk, name FROM pragma_table_info(?) ORDER BY pk"
_LOOSE = "SELECT path FROM dbstat WHERE name = ? AND pagetype = 'overflow' AND pageno IN carray(?)"
_PAGE = "SELECT pageno FROM dbstat WHERE name = ? AND path = ?"


class PageView:
    """A state of the database, and a file of apsw's VFS. Pages are counted from 1."""

    def __init__(self, file: int, page_size: int) -> None:
        self.file, self.page_size, self.version = file, page_size, 0
        self.reset()

    def reset(self) -> None:
        """Be the state of the copy."""
        self.pages = dict[int, bytes]()
        self.size, self.version = os.fstat(self.file).st_size // self.page_size, self.version + 1

    def advance(self, commit: PageCommit) -> None:
        self.pages |= commit.pages
        self.size, self.version = commit.size, self.version + 1

    def page(self, number: int) -> bytes:
        """Return a page; b"" behind the end."""
        if not 1 <= number <= self.size:
            return b""
        found = self.pages.get(number) or os.pread(self.file, self.page_size, (number - 1) * self.page_size)
        if number == 1:  # in rollback-journal mode; the version invalidates SQLite's cache
            return found[:18] + b"\1\1" + found[20:24] + self.version.to_bytes(4, "big") + found[28:]
        return found

    def xRead(self, amount: int, offset: int) -> bytes:
        start = offset % self.page_size
        return self.page(offset // self.page_size + 1)[start : start + amount]

    def xFileSize(self) -> int:
        return self.size * self.page_size

    def _nothing(self, *arguments: Any) -> bool:
        return False

    xLock = xUnlock = xCheckReservedLock = xClose = xFileControl = xSectorSize = xDeviceCharacteristics = (
        _nothing
    )


class _ViewFiles(apsw.VFS):
    def __init__(self, name: str, views: Mapping[str, PageView]) -> None:
        super().__init__(name, base="")
        self.views = views

    def xOpen(self, name: Any, flags: list[int]) -> Any:
        flags[1] = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_MAIN_DB
        return self.views[name.filename()]

    def xAccess(self, pathname: str, flags: int) -> bool:
        return False

    def xFullPathname(self, name: str) -> str:
        return name


class ShadowCopy:
    """See the top of this file.

    Attributes:
        position: of the copy. logged: where the log's newest change is, as JSON. before, after: states.
        connections: to them.
    """

    def __init__(self, folder: Path, page_size: int) -> None:
        self.folder, self.pending = folder, list[PageCommit]()
        self.position, self.logged = pickle.loads((folder / STATE).read_bytes())
        if (folder / PENDING).exists():
            self.pending = pickle.loads((folder / PENDING).read_bytes())
            if self.pending[-1].position == self.position:
                self._write_pending()
        self._file = os.open(folder / PAGES, os.O_RDONLY)
        self.before, self.after = PageView(self._file, page_size), PageView(self._file, page_size)
        views, name = {"before": self.before, "after": self.after}, f"whorl-{id(self)}"
        self._vfs = _ViewFiles(name, views)
        self.connections = [apsw.Connection(view, apsw.SQLITE_OPEN_READONLY, name) for view in views]

    @staticmethod
    def create(folder: Path, database: int, page_size: int, state: PageCommit) -> None:
        """Copy an open database file, of which some pages are newer in its log."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PENDING).unlink(missing_ok=True)
        with (folder / PAGES).open("wb") as file:
            for at in range(0, state.size * page_size, 1 << 20):
                file.write(os.pread(database, 1 << 20, at))
        _write_pages(folder, [state])
        write_atomic(folder / STATE, pickle.dumps((state.position, state.position.json())))

    def expect(self, commits: Sequence[PageCommit]) -> Sequence[PageCommit]:
        """Keep transactions that follow the copy until `apply`, and return them."""
        self.pending = [*commits]
        write_atomic(self.folder / PENDING, pickle.dumps(self.pending))
        return commits

    def apply(self, logged: Any) -> None:
        """Write the pending transactions into the copy. logged: position of the newest one with changes."""
        self.logged, self.position = logged, self.pending[-1].position
        fsync_path(self.folder)
        write_atomic(self.folder / STATE, pickle.dumps((self.position, logged)))
        fsync_path(self.folder)
        self._write_pending()
        self.reset()

    def reset(self) -> None:
        """Lay nothing over the copy."""
        self.before.reset()
        self.after.reset()

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        self._vfs.unregister()
        os.close(self._file)

    def _write_pending(self) -> None:
        _write_pages(self.folder, self.pending)
        (self.folder / PENDING).unlink()
        self.pending = []


class TableState:
    """A table in one state. schema: root page and statement, None without the table. rowid: a name of it, or "".

    Raises:
        ConfigError: the table has no key; with `needed`, it does not exist.
    """

    def __init__(self, connection: apsw.Connection, name: str, needed: bool = False) -> None:
        self.connection, self.schema = connection, None
        tables = {found.lower(): (found, root, sql) for found, root, sql in connection.execute(_TABLES)}
        if name.lower() not in tables:
            if needed:
                raise ConfigError(f"there is no table {name!r}", expected=one_of(name, [*tables]))
            return
        self.name, *self.schema = tables[name.lower()]
        columns: list[Any] = connection.execute(_COLUMNS, (name,)).fetchall()
        self.columns, self.key = [c for _, c in columns], [c for pk, c in columns if pk]
        if not self.key:
            raise ConfigError(
                f"the table {name!r} has no key", expected="a PRIMARY KEY: a row needs an identity",
                do="copy it into a table with one",
            )  # fmt: skip
        used = {column.lower() for column in self.columns}
        self.rowid = next(each for each in ("rowid", "_rowid_", "oid", "") if each not in used)
        if connection.execute("SELECT wr FROM pragma_table_list(?)", (name,)).fetchall()[0][0]:
            self.rowid = ""

    def rows(self, ids: Iterable[int] | None = None, tail: str = "") -> list[tuple[Any, dict[str, Any]]]:
        """Return (identity within the state, row); of all rows without `ids`, in the order of the file.

        Text that is no UTF-8 has surrogates for the wrong bytes.
        """
        if self.schema is None:
            return []
        where = "" if ids is None else f"WHERE {self.rowid} IN carray(?)"
        names = [_quoted(column) for column in self.columns]
        try:
            found = self._select(names, f"{where} {tail}", ids)
        except UnicodeDecodeError:
            names = [f"CASE typeof({c}) WHEN 'text' THEN hex(CAST({c} AS BLOB)) ELSE {c} END" for c in names]
            found = [
                (rowid, [_unhex(v) for v in values])
                for rowid, values in self._select(names, f"{where} {tail}", ids)
            ]
        rows = [(rowid, dict(zip(self.columns, values, strict=True))) for rowid, values in found]
        return rows if self.rowid else [(self.key_of(row), row) for _, row in rows]

    def _select(
        self, names: Sequence[str], tail: str, ids: Iterable[int] | None
    ) -> list[tuple[int, list[Any]]]:
        query = f"SELECT {self.rowid or 0}, {', '.join(names)} FROM {_quoted(self.name)} {tail}"
        cursor = self.connection.execute(query, () if ids is None else (_array(ids),))
        return [(rowid, values) for rowid, *values in cursor]

    def rowids(self) -> list[int]:
        return [] if self.schema is None else [rowid for rowid, _ in self._select(["0"], "", None)]

    def key_of(self, row: Row) -> str:
        return row_key([row[column] for column in self.key])

    def overflow_cells(self, pages: set[int]) -> Iterator[tuple[int, int]]:
        """Yield leaf and number of the cell that own overflow pages of the table."""
        for (path,) in self.connection.execute(_LOOSE, (self.name, _array(pages))):
            leaf, _, cell = str(path).partition("+")[0].rpartition("/")
            for (number,) in self.connection.execute(_PAGE, (self.name, f"{leaf}/")):
                yield number, int(cell, 16)


def row_changes(
    before: TableState, after: TableState, ids: Sequence[int] | None, table: str
) -> list[RowChange]:
    """Return the changes of the rows `ids`, or of all: deletions first. A changed key is a deletion and an insertion."""
    gone, come = dict[str, Row](), dict[str, Row]()
    for start in (0,) if ids is None else range(0, len(ids), QUERY_ROWS):
        some = None if ids is None else ids[start : start + QUERY_ROWS]
        old, new = dict(before.rows(some)), dict(after.rows(some))
        for id in {**old, **new}:
            was, now = old.get(id), new.get(id)
            if was is None or now is None or not _same(was, now):
                gone |= {} if was is None else {before.key_of(was): was}
                come |= {} if now is None else {after.key_of(now): now}
    changes = [
        RowChange("d", key, json_row(row), None, table) for key, row in gone.items() if key not in come
    ]
    for key, row in come.items():
        if (was := gone.get(key)) is None:
            changes.append(RowChange("c", key, None, json_row(row), table))
        elif not _same(was, row):
            changes.append(RowChange("u", key, json_row(was), json_row(row), table))
    return changes


def json_row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: json_value(value) for name, value in row.items()}


def _same(old: Row, new: Row) -> bool:
    """Return whether values and types are equal; an added column is None before."""
    return all(type(a := old.get(n)) is type(b := new.get(n)) and a == b for n in {**old, **new})


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _unhex(value: Any) -> Any:
    return bytes.fromhex(value).decode(errors="surrogateescape") if isinstance(value, str) else value


def _array(ids: Iterable[int]) -> Any:
    return apsw.carray(array("q", ids)) if ids else apsw.carray(array("q", [0]), stop=0)


def _write_pages(folder: Path, commits: Sequence[PageCommit]) -> None:
    with (folder / PAGES).open("r+b") as file:
        for commit in commits:
            for number, page in commit.pages.items():
                file.seek((number - 1) * len(page))
                file.write(page)
            file.truncate(commit.size * commit.page_size)
        file.flush()
        os.fsync(file.fileno())

"""Random changes of a SQLite table, and the changesets of its session extension."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import apsw

from whorl.log import Log
from whorl.loop.capture.capture import Capture
from whorl.loop.capture.change import json_value, row_key
from whorl.loop.capture.source import ChangeSource, SourceOptions, open_source

IDS = 400
KEYS = {
    "integer": ("id INTEGER PRIMARY KEY", "", ""), "text": ("id TEXT PRIMARY KEY", "", ""),
    "two columns": ("id INT, part TEXT", ", PRIMARY KEY (part, id)", ""),
    "without rowid": ("id TEXT PRIMARY KEY", "", " WITHOUT ROWID"),
}  # fmt: skip
Changeset = dict[str, tuple[str, dict[str, Any] | None, dict[str, Any] | None]]


class ChangingTable:
    """A table `docs` with one kind of key, a table `archive`, and their writer."""

    def __init__(self, path: Path, kind: str, seed: int, page_size: int = 1024) -> None:
        self.random, self.path, (columns, key, tail) = random.Random(seed), path, KEYS[kind]
        self.writer, self.kind = apsw.Connection(str(path)), kind
        self.writer.execute(
            f"PRAGMA page_size={page_size}; PRAGMA journal_mode=WAL; PRAGMA wal_autocheckpoint=50"
        )
        for name in ("docs", "archive"):
            self.writer.execute(f"CREATE TABLE {name}({columns}, name TEXT, body, n REAL{key}){tail}")
        self.writer.execute("CREATE INDEX by_name ON docs(name)")
        self.columns = ["id", *(["part"] if key else []), "name", "body", "n"]
        self.key = ["part", "id"] if key else ["id"]

    def id(self, number: int) -> Any:
        return f"k{number}" if "TEXT PRIMARY" in KEYS[self.kind][0] else number

    def row(self, number: int) -> list[Any]:
        size = self.random.choice((3, 50, 300, 3000, 20_000))
        body = self.random.choice((None, "x" * size, os.urandom(8) * (size // 8), number, 1.5, "ä" * size))
        head = [self.id(number), *(["p"] if "part" in self.columns else [])]
        return [*head, self.random.choice("abc") * self.random.randrange(5), body, self.random.random()]

    def fill(self, n: int) -> None:
        self.writer.execute("BEGIN")
        for number in range(n):
            self.put("INSERT INTO docs", number)
        self.writer.execute("COMMIT")

    def put(self, statement: str, number: int) -> None:
        row = self.row(number)
        marks = ", ".join("?" * len(row))
        self.writer.execute(f"{statement} ({', '.join(self.columns)}) VALUES ({marks})", row)

    def transaction(self) -> Changeset:
        """Commit random changes; return key -> (operation, row before, row after)."""
        write, before = self.writer.execute, self.rows()
        session = apsw.Session(self.writer, "main")
        session.attach("docs")
        write("BEGIN")
        for _ in range(self.random.choice((1, 2, 5, 60, 300))):
            number, kind = self.random.randrange(IDS), self.random.random()
            id, other = self.id(number), self.id(self.random.randrange(IDS))
            if kind < 0.4:
                self.put("INSERT OR REPLACE INTO docs", number)
            elif kind < 0.55:
                write("DELETE FROM docs WHERE id = ?", (id,))
            elif kind < 0.65:
                write("UPDATE OR IGNORE docs SET id = ? WHERE id = ?", (other, id))
            elif kind < 0.75:
                write(
                    "UPDATE docs SET body = 'y' || substr(body, 2) WHERE id = ? AND typeof(body) = 'text'",
                    (id,),
                )
            elif kind < 0.85:  # in place, in an overflow page
                query = "UPDATE docs SET body = substr(body, 1, length(body) - 1) || ? WHERE id = ?"
                write(
                    f"{query} AND typeof(body) = 'text' AND length(body) > 9", (self.random.choice("qrs"), id)
                )
            elif kind < 0.9:
                self.put("INSERT OR REPLACE INTO archive", number)
            elif kind < 0.92:
                write("DELETE FROM docs WHERE id BETWEEN ? AND ?", (id, self.id(number + 100)))
        if self.random.random() < 0.04:  # the rows move, with equal cells
            write("DELETE FROM archive; INSERT INTO archive SELECT * FROM docs; DELETE FROM docs")
            if self.random.random() < 0.5:
                write("INSERT INTO docs SELECT * FROM archive WHERE n < 0.5")
        changes = _changeset(session.changeset())
        session.close()
        write("COMMIT")
        after = self.rows()
        return {key: (op, before.get(key), after.get(key)) for key, op in changes.items()}

    def rows(self) -> dict[str, dict[str, Any]]:
        """Return key -> row as JSON."""
        rows = list(self.writer.execute(f"SELECT {', '.join(self.columns)} FROM docs"))
        found = [dict(zip(self.columns, values, strict=True)) for values in rows]
        return {
            row_key([row[c] for c in self.key]): {name: json_value(value) for name, value in row.items()}
            for row in found
        }


def _changeset(content: bytes) -> dict[str, str]:
    names = {apsw.SQLITE_INSERT: "c", apsw.SQLITE_DELETE: "d", apsw.SQLITE_UPDATE: "u"}
    found = {}
    for change in apsw.Changeset.iter(content):
        row: Any = change.new if change.opcode == apsw.SQLITE_INSERT else change.old
        columns = sorted(change.pk_columns, reverse=len(change.pk_columns) > 1)  # of "part", "id"
        found[row_key([row[at] for at in columns])] = names[change.opcode]
    return found


def sqlite_source(path: Path, table: str = "docs") -> ChangeSource:
    return open_source(SourceOptions(str(path), table, "docs", path.parent / "state"))


def drain(source: ChangeSource, log: Log, points: int = -1) -> bool:
    """Capture until nothing is new, or for so many steps; return whether nothing is new."""
    for number, point in enumerate(Capture(source, log, "docs").steps()):
        assert point != "waiting"
        if point == "idle" or number == points:
            return point == "idle"
    raise AssertionError


def changesets(log: Log, first: int = 0) -> dict[str, Changeset]:
    """Return transaction -> changes, in the order of the log."""
    found = dict[str, Changeset]()
    for record in log.replay("docs"):
        data: Any = record.event().data
        if record.offset >= first and "op" in data:
            change = data["op"], data["before"], data["after"]
            found.setdefault(data["transaction"]["id"], {})[record.key] = change
    return found


def folded(log: Log) -> dict[str, Any]:
    """Return key -> row, folded from the log; each previous row must be the one before."""
    found = dict[str, Any]()
    for changes in changesets(log).values():
        for key, (op, before, after) in changes.items():
            assert before is None or _known(before) == _known(found[key]), key
            assert op in "dr" or (op == "u") == (key in found), key
            if op == "d":
                del found[key]
            else:
                found[key] = after
    return found


def _known(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}

"""Sources that change while they are captured: a table in SQLite, PostgreSQL or MariaDB, and a folder, each with its kill.

A workload commits transactions of inserts, updates, deletions and changed keys, some values above 8 kB, and adds a column.
The rows at its end are read by its queries, not by the capture.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.log.servers import Server, running

from whorl.corpus.documents import document_id

Row = dict[str, Any]
LONG = 9000  # bytes of a value out of line


class Workload(ABC):
    """A source that changes. target, options: arguments of `whorl watch`. server: that may be killed, or None."""

    target: str
    options: Sequence[str] = ()
    server: Server | None = None
    text, title = "text", "title"

    @abstractmethod
    def commit(self, draw: random.Random, size: int) -> int:
        """Commit a transaction of about `size` changes of rows, and return how many. Raises anything if the server died."""

    @abstractmethod
    def add_column(self) -> None: ...

    @abstractmethod
    def rows(self) -> dict[str, Row]:
        """Return key -> row."""


class TableWorkload(Workload):
    """A table `docs`. A driver gives `connect`, `run` and `run_many`."""

    text, title, options = "body", "title", ("--table", "docs", "--text", "body", "--title", "title")
    create = "CREATE TABLE IF NOT EXISTS docs (id {int} PRIMARY KEY, title {text}, body {text}, price {float}, number {int})"
    types: ClassVar = {"int": "bigint", "text": "text", "float": "double precision"}

    def __init__(self, url: str, server: Server | None = None) -> None:
        self.target, self.server = url, server
        self.connect()
        self.run(self.create.format(**self.types))
        self.ids = [id for (id,) in self.run("SELECT id FROM docs")]
        self.next, self.column = max([0, *self.ids]) + 1, ""
        with suppress(Exception):
            self.run("SELECT extra FROM docs LIMIT 1")
            self.column = "extra"

    @abstractmethod
    def connect(self) -> None: ...

    @abstractmethod
    def run(self, query: str, *values: Any) -> list[tuple[Any, ...]]: ...

    @abstractmethod
    def run_many(self, query: str, rows: Sequence[tuple[Any, ...]]) -> None: ...

    def commit(self, draw: random.Random, size: int) -> int:
        draw.shuffle(self.ids)
        ids = self.ids[: size // 2]
        first, second, third = (len(ids) * share // 10 for share in (6, 8, 10))
        updated, deleted, moved = ids[:first], ids[first:second], ids[second:third]
        new = range(self.next, self.next + size - len(ids))
        keys = range(new.stop, new.stop + len(moved))
        self.run("BEGIN")
        inserted = [(id, f"title {id}", text(draw), draw.random(), draw.randrange(1000)) for id in new]
        self.run_many(
            "INSERT INTO docs (id, title, body, price, number) VALUES (%s, %s, %s, %s, %s)", inserted
        )
        both = [(f"changed {draw.random()}", id) for id in updated]
        self.run_many(f"UPDATE docs SET {self.column or 'title'} = %s WHERE id = %s", both[::2])
        self.run_many("UPDATE docs SET body = %s WHERE id = %s", [(text(draw), id) for _, id in both[1::2]])
        self.run_many("DELETE FROM docs WHERE id = %s", [(id,) for id in deleted])
        self.run_many("UPDATE docs SET id = %s WHERE id = %s", list(zip(keys, moved, strict=True)))
        self.run("COMMIT")
        self.next = keys.stop
        self.ids = [*self.ids[third:], *updated, *new, *keys]
        return size

    def add_column(self) -> None:
        if not self.column:
            self.run("ALTER TABLE docs ADD COLUMN extra varchar(100) DEFAULT 'none'")
        self.column = "extra"

    def rows(self) -> dict[str, Row]:
        names = ["id", "title", "body", "price", "number", *([self.column] if self.column else [])]
        return {
            str(row[0]): dict(zip(names, row, strict=True))
            for row in self.run(f"SELECT {', '.join(names)} FROM docs")
        }


class PostgresWorkload(TableWorkload):
    def connect(self) -> None:
        import psycopg

        self.connection = psycopg.connect(self.target, autocommit=True)

    def run(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        cursor = self.connection.execute(query, values or None)
        return cursor.fetchall() if cursor.description else []

    def run_many(self, query: str, rows: Sequence[tuple[Any, ...]]) -> None:
        with self.connection.cursor() as cursor:
            cursor.executemany(query, rows)


class MariadbWorkload(TableWorkload):
    types: ClassVar = {"int": "bigint", "text": "longtext", "float": "double"}

    def connect(self) -> None:
        import pymysql

        url = urlsplit(self.target)
        login = {"host": url.hostname, "port": url.port, "user": url.username, "autocommit": True}
        self.connection: Any = pymysql.connect(**login, charset="utf8mb4")
        self.run("CREATE DATABASE IF NOT EXISTS shop CHARACTER SET utf8mb4")
        self.run("USE shop")

    def run(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self.connection.cursor() as cursor:
            cursor.execute(query, values or None)
            return list(cursor.fetchall())

    def run_many(self, query: str, rows: Sequence[tuple[Any, ...]]) -> None:
        with self.connection.cursor() as cursor:
            cursor.executemany(query, rows)


class SqliteWorkload(TableWorkload):
    def connect(self) -> None:
        import apsw

        self.connection = apsw.Connection(self.target)
        self.connection.set_busy_timeout(60_000)
        self.run("PRAGMA journal_mode=WAL")

    def run(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        return list(self.connection.execute(query.replace("%s", "?"), values))

    def run_many(self, query: str, rows: Sequence[tuple[Any, ...]]) -> None:
        self.connection.executemany(query.replace("%s", "?"), rows)


class FolderWorkload(Workload):
    """JSONL files of up to 50 documents, rewritten, renamed and deleted. An added column is a field of the records."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.target, self.field = folder, str(folder), "title"
        folder.mkdir(exist_ok=True)
        self.next = max([0, *(int(path.stem) + 1 for path in folder.glob("*.jsonl"))])

    def commit(self, draw: random.Random, size: int) -> int:
        files, changed = sorted(self.folder.glob("*.jsonl")), 0
        while changed < size:
            kind, path = draw.random(), draw.choice(files) if files else None
            if kind < 0.4 or path is None:
                path = self.folder / f"{self.next}.jsonl"
                self.next += 1
            elif kind < 0.6:
                changed += len(path.read_text().splitlines())
                if kind < 0.5:
                    path.rename(self.folder / f"{self.next}.jsonl")
                    self.next += 1
                else:
                    path.unlink()
                files.remove(path)
                continue
            records = [
                {"text": text(draw), self.field: f"{draw.random()}"} for _ in range(draw.randrange(1, 51))
            ]
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
            changed += len(records)
        return changed

    def add_column(self) -> None:
        self.field = "url"

    def rows(self) -> dict[str, Row]:
        found = dict[str, Row]()
        for path in sorted(self.folder.glob("*.jsonl")):
            content, offset = path.read_bytes(), 0
            for line in content.splitlines(keepends=True):
                id = document_id(self.target, path.name, offset)
                found[id] = {"title": path.stem, "path": path.name, **json.loads(line)}
                offset += len(line)
        return found


def reopened(source: str, target: str) -> Workload:
    """Return the workload of a source that exists, in another process."""
    if source == "folder":
        return FolderWorkload(Path(target))
    return {"sqlite": SqliteWorkload, "postgresql": PostgresWorkload, "mariadb": MariadbWorkload}[source](
        target
    )


def text(draw: random.Random) -> str:
    """Return a text of some words, one in fifty above 8 kB."""
    words = " ".join(draw.choice(("spindle", "whorl", "flax", "loom", "thread")) for _ in range(8))
    return words if draw.random() > 0.02 else f"{words} {draw.randbytes(LONG // 2).hex()}"


def stop(server: Server) -> None:
    """End a server cleanly."""
    assert server.process is not None
    while server.process.poll() is None:  # a server that has just started may miss a signal
        server.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.process.wait(1)


@contextmanager
def workload(source: str, folder: Path) -> Iterator[Workload]:
    """Yield a workload of SQLite, PostgreSQL, MariaDB or a folder, with its server."""
    if source in ("sqlite", "folder"):
        kind = {"sqlite": SqliteWorkload, "folder": FolderWorkload}[source]
        yield kind(str(folder / "app.db") if source == "sqlite" else folder / "notes")  # type: ignore[arg-type]
        return
    options = {"settings": ["wal_level=logical"]} if source == "postgresql" else {}
    with running(source, **options) as server:
        if source == "mariadb":  # its first data file is whole after a clean end
            stop(server)
            server.start()
        found = (PostgresWorkload if source == "postgresql" else MariadbWorkload)(server.url, server)
        try:
            yield found
        finally:
            with suppress(Exception):
                found.connection.close()

"""The catalogue: which files were read into which corpus, in SQLite or PostgreSQL.

    blobs   hash, size, media_type, first_seen          one row for each content
    files   ingest, source, path, hash, licence, modified
    hashes  path, stamp, hash                      contents that are known without reading (`hashes.py`)

`hash` is the BLAKE2b of the content, as in the units of work. So two names of one content are two rows of `files` and one
of `blobs`. `ingest` is the address of the artifact that the file was read into. Times are seconds since 1970, UTC. A file
whose content was not hashed (a remote one, or one over the size limit) has no blob.

Several processes may write at once: a writer waits for the lock of another, and raises after a time.
"""

from __future__ import annotations

import mimetypes
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from whorl.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from sqlalchemy import Connection

WAIT_SECONDS = 30.0
ROWS_PER_STATEMENT = 1000
CREATION_LOCK = 0x77686F726C  # key of the advisory lock under which tables are made
MEDIA_TYPES = {
    ".jsonl": "application/jsonl", ".ndjson": "application/jsonl", ".parquet": "application/vnd.apache.parquet",
    ".arrow": "application/vnd.apache.arrow.file", ".warc": "application/warc", ".wet": "application/warc",
    ".md": "text/markdown", ".rst": "text/x-rst", ".py": "text/x-python", ".toml": "application/toml",
}  # fmt: skip
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")


@dataclass(frozen=True)
class CatalogFile:
    """One file of one ingest. hash: 32 hex digits, None if the content was not hashed; size: in bytes."""

    ingest: str
    source: str
    path: str
    hash: str | None
    size: int | None
    media_type: str
    licence: str | None = None
    modified: float | None = None
    first_seen: float = 0.0


def media_type(path: str) -> str:
    """Return the media type of a file's content by its name, without its compression."""
    name = PurePosixPath(path)
    while name.suffix.lower() in COMPRESSED:
        name = name.with_suffix("")
    suffix = name.suffix.lower()
    return MEDIA_TYPES.get(suffix) or mimetypes.guess_type(f"x{suffix}")[0] or "application/octet-stream"


class Catalog:
    """A catalogue of files.

    Args:
        location: a path of a SQLite file, which is created, or a URL: "sqlite:///FILE", "postgresql://USER@HOST/DATABASE".
        wait: seconds to wait for a lock.

    Raises:
        ConfigError: a URL of another database, or the driver of PostgreSQL is not installed.
        StoreError: the database cannot be opened, or is locked.
    """

    def __init__(self, location: str | Path, *, wait: float = WAIT_SECONDS) -> None:
        import sqlalchemy as sa

        url = str(location)
        if "://" not in url:
            Path(url).parent.mkdir(parents=True, exist_ok=True)
            url = f"sqlite:///{url}"
        self.url, self.wait = url, wait
        self.dialect, rest = url.partition("://")[0].partition("+")[0], url.partition("://")[2]
        if self.dialect == "sqlite":
            options: dict[str, Any] = {"timeout": wait}
        elif self.dialect == "postgresql":
            url = f"postgresql+psycopg://{rest}"
            options = {
                "connect_timeout": max(2, round(wait)),
                "options": f"-c lock_timeout={max(1, round(1000 * wait))}",
            }
        else:
            raise ConfigError(
                f"the catalogue {url!r} is no database that Whorl uses",
                expected="a path, sqlite:///FILE, or postgresql://USER@HOST/DATABASE",
            )
        # Without a pool no connection is left open in a step that trains for hours.
        try:
            self.engine = sa.create_engine(url, connect_args=options, poolclass=sa.NullPool)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{error.name} is not installed", do="install it: pip install 'whorl[postgres]'"
            ) from error
        except (sa.exc.ArgumentError, ValueError) as error:
            raise ConfigError(f"the catalogue {location!s} is not a valid URL: {error}") from error
        tables = sa.MetaData()
        self.blobs = sa.Table(
            "blobs", tables,
            sa.Column("hash", sa.String(32), primary_key=True), sa.Column("size", sa.BigInteger),
            sa.Column("media_type", sa.Text, nullable=False), sa.Column("first_seen", sa.Double, nullable=False),
        )  # fmt: skip
        self.files = sa.Table(
            "files", tables,
            sa.Column("ingest", sa.String(64), primary_key=True), sa.Column("source", sa.Text, primary_key=True),
            sa.Column("path", sa.Text, primary_key=True),
            sa.Column("hash", sa.String(32), sa.ForeignKey("blobs.hash"), index=True),
            sa.Column("licence", sa.Text), sa.Column("modified", sa.Double), sa.Column("size", sa.BigInteger),
            sa.Column("media_type", sa.Text, nullable=False), sa.Column("first_seen", sa.Double, nullable=False),
        )  # fmt: skip
        self.hashes = sa.Table(
            "hashes", tables,
            sa.Column("path", sa.Text, primary_key=True), sa.Column("stamp", sa.Text, nullable=False),
            sa.Column("hash", sa.String(32), nullable=False),
        )  # fmt: skip
        with self._begin() as connection:
            # SQLite commits each CREATE TABLE separately: after a kill some may be missing.
            if not set(tables.tables) <= set(sa.inspect(connection).get_table_names()):
                if self.dialect == "postgresql":  # CREATE TABLE IF NOT EXISTS fails if two run it at once
                    connection.execute(sa.select(sa.func.pg_advisory_xact_lock(CREATION_LOCK)))
                for table in tables.sorted_tables:
                    connection.execute(sa.schema.CreateTable(table, if_not_exists=True))
                    for index in table.indexes:
                        connection.execute(sa.schema.CreateIndex(index, if_not_exists=True))

    def add(self, files: Iterable[CatalogFile]) -> None:
        """Add files in one transaction; those that the catalogue has keep their row, so a repetition changes nothing."""
        rows = list(files)
        latest_first = sorted(rows, key=lambda f: -f.first_seen)
        blobs = {
            f.hash: {"hash": f.hash, "size": f.size, "media_type": f.media_type, "first_seen": f.first_seen}
            for f in latest_first
            if f.hash is not None
        }
        with self._begin() as connection:
            # In the order of the keys, so that two writers never wait for each other.
            self._insert(connection, self.blobs, [blobs[key] for key in sorted(blobs)])
            self._insert(
                connection,
                self.files,
                [vars(f) for f in sorted(rows, key=lambda f: (f.ingest, f.source, f.path))],
            )

    def find(
        self, *, ingest: str | None = None, source: str | None = None, path: str | None = None,
        hash: str | None = None,
    ) -> list[CatalogFile]:  # fmt: skip
        """Return the files with these values, by ingest, source and path."""
        import sqlalchemy as sa

        wanted = {"ingest": ingest, "source": source, "path": path, "hash": hash}
        conditions = [self.files.c[name] == value for name, value in wanted.items() if value is not None]
        query = sa.select(self.files).where(*conditions)
        with self._begin() as connection:
            found = [CatalogFile(**row) for row in connection.execute(query).mappings()]
        return sorted(found, key=lambda f: (f.ingest, f.source, f.path))

    def first_seen(self, hash: str) -> float | None:
        """Return when a content was first seen, or None."""
        import sqlalchemy as sa

        with self._begin() as connection:
            found = connection.execute(sa.select(self.blobs.c.first_seen).where(self.blobs.c.hash == hash))
            return found.scalar()

    def known_hashes(self, paths: Sequence[str]) -> dict[str, tuple[str, str]]:
        """Return path -> stamp and hash of those files that were hashed before."""
        import sqlalchemy as sa

        found: dict[str, tuple[str, str]] = {}
        with self._begin() as connection:
            for begin in range(0, len(paths), ROWS_PER_STATEMENT):
                some = self.hashes.c.path.in_(map(_path_key, paths[begin : begin + ROWS_PER_STATEMENT]))
                for path, stamp, digest in connection.execute(sa.select(self.hashes).where(some)):
                    found[os.fsdecode(bytes.fromhex(path))] = stamp, digest
        return found

    def keep_hashes(self, hashes: Mapping[str, tuple[str, str]]) -> None:
        """Keep path -> stamp and hash; a path's earlier hash is replaced."""
        if not hashes:
            return
        from sqlalchemy.dialects import postgresql, sqlite

        insert: Any = (postgresql if self.dialect == "postgresql" else sqlite).insert(self.hashes)
        new = {"stamp": insert.excluded.stamp, "hash": insert.excluded.hash}
        statement = insert.on_conflict_do_update(index_elements=["path"], set_=new)
        rows = [{"path": _path_key(p), "stamp": s, "hash": h} for p, (s, h) in sorted(hashes.items())]
        with self._begin() as connection:
            for begin in range(0, len(rows), ROWS_PER_STATEMENT):
                connection.execute(statement, rows[begin : begin + ROWS_PER_STATEMENT])

    def _insert(self, connection: Connection, table: Any, rows: Sequence[dict[str, Any]]) -> None:
        from sqlalchemy.dialects import postgresql, sqlite

        insert: Any = (postgresql if self.dialect == "postgresql" else sqlite).insert
        for begin in range(0, len(rows), ROWS_PER_STATEMENT):
            connection.execute(
                insert(table).on_conflict_do_nothing(), [*rows[begin : begin + ROWS_PER_STATEMENT]]
            )

    @contextmanager
    def _begin(self) -> Iterator[Connection]:
        import sqlalchemy as sa

        try:
            with self.engine.begin() as connection:
                yield connection
        except sa.exc.DBAPIError as error:
            message = str(error.orig).strip().splitlines()[0]
            locked = "database is locked" in message or "lock timeout" in message
            place = sa.engine.make_url(self.url).render_as_string()  # without a password
            raise StoreError(
                f"the catalogue {place} {'is locked' if locked else 'cannot be used'}: {message}",
                expected=f"a lock that is released within {self.wait:g} s" if locked else "",
                do="end the process that holds the lock, and run again; finished work is kept" if locked
                else "check WHORL_CATALOG, and that the database is running and writable",
            ) from error  # fmt: skip


def _path_key(path: str) -> str:
    """Return a path as hex digits: it may hold bytes that are no text."""
    return os.fsencode(path).hex()

"""The catalogue: one suite for SQLite and PostgreSQL; equal files are read and stored once."""

from __future__ import annotations

import itertools
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa
from tests.support.corpus.postgres import postgres_programs, postgres_server

from whorl.corpus import IngestConfig, document_files, ingest
from whorl.corpus.provenance.catalog import Catalog, CatalogFile, media_type
from whorl.corpus.provenance.explain import explain
from whorl.errors import ConfigError, DataError, StoreError
from whorl.tracking.progress import Progress

ONE = CatalogFile("i1", "src", "a/b.txt", "0" * 32, 12, "text/plain", "MIT", 5.5, 100.0)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    programs = postgres_programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed (Debian's package postgresql)")
    with postgres_server(programs) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The location of an empty catalogue."""
    if request.param == "sqlite":
        yield str(tmp_path / "catalog.sqlite")
        return
    url = request.getfixturevalue("server")
    yield url
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE files, blobs, hashes"))
    engine.dispose()


def test_files_are_found_by_each_column(place: str) -> None:
    catalog = Catalog(place)
    two = replace(ONE, path="c.txt", first_seen=200.0)
    three = replace(ONE, ingest="i2", hash="1" * 32, path="é 世.txt", licence=None, modified=None)
    remote = replace(ONE, path="remote", hash=None, size=None)
    catalog.add([ONE, two, three, remote])
    assert catalog.find() == [ONE, two, remote, three]
    assert catalog.find(hash="0" * 32) == [ONE, two]  # two names of one content
    assert catalog.find(ingest="i2") == [three] == catalog.find(path="é 世.txt")
    assert catalog.find(source="src", path="remote") == [remote] and catalog.find(source="no") == []
    assert catalog.first_seen("0" * 32) == 100.0 and catalog.first_seen("2" * 32) is None


def test_repeated_add_keeps_the_first_times(place: str) -> None:
    Catalog(place).add([ONE])
    again = Catalog(place)
    again.add([replace(ONE, first_seen=900.0), replace(ONE, path="new.txt", first_seen=900.0)])
    assert [file.first_seen for file in again.find()] == [100.0, 900.0]
    assert again.first_seen("0" * 32) == 100.0
    again.add([])


def test_writers_at_once_lose_nothing(place: str) -> None:
    errors: list[BaseException] = []

    def write(number: int) -> None:
        try:
            catalog = Catalog(place)
            for i in range(5):
                catalog.add(
                    [replace(ONE, ingest=f"i{number}", path=f"{i}-{j}", hash=f"{j:032d}") for j in range(20)]
                )
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(Catalog(place).find()) == 4 * 5 * 20


def lock(place: str) -> Callable[[], None]:
    """Lock the catalogue; return the function that releases it."""
    is_sqlite = "://" not in place
    engine = sa.create_engine(
        f"sqlite:///{place}" if is_sqlite else place.replace("postgresql:", "postgresql+psycopg:"),
        poolclass=sa.NullPool,
    )
    connection = engine.raw_connection()
    cursor = connection.cursor()
    cursor.execute("BEGIN EXCLUSIVE" if is_sqlite else "LOCK TABLE files, blobs IN ACCESS EXCLUSIVE MODE")

    def release() -> None:
        connection.rollback()
        connection.close()

    return release


def test_locked_catalog_is_waited_for_then_refused(place: str) -> None:
    catalog = Catalog(place, wait=0.3)
    release = lock(place)
    start = time.monotonic()
    with pytest.raises(StoreError, match="is locked") as raised:
        catalog.add([ONE])
    assert time.monotonic() - start >= 0.25 and "within 0.3 s" in raised.value.expected
    threading.Timer(0.3, release).start()
    Catalog(place, wait=20).add([ONE])
    assert catalog.find() == [ONE]


def test_unusable_locations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no database that Whorl uses"):
        Catalog("mysql://host/db")
    with pytest.raises(StoreError, match="cannot be used"):
        Catalog("postgresql://whorl:secret@127.0.0.1:1/none", wait=1)
    (tmp_path / "text").write_text("no database " * 100)
    with pytest.raises(StoreError, match="cannot be used"):
        Catalog(tmp_path / "text")


@pytest.mark.parametrize(
    ("path", "expected"),
    [("a.html", "text/html"), ("A.PDF", "application/pdf"), ("x.warc.gz", "application/warc"), ("t.txt", "text/plain"),
     ("d.jsonl.zst", "application/jsonl"), ("README", "application/octet-stream"), ("a.gz", "application/octet-stream")],
)  # fmt: skip
def test_media_type_is_that_of_the_content(path: str, expected: str) -> None:
    assert media_type(path) == expected


def write(folder: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_equal_files_are_read_once_and_catalogued_twice(tmp_path: Path, place: str) -> None:
    texts = {
        "a.txt": "same text", "b/c.txt": "same text", "b/d.md": "same text", "e.txt": "other", "f": "",
        "g": "",
    }  # fmt: skip
    data = write(tmp_path / "data", texts)
    (tmp_path / "out").mkdir()
    catalog, config = Catalog(place), IngestConfig(sources=[str(data)])
    found = ingest(config, tmp_path / "out", Progress.silent(), catalog=catalog, address="abc")
    assert found["equal_files"] == {"files": 1, "bytes": 9}
    assert (found["files"], found["documents"]) == (6, 3)
    assert found["quarantine"]["empty"]["documents"] == 2  # an empty file has nothing to store
    rows = [row for file in document_files(tmp_path / "out") for row in pq.read_table(file).to_pylist()]
    # Another suffix is another language, so `b/d.md` is read.
    assert sorted(row["path"] for row in rows) == ["a.txt", "b/d.md", "e.txt"]
    why = explain("b/c.txt", tmp_path / "out")
    assert why.verdict == "copy of a file" and why.duplicate["path"] == "a.txt"
    listed = catalog.find(ingest="abc")
    assert [file.path for file in listed] == ["a.txt", "b/c.txt", "b/d.md", "e.txt", "f", "g"]
    assert listed[0].hash == listed[1].hash != listed[3].hash
    assert (
        listed[0].modified == (data / "a.txt").stat().st_mtime_ns / 1e9
        and listed[2].media_type == "text/markdown"
    )


def test_equal_files_with_other_licences_are_both_read(tmp_path: Path) -> None:
    folders = [str(write(tmp_path / name, {"x.txt": "same text"})) for name in ("one", "two")]
    both = IngestConfig(sources=folders, licences={folders[0]: "MIT", folders[1]: "CC0-1.0"})
    for number, (config, documents) in enumerate(
        [(both, 2), (IngestConfig(sources=folders), 1), (IngestConfig(sources=folders, equal_files="all"), 2)]
    ):
        found = ingest(config, tmp_path / f"out{number}", Progress.silent())
        assert found["documents"] == documents
        assert (tmp_path / f"out{number}" / "copies.jsonl").exists() == (documents == 1)


def test_units_do_not_run_again_for_a_copy(tmp_path: Path) -> None:
    data = write(tmp_path / "data", {"a.txt": "same text"})
    units, config = tmp_path / "units", IngestConfig(sources=[str(data)])
    ingest(config, tmp_path / "one", Progress.silent(), units=units)
    before = sorted(path.name for path in units.iterdir())
    for name in itertools.islice(("b.txt", "c.txt"), 2):
        write(data, {name: "same text"})
    found = ingest(config, tmp_path / "two", Progress.silent(), units=units)
    assert sorted(path.name for path in units.iterdir()) == before and found["equal_files"]["files"] == 2
    lines = [json.loads(line) for line in (tmp_path / "two" / "copies.jsonl").read_text().splitlines()]
    assert [line["path"] for line in lines] == ["b.txt", "c.txt"]
    with pytest.raises(DataError, match="no document"):
        explain("d.txt", tmp_path / "two")


def test_catalog_after_a_kill_between_two_tables_is_completed(tmp_path: Path) -> None:
    path = tmp_path / "half.sqlite"
    Catalog(f"sqlite:///{path}")
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE files")
    Catalog(f"sqlite:///{path}")
    with sqlite3.connect(path) as connection:
        assert ("files",) in connection.execute("SELECT name FROM sqlite_master").fetchall()

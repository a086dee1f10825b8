"""Changes of SQLite from its write-ahead log, against the session extension, resets of the log, kills and wrong files."""

from __future__ import annotations

import dataclasses
import shutil
import signal
import subprocess
import sys
import time

import apsw
import pytest
from tests.support.loop.sqlite_changes import KEYS, ChangingTable, changesets, drain, folded, sqlite_source

from whorl.errors import ConfigError
from whorl.log import open_log
from whorl.log.memory import MemoryLog
from whorl.loop.capture import sqlite_shadow
from whorl.loop.capture.capture import Capture
from whorl.loop.capture.source import SourceLostError, SourceUnavailableError
from whorl.loop.capture.sqlite import START
from whorl.loop.capture.sqlite_format import WalChangedError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "app.db"


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("page_size", [512, 4096])
def test_events_equal_the_changesets_of_the_session(path, kind, page_size, monkeypatch):
    monkeypatch.setattr("whorl.loop.capture.sqlite.CHECKPOINT_BYTES", 50_000)
    table, log = ChangingTable(path, kind, seed=page_size + len(kind), page_size=page_size), MemoryLog()
    table.fill(200)
    with sqlite_source(path) as source:
        drain(source, log)
        assert folded(log) == table.rows()
        first, expected, salts = log.bounds("docs")[0].next, [], set()
        for _ in range(30):
            expected.append(table.transaction())
            if table.random.random() < 0.3:
                drain(source, log, points=table.random.choice((1, 2, -1)))
                salts.add(source._wal.end()[0].salt)
        drain(source, log)
    assert list(changesets(log, first).values()) == [changes for changes in expected if changes]
    assert folded(log) == table.rows()
    assert len(salts) > 2  # the log was reset under the capture


def test_deletions_are_found_after_a_reset_of_the_log_without_capture(path):
    table, log = ChangingTable(path, "text", seed=1), MemoryLog()
    table.fill(300)
    for _ in range(5):
        with sqlite_source(path) as source:
            drain(source, log, points=table.random.choice((1, 2, 3, -1)))
        for _ in range(12):
            table.transaction()
        table.writer.execute("DELETE FROM docs WHERE n < 0.2")
        table.writer.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        if table.random.random() < 0.5:
            table.writer.execute("VACUUM")
    with sqlite_source(path) as source:
        drain(source, log)
    assert folded(log) == table.rows()
    assert any("compared" in name for name in changesets(log))


def test_database_without_a_log_is_read(path):
    writer = apsw.Connection(str(path))
    writer.execute("CREATE TABLE docs(id INTEGER PRIMARY KEY, body); INSERT INTO docs VALUES(1, 'tea')")
    writer.execute("PRAGMA journal_mode=WAL")
    writer.close()  # removes the log
    log = MemoryLog()
    with sqlite_source(path) as source:
        drain(source, log)
    assert "tea" in str(folded(log))
    writer = apsw.Connection(str(path))
    writer.execute("UPDATE docs SET body = 'milk'")
    with sqlite_source(path) as source:
        drain(source, log)
    writer.close()
    assert "milk" in str(folded(log)) and "tea" not in str(folded(log))


def test_added_column_and_other_schema_changes(path):
    table, log = ChangingTable(path, "integer", seed=2), MemoryLog()
    table.fill(50)
    write = table.writer.execute
    with sqlite_source(path) as source:
        drain(source, log)
        for statement, operations in (
            ("ALTER TABLE docs ADD COLUMN plain", set()),
            ("ALTER TABLE docs ADD COLUMN kind DEFAULT 'note'", {"u"}),
            ("UPDATE docs SET plain = 7 WHERE id < 10", {"u"}),
            ("ALTER TABLE docs DROP COLUMN kind", {"u"}),
            ("ALTER TABLE docs RENAME TO old; CREATE TABLE docs(id INTEGER PRIMARY KEY, body)", {"d"}),
            ("INSERT INTO docs SELECT id, body FROM old WHERE id < 20", {"c"}),
            ("BEGIN; DROP TABLE docs; CREATE TABLE docs(id TEXT PRIMARY KEY); INSERT INTO docs VALUES(1); END", {"u", "d"}),
            ("DROP TABLE docs", {"d"}),
        ):  # fmt: skip
            first = log.bounds("docs")[0].next
            write(statement)
            drain(source, log)
            found = {op for changes in changesets(log, first).values() for op, _, _ in changes.values()}
            assert found == operations, statement
    assert folded(log) == {}


def test_row_that_moves_into_a_freed_page_of_another_table(path):
    table, log = ChangingTable(path, "integer", seed=3, page_size=512), MemoryLog()
    table.fill(100)
    with sqlite_source(path) as source:
        drain(source, log)
        table.writer.execute(
            "BEGIN; CREATE TEMP TABLE kept AS SELECT * FROM docs; DELETE FROM docs;"
            "INSERT INTO archive SELECT * FROM kept; COMMIT"
        )
        drain(source, log)
    assert folded(log) == {}


@pytest.mark.parametrize("vacuum", [0, 1])
def test_overflow_page_that_is_overwritten_in_place(path, vacuum):
    write, log = apsw.Connection(str(path)).execute, MemoryLog()
    for setting in (f"auto_vacuum={vacuum}", "journal_mode=WAL"):
        write(f"PRAGMA {setting}").fetchall()
    write("CREATE TABLE docs(id INTEGER PRIMARY KEY, body); CREATE TABLE other(id INTEGER PRIMARY KEY, body)")
    rows = [(id, "x" * (100 + 90 * id)) for id in range(1, 301)]
    for name in ("docs", "other"):
        write("BEGIN").connection.executemany(f"INSERT INTO {name} VALUES(?, ?)", rows)
        write("COMMIT")
    write("DELETE FROM docs WHERE id % 7 = 0")  # free pages
    with sqlite_source(path) as source:
        drain(source, log)
        for id in (60, 200, 299):
            first = log.bounds("docs")[0].next
            for name in ("other", "docs"):
                write(
                    f"UPDATE {name} SET body = substr(body, 1, length(body) - 1) || 'y' WHERE id = ?", (id,)
                )
            drain(source, log)
            ((change,),) = (changes.items() for changes in changesets(log, first).values())
            assert change[0] == str(id) and change[1][0] == "u" and change[1][2]["body"].endswith("xy")
    assert len(folded(log)) == 258


def test_integers_and_reals_of_equal_value_differ(path):
    write, log = apsw.Connection(str(path)).execute, MemoryLog()
    write(
        "PRAGMA journal_mode=WAL; CREATE TABLE docs(id INTEGER PRIMARY KEY, v); INSERT INTO docs VALUES(1, 1)"
    ).fetchall()
    with sqlite_source(path) as source:
        drain(source, log)
        write("UPDATE docs SET v = 1.0")
        drain(source, log)
    assert [
        after["v"].__class__ for changes in changesets(log).values() for _, _, after in changes.values()
    ] == [int, float]


def test_text_that_is_no_utf8_is_quarantined(path):
    write, log = apsw.Connection(str(path)).execute, MemoryLog()
    write('PRAGMA journal_mode=WAL; CREATE TABLE "d""s"(id TEXT PRIMARY KEY, "a""b", blob)').fetchall()
    write("""INSERT INTO "d""s" VALUES('good', 'ä', x'ff'), ('bad', CAST(x'61ff' AS TEXT), NULL)""")
    with sqlite_source(path, 'd"s') as source:
        drain(source, log)
        write("""UPDATE "d""s" SET "a""b" = 'fine' WHERE id = 'bad'""")
        drain(source, log)
        write("""UPDATE "d""s" SET blob = 1""")
        drain(source, log)
    found = [{key: (op, after) for key, (op, _, after) in each.items()} for each in changesets(log).values()]
    good, bad = {"id": "good", 'a"b': "ä", "blob": "/w=="}, {"id": "bad", 'a"b': "fine", "blob": None}
    assert found == [
        {"good": ("r", good), "bad": ("d", None)}, {"bad": ("u", bad)},
        {"good": ("u", {**good, "blob": 1}), "bad": ("u", {**bad, "blob": 1})},
    ]  # fmt: skip


def test_log_stays_small_while_a_writer_commits(path, monkeypatch):
    monkeypatch.setattr("whorl.loop.capture.sqlite.CHECKPOINT_BYTES", 50_000)
    monkeypatch.setattr("whorl.loop.capture.sqlite.LOCK_BYTES", 200_000)
    table, log = ChangingTable(path, "integer", seed=4), MemoryLog()
    table.writer.execute("PRAGMA wal_autocheckpoint=0")
    with sqlite_source(path) as source:
        for _ in range(25):
            table.transaction()
            drain(source, log)
        assert source.retained() < 2_000_000
    assert folded(log) == table.rows()


def test_given_up_log_is_compared(path):
    table, log, warnings = ChangingTable(path, "integer", seed=5), MemoryLog(), []
    table.fill(100)
    with sqlite_source(path) as source:
        drain(source, log)
        table.transaction()
        for _ in zip(Capture(source, log, "docs", warnings.append, limit=1).steps(), range(4), strict=False):
            pass
        assert "given up" in warnings[0]
        for _ in range(20):
            table.transaction()
        table.writer.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        drain(source, log)
    assert folded(log) == table.rows()


def test_frames_with_a_wrong_salt_or_checksum_are_refused(path):
    table = ChangingTable(path, "integer", seed=6)
    table.writer.execute("PRAGMA wal_autocheckpoint=0")
    table.fill(20)
    with sqlite_source(path) as source:
        wal, (end, _) = source._wal, source._wal.end()
        commits = list(wal.commits(START, end))
        assert commits[-1].position == end and wal.continues(end)
        assert [c.position for c in wal.commits(commits[0].position, end)] == [
            c.position for c in commits[1:]
        ]
        assert not wal.continues(end._replace(sum0=1)) and not wal.continues(end._replace(salt="0" * 16))
        for place in (40, 32 + 24 + 700, len((path.parent / "app.db-wal").read_bytes()) - 1):
            with (path.parent / "app.db-wal").open("r+b") as file:
                file.seek(place)
                byte = file.read(1)
                file.seek(place)
                file.write(bytes([byte[0] ^ 1]))
                file.flush()
                with pytest.raises(WalChangedError):
                    list(wal.commits(START, end))
                file.seek(place)
                file.write(byte)


def test_copy_that_is_lost_or_of_another_time_is_rebuilt(path):
    table, log = ChangingTable(path, "text", seed=7), MemoryLog()
    table.fill(100)
    with sqlite_source(path) as source:
        drain(source, log)
    shutil.rmtree(path.parent / "state")
    table.writer.execute("DELETE FROM docs WHERE n < 0.5")
    with sqlite_source(path) as source:
        with pytest.raises(SourceLostError):
            next(source.read({"wal": ["0", 0, 0, 0]}))
        drain(source, log)
        assert folded(log) == table.rows()
        with pytest.raises(SourceLostError):
            next(source.read({"wal": ["0", 0, 0, 0]}))


def test_database_that_is_replaced_or_away(path):
    table, log = ChangingTable(path, "integer", seed=8), MemoryLog()
    table.fill(50)
    with sqlite_source(path) as source:
        drain(source, log)
        table.writer.close()
        for file in path.parent.glob("app.db*"):
            file.unlink()
        with pytest.raises(SourceUnavailableError):
            next(source.read(None))
        other = ChangingTable(path, "integer", seed=9)
        other.fill(30)
        drain(source, log)
    assert folded(log) == other.rows()


CAPTURE = """
import sys
from pathlib import Path
from tests.support.loop.sqlite_changes import sqlite_source, drain
from whorl.log import open_log
folder = Path(sys.argv[1])
with open_log(f"sqlite:{folder / 'log.db'}") as log, sqlite_source(folder / "app.db") as source:
    print("open", flush=True)
    while True:
        drain(source, log)
"""


def test_killed_captures_lose_nothing(path):
    table = ChangingTable(path, "text", seed=10)
    table.fill(300)
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", CAPTURE, path.parent], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline()
        end = time.monotonic() + table.random.uniform(0, 0.3)
        while time.monotonic() < end:
            table.transaction()
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        for _ in range(table.random.choice((0, 1, 20))):
            table.transaction()
    with open_log(f"sqlite:{path.parent / 'log.db'}") as log, sqlite_source(path) as source:
        drain(source, log)
        assert folded(log) == table.rows()


@pytest.mark.parametrize(
    ("statements", "table", "named"),
    [
        ("CREATE TABLE docs(id INTEGER PRIMARY KEY)", "docs", "PRAGMA journal_mode=WAL"),
        ("PRAGMA journal_mode=WAL; CREATE TABLE docs(id INTEGER)", "docs", "has no key"),
        ("PRAGMA journal_mode=WAL; CREATE TABLE docs(id INTEGER PRIMARY KEY)", "dosc", "did you mean 'docs'"),
    ],
)
def test_wrong_databases_are_refused(path, statements, table, named):
    writer = apsw.Connection(str(path))
    writer.execute(statements).fetchall()
    with pytest.raises(ConfigError, match=named):
        sqlite_source(path, table)
    writer.close()


class Crash(BaseException):
    """The process ends here."""


def test_crash_at_every_step_of_the_copy_changes_nothing(path, monkeypatch):
    table, log, steps = ChangingTable(path, "integer", seed=11), MemoryLog(), {"left": 0}
    table.fill(50)

    def step() -> None:
        steps["left"] -= 1
        if steps["left"] == 0:
            raise Crash

    def crashing(function):
        def run(*arguments):
            step()
            result = function(*arguments)
            step()
            return result

        return run

    def write_pages(folder, commits):
        half = [dataclasses.replace(c, pages=dict([*c.pages.items()][::2])) for c in commits]
        step()
        real(folder, half)
        step()
        real(folder, commits)
        step()

    real = sqlite_shadow._write_pages
    crashes = 0
    for number in range(1, 14):
        with monkeypatch.context() as patched:
            for name in ("write_atomic", "fsync_path"):
                patched.setattr(sqlite_shadow, name, crashing(getattr(sqlite_shadow, name)))
            patched.setattr(sqlite_shadow, "_write_pages", write_pages)
            steps["left"], source = number, sqlite_source(path)
            try:
                drain(source, log)
            except Crash:
                crashes += 1
            source.close()
        table.transaction()
    with sqlite_source(path) as source:
        drain(source, log)
    assert crashes >= 12  # a run has 11 steps, and more if it repeats those of a crash
    assert folded(log) == table.rows()

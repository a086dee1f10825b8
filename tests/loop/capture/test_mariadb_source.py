"""A table of MariaDB as a source: whole transactions, snapshots under live writes, a binary log that was removed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.log.servers import Server, running
from tests.support.loop.captures import catch_up, events, folded, open_capture

from whorl.errors import ConfigError
from whorl.log.memory import MemoryLog
from whorl.loop.capture import tables

pymysql = pytest.importorskip("pymysql", reason="mysql-replication is not installed")
from whorl.loop.capture.mariadb import MariadbSource  # noqa: E402

TYPES = (
    "n DECIMAL(10,2)", "b BLOB", "f FLOAT", "d DOUBLE", "ok BOOL", "s SET('x', 'y')", "e ENUM('p', 'q')", "bits BIT(5)",
    "at TIMESTAMP NULL", "dt DATETIME(3)", "tm TIME", "j JSON", "twice INT AS (id * 2) STORED", "y YEAR",
)  # fmt: skip
VALUES = "1.5, x'00ff', 0.1, 0.1, 1, 'y,x', 'q', b'101', now(), '2020-01-02 03:04:05.678', '10:11:12', '[1]', DEFAULT, 2020"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("mariadb") as found:
        yield found


@pytest.fixture
def run(server: Server) -> Iterator[Any]:
    """Run SQL in a new database, with an empty table of binary and text keys."""
    opened = pymysql.connect(
        host="127.0.0.1", port=server.port, user="root", autocommit=True, charset="utf8mb4"
    )
    cursor = opened.cursor()

    def execute(query: str, *arguments: Any) -> list[tuple[Any, ...]]:
        cursor.execute(query, arguments or None)
        return list(cursor.fetchall())

    execute("DROP DATABASE IF EXISTS shop")
    execute("CREATE DATABASE shop CHARACTER SET utf8mb4")
    execute("USE shop")
    execute(
        "CREATE TABLE docs (id INT, part VARBINARY(9), title TEXT, body LONGTEXT, PRIMARY KEY (part, id))"
    )
    yield execute
    opened.close()


def mutate(run: Any, draw: random.Random, keys: set[tuple[bytes, int]]) -> None:
    """Commit a transaction of one to four changes, with a savepoint."""
    run("BEGIN")
    for _ in range(draw.randrange(1, 5)):
        kind, some = draw.random(), draw.choice(sorted(keys)) if keys else None
        new = (draw.choice([b"a", b"\xff"]), draw.randrange(200))
        if kind < 0.4 and new not in keys:
            values = new[1], new[0], "title é", "x" * draw.randrange(20_000)
            run("INSERT INTO docs (id, part, title, body) VALUES (%s, %s, %s, %s)", *values)
            keys.add(new)
        elif some is None:
            continue
        elif kind < 0.7:
            run("UPDATE docs SET title = %s WHERE part = %s AND id = %s", str(kind), *some)
        elif kind < 0.8 and new not in keys:
            run("UPDATE docs SET part = %s, id = %s WHERE part = %s AND id = %s", *new, *some)
            keys.symmetric_difference_update({some, new})
        else:
            run("SAVEPOINT one")
            run("DELETE FROM docs WHERE part = %s AND id = %s", *some)
            if kind < 0.9:
                run("ROLLBACK TO one")
            else:
                keys.remove(some)
    run("COMMIT")


def table(run: Any) -> set[tuple[Any, ...]]:
    return {(str(id), title, body) for id, title, body in run("SELECT id, title, body FROM docs")}


def rows(log: MemoryLog) -> set[tuple[Any, ...]]:
    return {(str(row["id"]), row["title"], row["body"]) for row in folded(log).values()}


def test_log_and_query_give_equal_values(server, run):
    run(f"CREATE TABLE kinds (id INT PRIMARY KEY, {', '.join(TYPES)})")
    log = MemoryLog()
    run(f"INSERT INTO kinds VALUES (1, {VALUES})")
    capture = open_capture(log, server.url, "kinds")
    catch_up(capture)
    run("SET timestamp = 1796041200, time_zone = '+05:00'")
    run("UPDATE kinds SET at = now()")
    run("UPDATE kinds SET id = 2")
    catch_up(capture)
    (first, _, _, new), (*_, gone, _), (*_, again) = events(log)[0], events(log)[2], events(log)[3]
    assert first == "r" and {**new, "at": again["at"], "id": 2} == again and gone == {**again, "id": 1}
    assert again["at"] == "2026-11-30 12:20:00" and "twice" not in again
    assert (again["n"], again["b"], again["s"], again["bits"]) == (1.5, "AP8=", "x,y", 5)


def test_text_that_does_not_decode_is_quarantined(server, run):
    run("CREATE TABLE old (id INT PRIMARY KEY, body VARCHAR(9) CHARACTER SET latin1, raw BLOB)")
    log = MemoryLog()
    capture = open_capture(log, server.url, "old")
    catch_up(capture)
    run("INSERT INTO old VALUES (1, 'é', x'81'), (2, _latin1 x'61', NULL), (3, _latin1 x'81', NULL)")
    catch_up(capture)
    assert [(op, key, after and after["body"]) for op, key, _, after in events(log)] == [
        ("c", "1", "é"), ("c", "2", "a"), ("d", "3", None),
    ]  # fmt: skip
    assert capture.rejected == 1 and events(log)[0][3]["raw"] == "gQ=="


@pytest.mark.parametrize("seed", [0])
def test_snapshot_of_mariadb_under_writes_equals_the_table(server, run, monkeypatch, seed):
    """Rows change right behind the query of each chunk; the capture is killed at any step."""
    monkeypatch.setattr(tables, "CHUNK", 7)
    monkeypatch.setattr("whorl.loop.capture.capture.BATCH", 5)
    log, draw, keys, left = MemoryLog(), random.Random(seed), set(), [22]
    for _ in range(40):
        mutate(run, draw, keys)
    read = MariadbSource._read_chunk

    def read_chunk(source: MariadbSource) -> Any:
        found, left[0] = read(source), left[0] - 1
        if left[0] > 0:
            mutate(run, draw, keys)
            run("UPDATE docs SET title = %s", f"late {left[0]}")
        if left[0] == 15:
            run("ALTER TABLE docs ADD COLUMN extra INT DEFAULT 3")
        return found

    monkeypatch.setattr(MariadbSource, "_read_chunk", read_chunk)
    for attempt in range(12):
        capture = open_capture(log, server.url, "docs")
        catch_up(capture, seed=100 * seed + attempt)
        capture.source.close()
    catch_up(open_capture(log, server.url, "docs"))
    assert rows(log) == table(run) and left[0] < 10


def test_transactions_of_mariadb_are_whole(server, run):
    log = MemoryLog()
    capture = open_capture(log, server.url, "docs")
    catch_up(capture)
    run("CREATE TABLE other (id INT PRIMARY KEY)")
    for n in range(0, 9, 3):
        run("BEGIN")
        run("INSERT INTO docs (part, id) VALUES ('a', %s)", n)
        run("SAVEPOINT one")
        run("INSERT INTO other VALUES (%s)", n)
        run("UPDATE docs SET part = 'b' WHERE id = %s", n)
        run("COMMIT")
        run("INSERT INTO other VALUES (%s)", n + 1)
        run("FLUSH LOGS")
        if n == 3:
            catch_up(capture)
    catch_up(capture)
    found = [record.event().data for record in log.replay("docs") if "op" in record.event().data]
    assert [data["op"] for data in found] == ["c", "d", "c"] * 3
    ids = [data["transaction"]["id"] for data in found]
    assert len(set(ids)) == 3 and [ids.count(id) for id in ids] == [3] * 9 and rows(log) == table(run)


def test_statements_that_log_no_rows_begin_a_new_snapshot(server, run):
    log = MemoryLog()
    for n in range(3):
        run("INSERT INTO docs (part, id) VALUES ('a', %s)", n)
    capture = open_capture(log, server.url, "docs")
    catch_up(capture)
    run("ALTER TABLE docs ADD COLUMN stock INT DEFAULT 3")
    catch_up(capture)
    assert [row["stock"] for row in folded(log).values()] == [3] * 3
    run("TRUNCATE docs")
    run("INSERT INTO docs (part, id) VALUES ('a', 9)")
    catch_up(capture)
    assert rows(log) == table(run) and len(folded(log)) == 1


def test_binary_log_that_was_removed_is_reported_and_rebuilt(server, run):
    log, warnings = MemoryLog(), []
    for n in range(4):
        run("INSERT INTO docs (part, id) VALUES ('a', %s)", n)
    capture = open_capture(log, server.url, "docs", warnings)
    catch_up(capture)
    run("DELETE FROM docs WHERE id = 1")
    run("FLUSH LOGS")
    run("FLUSH LOGS")
    while len(run("SHOW BINARY LOGS")) > 1:  # a thread that has sent one to the capture may still hold it
        run(f"PURGE BINARY LOGS TO '{run('SHOW MASTER STATUS')[0][0]}'")
    catch_up(capture)
    assert "binlog_expire_logs_seconds" in warnings[0] and rows(log) == table(run)
    catch_up(capture)
    assert len(warnings) == 1


def test_mariadb_that_is_away_is_waited_for(server, run):
    log, warnings = MemoryLog(), []
    capture = open_capture(log, server.url, "docs", warnings)
    catch_up(capture)
    run("INSERT INTO docs (part, id) VALUES ('a', 1)")
    server.process.terminate()
    server.process.wait(60)
    assert [catch_up(capture) for _ in range(2)] == ["waiting"] * 2 and len(warnings) == 1
    server.start()
    assert catch_up(capture) == "idle" and [event[:2] for event in events(log)] == [("c", '["YQ==",1]')]


def test_tables_of_mariadb_that_cannot_be_captured_are_refused(server, run, monkeypatch):
    run("CREATE TABLE keyless (a INT)")
    with pytest.raises(ConfigError, match=r"keyless has no key(.|\n)*ADD PRIMARY KEY"):
        open_capture(MemoryLog(), server.url, "keyless")
    with pytest.raises(ConfigError, match=r"no table 'doc'(.|\n)*docs"):
        open_capture(MemoryLog(), server.url, "doc")
    run("SET GLOBAL binlog_row_metadata = 'MINIMAL'")
    with pytest.raises(ConfigError, match=r"binlog_row_metadata(.|\n)*set binlog_row_metadata=FULL"):
        open_capture(MemoryLog(), server.url, "docs")
    run("SET GLOBAL binlog_row_metadata = 'FULL'")
    monkeypatch.setattr(MariadbSource, "_rows", lambda *_: [("8.4.0",)])
    with pytest.raises(ConfigError, match="another server"):
        open_capture(MemoryLog(), server.url, "docs")

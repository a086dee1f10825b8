"""A table of PostgreSQL as a source: equal to wal2json's events, snapshots under live writes, slots."""

from __future__ import annotations

import base64
import json
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from tests.support.log.servers import Server, running
from tests.support.loop.captures import catch_up, events, folded, open_capture

from whorl.errors import ConfigError
from whorl.log.memory import MemoryLog
from whorl.loop.capture import postgres, tables
from whorl.loop.capture.postgres import PostgresSource, visible

TABLE = "docs (id int, part text, title text, body text, price numeric, data bytea, ok bool, PRIMARY KEY (part, id))"
JSON = {"data": lambda v: base64.b64encode(bytes.fromhex(v)).decode(), "price": float}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("postgresql", settings=["wal_level=logical", "max_replication_slots=50"]) as found:
        yield found


@pytest.fixture
def database(server: Server) -> Iterator[psycopg.Connection]:
    """A new database, with an empty table. Its attribute `url` names it."""
    name = f"test_{random.randrange(10**9)}"
    with psycopg.connect(server.url, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}")
    with psycopg.connect(url := server.url.replace("/postgres", f"/{name}"), autocommit=True) as found:
        found.execute(f"CREATE TABLE {TABLE}")
        found.url = url
        yield found


def long_text(draw: random.Random) -> str:
    return "".join(
        chr(draw.randrange(97, 123)) for _ in range(9000)
    )  # out of line: it does not compress below 2 kB


def mutate(database: psycopg.Connection, draw: random.Random, keys: set[tuple[str, int]]) -> None:
    """Commit a transaction of one to four changes."""
    with database.transaction():
        for _ in range(draw.randrange(1, 5)):
            kind, some = draw.random(), draw.choice(sorted(keys)) if keys else None
            new = (draw.choice("ab"), draw.randrange(200))
            if kind < 0.4 and new not in keys:
                body = long_text(draw) if draw.random() < 0.3 else None
                values = (new[1], new[0], f"title {draw.random()}", body, draw.random(), b"\0\xff", True)
                database.execute("INSERT INTO docs VALUES (%s, %s, %s, %s, %s, %s, %s)", values)
                keys.add(new)
            elif some is None:
                continue
            elif kind < 0.7:
                database.execute("UPDATE docs SET title = %s WHERE part = %s AND id = %s", ("new é", *some))
            elif kind < 0.8 and new not in keys:
                database.execute(
                    "UPDATE docs SET part = %s, id = %s WHERE part = %s AND id = %s", (*new, *some)
                )
                keys.remove(some)
                keys.add(new)
            else:
                database.execute("DELETE FROM docs WHERE part = %s AND id = %s", some)
                keys.remove(some)


def table(database: psycopg.Connection) -> dict[str, dict[str, Any]]:
    cursor = database.execute("SELECT * FROM docs")
    names = [column.name for column in cursor.description]
    rows = [dict(zip(names, row, strict=True)) for row in cursor]
    for row in rows:
        row["price"] = None if row["price"] is None else float(row["price"])
        row["data"] = None if row["data"] is None else base64.b64encode(row["data"]).decode()
    return {json.dumps([row["part"], row["id"]], separators=(",", ":")): row for row in rows}


def wal2json_events(database: psycopg.Connection) -> list[tuple[Any, ...]]:
    """Return what wal2json decodes, with a changed key as a deletion and an insertion."""
    options = "'format-version', '2', 'add-tables', 'public.docs'"
    query = f"SELECT data FROM pg_logical_slot_get_changes('w', NULL, NULL, {options})"

    def row(columns: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            c["name"]: JSON.get(c["name"], lambda v: v)(c["value"]) if c["value"] is not None else None
            for c in columns
        }

    def key(found: dict[str, Any]) -> str:
        return json.dumps([found["part"], found["id"]], separators=(",", ":"))

    found = list[tuple[Any, ...]]()
    for change in (json.loads(data) for (data,) in database.execute(query)):
        if (action := change["action"]) in "BCM":
            continue
        new = row(change["columns"]) if action in "IU" else None
        old = row(change["identity"]) if action in "UD" else None
        if action == "I":
            found.append(("c", key(new), None, new))
        elif action == "D":
            found.append(("d", key(old), old, None))
        elif key(old) == key(new):
            found.append(("u", key(new), None, new))
        else:
            found += [("d", key(old), old, None), ("c", key(new), None, new)]
    return found


def test_events_equal_those_of_wal2json(database):
    log, draw, keys = MemoryLog(), random.Random(0), set()
    capture = open_capture(log, database.url, "docs")
    catch_up(capture)  # an empty snapshot
    try:
        database.execute("SELECT pg_create_logical_replication_slot('w', 'wal2json')")
    except psycopg.errors.UndefinedFile:
        pytest.skip("wal2json is not installed")
    for _ in range(100):
        mutate(database, draw, keys)
    catch_up(capture)
    found, expected = events(log), wal2json_events(database)
    assert len(found) > 150 and sum("body" not in (event[3] or {"body": 0}) for event in found) > 5
    for ours, theirs in zip(found, expected, strict=True):
        if ours[0] == "c" and "body" not in theirs[3]:  # of a changed key: the value as it is now
            ours[3].pop("body", None)
        assert ours == theirs
    assert folded(log) == table(database)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_snapshot_under_writes_equals_the_table(database, monkeypatch, seed):
    """Rows of a chunk change between its query and its watermark; the capture is killed at any step."""
    monkeypatch.setattr(tables, "CHUNK", 7)
    monkeypatch.setattr("whorl.loop.capture.capture.BATCH", 5)
    log, draw, keys = MemoryLog(), random.Random(seed), set()
    for _ in range(60):
        mutate(database, draw, keys)
    if seed == 2:
        database.execute("ALTER TABLE docs REPLICA IDENTITY FULL")
    execute, left = PostgresSource._rows, [40]

    def rows(source: PostgresSource, query: str, *arguments: Any) -> list[tuple[Any, ...]]:
        if "emit_message" in query and left[0]:
            left[0] -= 1
            for _ in range(2):
                mutate(database, draw, keys)
            row = draw.choice(sorted(keys))
            database.execute("UPDATE docs SET title = 'late' WHERE part = %s AND id = %s", row)
        return execute(source, query, *arguments)

    monkeypatch.setattr(PostgresSource, "_rows", rows)
    for attempt in range(12):
        capture = open_capture(log, database.url, "docs")
        catch_up(capture, seed=100 * seed + attempt)
        capture.source.close()
    catch_up(open_capture(log, database.url, "docs"))
    assert folded(log) == table(database) and left[0] < 35


def test_row_that_is_logged_and_not_yet_visible_is_not_undone(database, monkeypatch):
    """A commit that waits for its standby is in the log before any snapshot sees it."""
    monkeypatch.setattr(tables, "CHUNK", 1)
    monkeypatch.setattr("whorl.loop.capture.capture.BATCH", 1)
    database.execute("INSERT INTO docs (id, part, title) VALUES (1, 'a', ''), (2, 'a', ''), (3, 'a', 'old')")
    log = MemoryLog()
    steps = open_capture(log, database.url, "docs").steps()
    assert [next(steps) for _ in range(2)] == ["read", "appended"] and len(events(log)) == 1
    database.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    database.execute("SELECT pg_reload_conf()")
    writer = psycopg.connect(database.url, autocommit=True)
    update = "UPDATE docs SET title = 'new' WHERE id = 3"
    waiting = threading.Thread(target=writer.execute, args=(update,))
    waiting.start()
    reading = threading.Thread(target=catch_up, args=(open_capture(log, database.url, "docs"),))
    time.sleep(0.2)
    reading.start()
    time.sleep(0.2)
    database.execute("SET synchronous_commit = local")
    database.execute("ALTER SYSTEM RESET synchronous_standby_names")
    database.execute("SELECT pg_reload_conf()")
    reading.join()
    waiting.join()
    writer.close()
    assert folded(log) == table(database)


def test_column_that_was_added_with_a_default_is_read_again(database):
    log = MemoryLog()
    database.execute("INSERT INTO docs (id, part) SELECT n, 'a' FROM generate_series(1, 5) n")
    capture = open_capture(log, database.url, "docs")
    catch_up(capture)
    database.execute("ALTER TABLE docs ADD COLUMN stock int DEFAULT 3")
    database.execute("DELETE FROM docs WHERE id = 1")
    catch_up(capture)
    assert folded(log) == table(database) and {row["stock"] for row in folded(log).values()} == {3}
    database.execute("ALTER TABLE docs DROP COLUMN title")
    capture.source.close()
    catch_up(open_capture(log, database.url, "docs"))
    assert folded(log) == table(database)


def test_heartbeat_advances_the_slot_of_a_quiet_table(database):
    log = MemoryLog()
    database.execute("INSERT INTO docs (id, part) VALUES (1, 'a')")
    database.execute("CREATE TABLE busy (body text)")
    capture = open_capture(log, database.url, "docs")
    catch_up(capture)
    for _ in range(2):
        before = capture.source.retained()
        database.execute(
            "INSERT INTO busy SELECT (SELECT string_agg(md5((n * i)::text), '') FROM generate_series(1, 280) i) "
            "FROM generate_series(1, 250) n"
        )
        grown = capture.source.retained()
        for _ in range(2):
            database.execute("CHECKPOINT")
            catch_up(capture)
    assert grown > before + 2_000_000 > capture.source.retained()
    assert len(events(log)) == 1
    capture.source.close()
    warnings: list[str] = []
    catch_up(open_capture(log, database.url, "docs", warnings))
    assert not warnings and len(events(log)) == 1


@pytest.mark.parametrize("cause", ["server was killed", "messages of others"])
def test_changes_behind_a_full_peek_are_read(database, monkeypatch, cause):
    """A killed server loses what was acknowledged since its last checkpoint; messages of others change no row."""
    log = MemoryLog()
    capture = open_capture(log, database.url, "docs")
    catch_up(capture)
    if cause == "server was killed":
        capture.source.acknowledge = lambda position: None
    for n in range(20):
        database.execute("INSERT INTO docs (id, part) VALUES (%s, 'a')", (n,))
        if cause == "messages of others":
            database.execute("SELECT pg_logical_emit_message(true, 'other', 'x') FROM generate_series(1, 30)")
    if cause == "server was killed":
        catch_up(capture)
    capture.source.close()
    database.execute("INSERT INTO docs (id, part) VALUES (99, 'b')")
    monkeypatch.setattr(postgres, "PEEK", 12)
    catch_up(open_capture(log, database.url, "docs"))
    assert folded(log) == table(database)


@pytest.mark.parametrize("loss", ["slot", "publication", "advanced"])
def test_slot_that_was_lost_is_reported_and_rebuilt(database, loss):
    log, warnings = MemoryLog(), []
    database.execute("INSERT INTO docs (id, part) SELECT n, 'a' FROM generate_series(1, 5) n")
    capture = open_capture(log, database.url, "docs", warnings)
    catch_up(capture)
    if loss == "slot":
        capture.source.release()
    elif loss == "publication":
        database.execute(f"DROP PUBLICATION {capture.source.slot}")
    database.execute("DELETE FROM docs WHERE id < 3")
    database.execute("UPDATE docs SET title = 'x' WHERE id = 3")
    if loss == "advanced":
        query = "SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())"
        database.execute(query, (capture.source.slot,))
    catch_up(capture)
    assert capture.source.slot in warnings[0] and folded(log) == table(database)
    database.execute("TRUNCATE docs")
    database.execute("INSERT INTO docs (id, part) VALUES (9, 'a')")
    catch_up(capture)
    assert folded(log) == table(database) and len(warnings) == 1


def test_server_that_is_away_is_waited_for(server, database):
    log, warnings = MemoryLog(), []
    capture = open_capture(log, database.url, "docs", warnings)
    catch_up(capture)
    database.execute("INSERT INTO docs (id, part) VALUES (1, 'a')")
    server.kill()
    assert [catch_up(capture) for _ in range(2)] == ["waiting"] * 2 and len(warnings) == 1
    server.start()
    assert catch_up(capture) == "idle" and [event[:2] for event in events(log)] == [("c", '["a",1]')]


def test_polling_outbox_and_triggers_lose_what_capture_has(database):
    """Each way keeps a copy of the keys. Two transactions overlap, a program skips the outbox, a restore skips triggers."""
    url, log = database.url, MemoryLog()
    database.execute("DROP TABLE docs")
    database.execute("CREATE TABLE docs (id int PRIMARY KEY, updated timestamptz DEFAULT now())")
    for name in ("outbox", "audit"):
        database.execute(f"CREATE TABLE {name} (number bigserial PRIMARY KEY, id int, deleted bool)")
    database.execute("""
        CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            INSERT INTO audit (id, deleted) VALUES (coalesce(NEW.id, OLD.id), NEW IS NULL); RETURN NULL;
        END $$;
        CREATE TRIGGER audited AFTER INSERT OR UPDATE OR DELETE ON docs FOR EACH ROW EXECUTE FUNCTION audit()
    """)  # fmt: skip
    copies: dict[str, set[int]] = {"polling": set(), "outbox": set(), "audit": set()}
    last: dict[str, Any] = {"polling": "-infinity", "outbox": 0, "audit": 0}
    capture = open_capture(log, url, "docs")

    def save(connection: psycopg.Connection, id: int) -> None:
        connection.execute("INSERT INTO docs (id) VALUES (%s)", (id,))
        connection.execute("INSERT INTO outbox (id, deleted) VALUES (%s, false)", (id,))

    def read() -> None:
        for updated, id in database.execute(
            "SELECT updated, id FROM docs WHERE updated > %s ORDER BY 1", (last["polling"],)
        ):
            copies["polling"].add(id)
            last["polling"] = updated
        for name in ("outbox", "audit"):
            query = f"SELECT number, id, deleted FROM {name} WHERE number > %s ORDER BY 1"
            for number, id, deleted in database.execute(query, (last[name],)):
                last[name] = number
                (copies[name].discard if deleted else copies[name].add)(id)
        catch_up(capture)

    for id in range(3):
        save(database, id)
    read()
    with psycopg.connect(url) as slow, psycopg.connect(url) as fast:
        save(slow, 3)
        save(fast, 4)
        fast.commit()
        read()
    read()
    database.execute("DELETE FROM docs WHERE id = 0")
    database.execute("SET session_replication_role = replica")
    database.execute("INSERT INTO docs (id) VALUES (5)")
    read()
    rows = {id for (id,) in database.execute("SELECT id FROM docs")}
    assert copies["polling"] ^ rows == {0, 3}  # a deletion, and a commit later than its time
    assert copies["outbox"] ^ rows == {
        0,
        3,
        5,
    }  # rows of other programs, and a number that appears behind a later one
    assert copies["audit"] ^ rows == {3, 5}
    assert {int(key) for key in folded(log)} == rows == {1, 2, 3, 4, 5}


def test_row_of_20_mb_is_quarantined_and_the_rest_flows(database):
    log, warnings = MemoryLog(), []
    capture = open_capture(log, database.url, "docs", warnings)
    catch_up(capture)
    query = "INSERT INTO docs (id, part, body) VALUES (1, 'a', 'x'), (2, 'a', repeat('0123456789', 2000000)), (3, 'a', 'x')"
    database.execute(query)
    catch_up(capture)
    assert [event[:2] for event in events(log)] == [("c", '["a",1]'), ("d", '["a",2]'), ("c", '["a",3]')]
    assert "quarantine" in warnings[0]


def test_tables_that_cannot_be_captured_are_refused(database):
    database.execute("CREATE TABLE keyless (a int)")
    with pytest.raises(ConfigError, match=r"keyless has no key(.|\n)*ADD PRIMARY KEY"):
        open_capture(MemoryLog(), database.url, "keyless")
    with pytest.raises(ConfigError, match=r"no table 'doc'(.|\n)*public.docs"):
        open_capture(MemoryLog(), database.url, "doc")
    database.execute("ALTER DATABASE " + database.info.dbname + " SET default_transaction_read_only = on")
    database.execute("CREATE ROLE reader LOGIN; GRANT SELECT ON docs TO reader")
    with pytest.raises(ConfigError, match="REPLICATION"):
        catch_up(open_capture(MemoryLog(), database.url.replace("whorl@", "reader@"), "docs"))


def test_visibility_by_snapshots():
    sees = visible("10:20:12,15")
    assert [xid for xid in range(5, 25) if sees(xid)] == [*range(5, 12), 13, 14, *range(16, 20)]
    sees = visible(f"{(1 << 32) - 3}:{(1 << 32) + 5}:{(1 << 32) + 1}")  # 32 bits have overflowed
    assert [sees(xid) for xid in ((1 << 32) - 4, 0, 1, 4, 5)] == [True, True, False, True, False]

"""The driver of captures: one append of whole transactions, then the acknowledgement; retries, quarantine, limits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from whorl.errors import ConfigError
from whorl.log.memory import MemoryLog
from whorl.log.port import LogUnavailableError
from whorl.loop.capture.capture import Capture, newest_position, run_capture
from whorl.loop.capture.change import HEARTBEAT, ROW_CHANGED, RowChange, Transaction, row_key
from whorl.loop.capture.source import (
    ChangeSource,
    SourceLostError,
    SourceOptions,
    SourceUnavailableError,
    open_source,
    scheme_of,
)
from whorl.loop.events import QUARANTINE


def put(key: str, text: str = "x", op: str = "c") -> RowChange:
    return RowChange(op, key, None, {"id": key, "body": text}, "docs")


class ListSource(ChangeSource):
    """Transactions of a list. lost: positions below it are gone. acknowledged: what the driver released."""

    connector = "list"

    def __init__(self, *transactions: Transaction) -> None:
        super().__init__(SourceOptions("list", "docs", "docs", Path()))
        self.transactions, self.lost, self.acknowledged, self.kept = list(transactions), -1, [], 0
        self.away, self.released = False, False

    def read(self, position):
        if self.away:
            raise SourceUnavailableError("the list is away")
        start = -1 if position is None else position["n"]
        if -1 < start < self.lost:
            raise SourceLostError("the list was cut")
        yield from [t for t in self.transactions if t.position["n"] > start]

    def acknowledge(self, position):
        self.acknowledged.append(position["n"])

    def retained(self):
        return self.kept

    def release(self):
        self.released = True

    def close(self):
        pass


def transaction(n: int, *changes: RowChange, **settings) -> Transaction:
    return Transaction(f"t{n}", {"n": n}, changes, 1e9 + n, **settings)


def run(capture: Capture, end: str = "idle") -> list[str]:
    points = []
    for point in capture.steps():
        points.append(point)
        if point == end:
            return points
    raise AssertionError


def keys(log: MemoryLog) -> list[tuple[str, str]]:
    return [(record.event().data["op"], record.key) for record in log.replay("docs")]


def test_killed_capture_appends_nothing_twice():
    log, source = MemoryLog(), ListSource(*(transaction(n, put(f"a{n}"), put(f"b{n}")) for n in range(3)))
    assert run(Capture(source, log, "docs"), "appended") == ["read", "appended"]
    assert source.acknowledged == []  # killed here
    assert newest_position(log, "docs", {"connector": "list"}) == {"n": 2}
    log.trim("docs", 0, 0)
    source.transactions.append(transaction(3, put("a3")))
    run(Capture(source, log, "docs"))
    assert source.acknowledged == [3]
    assert keys(log) == [("c", f"{k}{n}") for n in range(3) for k in "ab"] + [("c", "a3")]


def test_event_has_the_fields_of_debezium():
    log, place = MemoryLog(), str(Path("list").resolve())
    run(Capture(ListSource(transaction(0, put("a"), put("b"))), log, "docs"))
    _, second = (record.event() for record in log.replay("docs"))
    assert second.data == {
        "op": "c", "before": None, "after": {"id": "b", "body": "x"}, "ts_ms": 1_000_000_000_000,
        "source": {"connector": "list", "db": place, "table": "docs", "position": {"n": 0}, "snapshot": ""},
        "transaction": {"id": "t0", "total_order": 1},
    }  # fmt: skip


def test_heartbeat_moves_the_position_without_a_change():
    log, source = MemoryLog(), ListSource(transaction(0, put("a")), transaction(1))
    run(Capture(source, log, "docs"))
    assert source.acknowledged == [1] and newest_position(log, "docs", {"connector": "list"}) == {"n": 1}
    assert [record.event().type for record in log.replay("docs")] == [ROW_CHANGED, HEARTBEAT]
    source.read = lambda position: iter([transaction(2)])
    assert run(Capture(source, log, "docs")).count("acknowledged") == 1  # idle behind it


def test_source_and_log_that_are_away_are_named_once(monkeypatch):
    warnings: list[str] = []
    log, source = MemoryLog(), ListSource(transaction(0, put("a")))
    capture = Capture(source, log, "docs", warnings.append)
    steps, source.away = capture.steps(), True
    assert [next(steps) for _ in range(3)] == ["waiting"] * 3
    assert len(warnings) == 1 and "the list is away" in warnings[0] and capture.waiting
    source.away = False

    def full(*args):
        raise LogUnavailableError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(log, "append", full)
        assert [next(steps) for _ in range(2)] == ["read", "waiting"]
    assert [next(steps) for _ in range(4)] == ["read", "appended", "acknowledged", "idle"]
    assert keys(log) == [("c", "a")] and not capture.waiting


def test_once_ends_with_the_reason_if_the_source_stays_away():
    source, waits = ListSource(), []
    source.away = True
    stop = SimpleNamespace(wait=waits.append, is_set=lambda: False)
    with pytest.raises(SourceUnavailableError, match="the list is away"):
        run_capture(Capture(source, MemoryLog(), "docs"), stop, once=True)
    assert 30 < sum(waits) < 60


def test_huge_row_is_quarantined_and_the_rest_flows():
    log, warnings = MemoryLog(), []
    old = RowChange("u", "b", {"body": "y" * (17 << 20)}, {"body": "small"}, "docs")
    huge = put("c", "z" * (100 << 20))
    capture = Capture(ListSource(transaction(0, put("a"), old, huge, put("d"))), log, "docs", warnings.append)
    run(capture)
    assert keys(log) == [("c", "a"), ("u", "b"), ("d", "c"), ("c", "d")]
    assert [record.event().data["before"] for record in log.replay("docs")] == [None] * 4
    (rejected,) = log.replay(QUARANTINE)
    assert rejected.event().data["key"] == "c" and "104,857,6" in rejected.event().data["reason"]
    assert capture.rejected == 1 and len(warnings) == 1


def test_row_that_is_no_unicode_is_quarantined():
    log = MemoryLog()
    run(Capture(ListSource(transaction(0, put("a", "\ud800"), put("b"))), log, "docs"))
    assert keys(log) == [("d", "a"), ("c", "b")]


def test_snapshot_after_a_lost_position_deletes_what_it_lacks():
    log, warnings = MemoryLog(), []
    run(Capture(ListSource(transaction(0, put("gone"), put("stays")), transaction(1, put("b"))), log, "docs"))
    source = ListSource(
        transaction(8, put("stays", op="r"), snapshot="s2"), transaction(9, put("live")),
        transaction(10, put("new", op="r"), snapshot="s2", last=True),
    )  # fmt: skip
    source.lost = 5
    capture = Capture(source, log, "docs", warnings.append)
    run(capture)
    assert keys(log)[3:] == [("r", "stays"), ("c", "live"), ("d", "gone"), ("d", "b"), ("r", "new")]
    assert "the list was cut" in warnings[0]
    again = [t for t in source.transactions if t.position["n"] > 9]
    run(Capture(ListSource(*again), log, "docs"))  # killed behind the deletions
    assert len(keys(log)) == 8


def test_retained_bytes_have_an_alarm_and_a_limit():
    source, warnings = ListSource(transaction(0, put("a"))), []
    capture = Capture(source, MemoryLog(), "docs", warnings.append, limit=1000)
    steps, source.kept = capture.steps(), 300
    for _ in range(6):
        next(steps)
    assert len(warnings) == 1 and "keeps 300 bytes" in warnings[0] and not source.released
    source.kept = 1001
    next(steps)
    assert source.released and "given up" in warnings[-1]


def test_topic_of_another_source_is_refused():
    log = MemoryLog()
    run(Capture(ListSource(transaction(0, put("a"))), log, "docs"))
    source = ListSource()
    source.connector = "folder"
    with pytest.raises(Exception, match=r"another kind of source \(list\)(.|\n)*another --to"):
        run(Capture(source, log, "docs"))


def test_keys_of_rows():
    assert row_key([7]) == "7" and row_key(["a", 1, b"x"]) == '["a",1,"eA=="]'


@pytest.mark.parametrize(
    ("target", "table", "named"),
    [("nowhere", "", "there is no nowhere"), ("oracle://x", "t", "mariadb"), (".", "t", "no tables")],
)
def test_wrong_sources_are_refused(target, table, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception, match=named):
        open_source(dataclasses.replace(ListSource().options, target=target, table=table))


def test_kind_of_a_source_follows_from_its_name(tmp_path):
    (tmp_path / "text.db").write_text("no database")
    assert scheme_of(str(tmp_path)) == "folder" and scheme_of("mysql://h/d") == "mariadb"
    with pytest.raises(Exception, match="no SQLite database"):
        scheme_of(str(tmp_path / "text.db"))


@pytest.mark.parametrize(
    ("change", "named"),
    [({"target": "b"}, "another place"), ({"table": "rows"}, "another table")],
)
def test_another_source_does_not_delete_what_a_topic_has(change, named):
    log, source = MemoryLog(), ListSource(transaction(1, put("a")))
    run(Capture(source, log, "docs"))
    source.options = dataclasses.replace(source.options, **change)
    with pytest.raises(ConfigError, match=named):
        run(Capture(source, log, "docs"))
    assert len([*log.replay("docs")]) == 1

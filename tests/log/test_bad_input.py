"""Records that are too large or damaged, a full disk, cancelled appends, forks."""

from __future__ import annotations

import os
import time
import tracemalloc
from concurrent.futures import Future

import pytest

from whorl.errors import ConfigError, DataError
from whorl.log import Event, Position, TopicConfig, open_log
from whorl.log.event import UnreadableRecordError
from whorl.log.port import LogUnavailableError, OffsetRemovedError, RecordTooLargeError
from whorl.log.sqlite import SqliteLog
from whorl.log.writer import GroupCommit


@pytest.fixture
def log(tmp_path):
    with open_log(f"sqlite:{tmp_path / 'events.db'}") as opened:
        opened.create("t", TopicConfig(partitions=1))
        yield opened


def event(n: int, **fields) -> Event:
    return Event("e", "k", {"n": n}, **fields)


def test_a_record_of_100_mb_is_refused_without_a_copy_of_it(log):
    large = Event("e", "k", {"texts": [{"text": "x" * (100 << 20)}]})
    tracemalloc.start()
    try:
        with pytest.raises(
            RecordTooLargeError, match=r"at least 104,857,600 bytes\n  expected: at most 1,048,576"
        ):
            log.append("t", large)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("id", ["", "x" * 201, "line\nbreak", "naïve", "\ud800"])
def test_an_id_that_no_broker_takes_is_refused(log, id):
    with pytest.raises(DataError, match="1 to 200 ASCII characters"):
        log.append("t", event(0), event(1, id=id))
    assert list(log.replay("t")) == []


@pytest.mark.parametrize("when", [1e18, float("nan"), -1e12])
def test_a_time_beyond_the_calendar_is_refused(log, when):
    with pytest.raises(DataError, match="a time in seconds"):
        log.append("t", event(0, time=when))


@pytest.mark.parametrize("topic", ["", "a b", "a/b", "../x", "x" * 201, "naïve"])
def test_a_topic_that_no_broker_takes_is_refused(log, topic):
    with pytest.raises(ConfigError, match="letters, digits"):
        log.create(topic)


def test_a_damaged_value_is_unreadable_and_others_are_read_and_compacted(log):
    log.append("t", event(0), event(1), event(2))
    log._connection().execute("UPDATE records SET value = x'ff00fe' WHERE \"offset\" = 1")
    good, bad, last = log.replay("t")
    with pytest.raises(UnreadableRecordError, match=r"t/0, offset 1: .*UTF-8"):
        bad.event()
    assert (good.event().data["n"], last.event().data["n"]) == (0, 2)
    assert log.compact("t") == 2


def test_a_full_disk_is_an_error_and_the_log_works_when_there_is_room(tmp_path):
    class Small(SqliteLog):
        pages = 100

        def _connect(self):
            connection = super()._connect()
            connection.execute(f"PRAGMA max_page_count={self.pages}")
            return connection

    with Small(f"sqlite:{tmp_path / 'events.db'}") as log:
        log.create("t")
        written = []
        with pytest.raises(LogUnavailableError, match="the disk is full"):
            for n in range(1000):
                written += [n] * bool(log.append("t", Event("e", "k", {"n": n, "text": "x" * 5000})))
        assert [record.event().data["n"] for record in log.replay("t")] == written
        for connection in log._connections:
            connection.execute("PRAGMA max_page_count=10000")
        again = log.append("t", Event("e", "k", {"n": -1}))
        assert [position.offset for position in again] == [len(written)]


def test_a_cancelled_append_does_not_end_the_writer(log):
    futures = [log.submit("t", [event(n)]) for n in range(200)]
    cancelled = [n for n, future in enumerate(futures) if n % 3 == 0 and future.cancel()]
    log.append("t", event(200))
    assert sorted(set(range(201)) - set(cancelled)) == [r.event().data["n"] for r in log.replay("t")]


def test_one_wrong_submission_fails_alone():
    def write(batch):
        if any(topic == "wrong" for topic, *_ in batch):
            raise ValueError("wrong")
        time.sleep(0.05)  # so that the next ones wait together
        return [[Position(0, 0)] for _ in batch]

    writer = GroupCommit(write)
    futures: list[Future[list[Position]]] = [writer.submit(name, [], []) for name in ("a", "b", "wrong", "c")]
    writer.close()
    assert [future.exception() is None for future in futures] == [True, True, False, True]
    with pytest.raises(LogUnavailableError):
        writer.submit("a", [], [])


def test_a_log_of_before_a_fork_is_refused_in_the_child(log):
    child = os.fork()
    if child == 0:
        try:
            log.append("t", event(0))
        except LogUnavailableError as error:
            os._exit(7 if "forked" in str(error) else 1)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert log.append("t", event(1)) == [Position(0, 0)]


def test_a_reader_returns_what_it_has_before_a_missing_range_is_an_error(log):
    log.create("u", TopicConfig(partitions=1))
    log.append("t", event(0))
    log.append("u", *(event(n) for n in range(5)))
    with log.group("g", ["t", "u"]) as reader:
        reader.read(limit=1)
        reader.positions = {("t", 0): 0, ("u", 0): 0}
        log.trim("u", 0, 3)
        got, errors = [], 0
        for _ in range(64):  # partitions are read in random order: half of the reads meet the error first
            try:
                got += reader.read(timeout=0)
            except OffsetRemovedError:
                errors += 1
        assert len(got) == 1 and errors >= 1


def test_a_time_is_found_over_gaps(log):
    log.append("t", *(event(n) for n in range(20)))
    database = log._connection()
    database.execute('UPDATE records SET recorded = "offset" * 10')
    database.execute('DELETE FROM records WHERE "offset" IN (5, 6, 7)')  # as compaction does
    found = [log.find_offset("t", 0, when) for when in (-5, 0, 35, 45, 80, 190, 191)]
    assert [next((r.offset for r in log.fetch("t", 0, at)), 20) for at in found] == [0, 0, 4, 8, 8, 19, 20]
    log.trim("t", 0, 10)
    assert log.find_offset("t", 0, 20) == 10


def test_times_do_not_decrease_when_the_clock_is_set_back(log, monkeypatch):
    log.append("t", event(0))
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    log.append("t", event(1))
    one, two = log.replay("t")
    assert one.recorded == two.recorded

"""One suite for all back ends of the log."""

from __future__ import annotations

import os
import secrets
import threading
import time
from pathlib import Path

import pytest
from tests.support.log.groups import read_all
from tests.support.log.servers import KAFKA, Server, running

from whorl.errors import ConfigError
from whorl.log import Event, Log, OffsetRange, TopicConfig, open_log
from whorl.log.groups import FencedError
from whorl.log.port import OffsetRemovedError, RecordTooLargeError


@pytest.fixture(scope="module", params=["sqlite", "postgresql", "nats", "kafka"])
def server(request):
    """A server for all tests; None for SQLite. WHORL_TEST_KAFKA=HOST:PORT names another broker than Tansu."""
    if request.param == "sqlite":
        yield None
    elif request.param == "kafka" and (other := os.environ.get(KAFKA)):
        yield Server([], 0, f"kafka://{other}", Path())
    else:
        with running(request.param) as started:
            yield started


@pytest.fixture
def url(server, tmp_path):
    return f"sqlite:{tmp_path / 'events.db'}" if server is None else server.url


@pytest.fixture
def topic():
    """A new name: the tests share a server."""
    return f"t{secrets.token_hex(4)}"


@pytest.fixture
def log(url):
    with open_log(url) as opened:
        yield opened


@pytest.fixture
def needs(server, log):
    """Skip a test that needs what the back end or its broker lacks."""

    def skip(what: str) -> None:
        if missing := {**dict(log.guarantees.misses), **(server.misses if server else {})}.get(what):
            pytest.skip(f"{what}: {missing}")

    return skip


def numbers(log: Log, topic: str) -> list[int]:
    return [record.event().data["n"] for record in log.replay(topic)]


def fill(log: Log, n: int, topic: str, keys: int = 10) -> None:
    log.append(topic, *(Event("e", f"key {i % keys}", {"n": i}) for i in range(n)))


def test_records_of_a_key_keep_their_order_over_a_new_opening(url, topic):
    with open_log(url) as log:
        log.create(topic)
        fill(log, 100, topic)
    with open_log(url) as log:
        by_key: dict[str, list[int]] = {}
        for record in log.replay(topic):
            by_key.setdefault(record.key, []).append(record.event().data["n"])
        assert len(by_key) == 10 and all(own == sorted(own) and len(own) == 10 for own in by_key.values())
        assert sum(end - first for first, end in log.bounds(topic)) == 100


def test_an_event_is_written_once_however_often_it_is_sent(log, topic, needs):
    needs("duplicates")
    log.create(topic)
    event = Event("e", "k", {"n": 1})
    first = log.append(topic, event)
    assert log.append(topic, event, event) == [*first, *first]
    assert numbers(log, topic) == [1]


def test_writers_share_the_log(log, topic):
    log.create(topic)

    def write(number: int) -> None:
        for i in range(20):
            log.append(topic, Event("e", f"writer {number}", {"n": number * 100 + i}))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers(log, topic)) == sorted(w * 100 + i for w in range(8) for i in range(20))


def test_a_reader_beside_two_writing_processes_sees_no_gap(url, topic):
    """An offset never appears before a smaller one, whichever transaction commits first."""
    with open_log(url) as log, open_log(url) as one, open_log(url) as two:
        log.create(topic, TopicConfig(partitions=1))

        def write(own: Log, number: int) -> None:
            for i in range(25):
                own.append(topic, *(Event("e", f"{number}", {"n": i}) for _ in range(1 + i % 3)))

        threads = [
            threading.Thread(target=write, args=pair) for pair in ((one, 0), (one, 1), (two, 2), (two, 3))
        ]
        for thread in threads:
            thread.start()
        seen: list[int] = []
        while any(thread.is_alive() for thread in threads) or len(seen) < log.bounds(topic)[0].next:
            seen += [record.offset for record in log.fetch(topic, 0, len(seen))]
        assert seen == list(range(4 * 49))


def test_members_share_partitions_and_groups_read_everything(log, topic):
    log.create(topic, TopicConfig(partitions=4))
    fill(log, 40, topic, keys=40)
    with (
        log.group(f"a {topic}", [topic]) as one,
        log.group(f"a {topic}", [topic]) as two,
        log.group(f"b {topic}", [topic]) as other,
    ):
        one.read(limit=1)  # of all partitions: it is alone
        two.read(limit=1, timeout=0)
        one._renew_at = 0.0  # its next heartbeat is due
        one.read(limit=1, timeout=0)  # learns that it is not
        assert sorted([*one.assigned, *two.assigned]) == [(topic, p) for p in range(4)]
        assert len(one.assigned) == 2
        for reader in (one, two):
            reader.positions = dict.fromkeys(reader.assigned, 0)
        got = [record.event().data["n"] for reader in (one, two) for record in read_all(reader, 20)]
        assert sorted(got) == list(range(40))
        assert len(read_all(other, 40)) == 40


def test_a_silent_member_is_replaced_and_its_late_commit_refused(log, topic):
    log.create(topic)
    fill(log, 20, topic)
    slow = log.group(f"g {topic}", [topic], session=0.2)
    assert len(read_all(slow, 20)) == 20  # and does not commit
    time.sleep(0.3)
    with log.group(f"g {topic}", [topic], session=5.0) as next_one:
        assert len(read_all(next_one, 20)) == 20
        next_one.commit()
        with pytest.raises(FencedError, match="the generation 1 is over"):
            slow.commit()
        assert log.lags(topic) == {f"g {topic}": 0}


def test_a_removed_offset_is_an_error_with_the_missing_range(log, topic, needs):
    needs("trim")
    log.create(topic, TopicConfig(partitions=1, retention_records=5))
    fill(log, 20, topic)
    assert log.retain(topic) == 15
    assert log.bounds(topic) == [OffsetRange(15, 20)]
    assert numbers(log, topic) == [15, 16, 17, 18, 19]
    with pytest.raises(OffsetRemovedError) as error:
        log.fetch(topic, 0, 3)
    assert (error.value.first, error.value.last) == (3, 14)


def test_retention_waits_for_a_group_but_not_for_ever(log, topic, needs):
    needs("trim")
    log.create(topic, TopicConfig(partitions=1, retention_records=1, max_lag=30))
    fill(log, 20, topic)
    with log.group(f"g {topic}", [topic]) as reader:
        reader.read(limit=5)
        reader.commit()
        assert log.retain(topic) == 5
        fill(log, 20, topic)
        assert log.retain(topic) == 34  # 35 behind
        with pytest.raises(OffsetRemovedError, match="records 5 to 38"):
            reader.read()


def test_compaction_keeps_the_newest_of_each_key(log, topic, needs):
    needs("compact")
    log.create(topic, TopicConfig(compact=True, tombstone_seconds=0))
    fill(log, 50, topic)
    log.append(topic, Event("e", "key 3", None))
    log.compact(topic, now=time.time() + 1)
    assert sorted(numbers(log, topic)) == [40, 41, 42, 44, 45, 46, 47, 48, 49]


def test_what_a_topic_does_not_allow_is_refused(log, topic):
    log.create(topic, TopicConfig(partitions=2, max_record_bytes=500))
    with pytest.raises(ConfigError, match="4 partitions has 2"):
        log.create(topic, TopicConfig(partitions=4))
    with pytest.raises(RecordTooLargeError, match=r"at most 500"):
        log.append(topic, Event("e", "k", {"text": "x" * 600}))
    with pytest.raises(ConfigError, match="no topic 'other'"):
        log.append("other", Event("e", "k", {}))
    assert numbers(log, topic) == []

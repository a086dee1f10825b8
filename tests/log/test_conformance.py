"""One suite for all back ends of the log."""

from __future__ import annotations

import threading
import time

import pytest

from whorl.errors import ConfigError
from whorl.log import Event, Log, OffsetRange, TopicConfig, open_log
from whorl.log.groups import FencedError
from whorl.log.port import OffsetRemovedError, RecordTooLargeError


@pytest.fixture(params=["sqlite"])
def url(request, tmp_path):
    yield f"sqlite:{tmp_path / 'events.db'}"


@pytest.fixture
def log(url):
    with open_log(url) as opened:
        yield opened


def numbers(log: Log, topic: str) -> list[int]:
    return [record.event().data["n"] for record in log.replay(topic)]


def fill(log: Log, n: int, topic: str = "t", keys: int = 10) -> None:
    log.append(topic, *(Event("e", f"key {i % keys}", {"n": i}) for i in range(n)))


def test_records_of_a_key_keep_their_order_over_a_new_opening(url):
    with open_log(url) as log:
        log.create("t")
        fill(log, 100)
    with open_log(url) as log:
        by_key: dict[str, list[int]] = {}
        for record in log.replay("t"):
            by_key.setdefault(record.key, []).append(record.event().data["n"])
        assert len(by_key) == 10 and all(own == sorted(own) and len(own) == 10 for own in by_key.values())
        assert sum(end - first for first, end in log.bounds("t")) == 100


def test_an_event_is_written_once_however_often_it_is_sent(log):
    log.create("t")
    event = Event("e", "k", {"n": 1})
    first = log.append("t", event)
    assert log.append("t", event, event) == [*first, *first]
    assert numbers(log, "t") == [1]


def test_writers_share_the_log(log):
    log.create("t")

    def write(number: int) -> None:
        for i in range(20):
            log.append("t", Event("e", f"writer {number}", {"n": number * 100 + i}))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers(log, "t")) == sorted(w * 100 + i for w in range(8) for i in range(20))


def test_members_share_partitions_and_groups_read_everything(log):
    log.create("t", TopicConfig(partitions=4))
    fill(log, 40, keys=40)
    with (
        log.group("a", ["t"], session=0.3) as one,
        log.group("a", ["t"], session=0.3) as two,
        log.group("b", ["t"]) as other,
    ):
        one.read(limit=1)  # of all partitions: it is alone
        two.read(limit=1, timeout=0)
        time.sleep(0.15)
        one.read(limit=1, timeout=0)  # learns that it is not
        assert sorted([*one.assigned, *two.assigned]) == [("t", p) for p in range(4)]
        assert len(one.assigned) == 2
        for reader in (one, two):
            reader.positions = dict.fromkeys(reader.assigned, 0)
        got = [record.event().data["n"] for reader in (one, two) for record in reader.read()]
        assert sorted(got) == list(range(40))
        assert len(other.read()) == 40


def test_a_silent_member_is_replaced_and_its_late_commit_refused(log):
    log.create("t")
    fill(log, 20)
    slow = log.group("g", ["t"], session=0.2)
    assert len(slow.read()) == 20  # and does not commit
    time.sleep(0.3)
    with log.group("g", ["t"], session=5.0) as next_one:
        assert len(next_one.read()) == 20
        next_one.commit()
        with pytest.raises(FencedError, match="the generation 1 is over"):
            slow.commit()
        assert log.lags("t") == {"g": 0}


def test_a_removed_offset_is_an_error_with_the_missing_range(log):
    log.create("t", TopicConfig(partitions=1, retention_records=5))
    fill(log, 20)
    assert log.retain("t") == 15
    assert log.bounds("t") == [OffsetRange(15, 20)]
    assert numbers(log, "t") == [15, 16, 17, 18, 19]
    with pytest.raises(OffsetRemovedError) as error:
        log.fetch("t", 0, 3)
    assert (error.value.first, error.value.last) == (3, 14)


def test_retention_waits_for_a_group_but_not_for_ever(log):
    log.create("t", TopicConfig(partitions=1, retention_records=1, max_lag=30))
    fill(log, 20)
    with log.group("g", ["t"]) as reader:
        reader.read(limit=5)
        reader.commit()
        assert log.retain("t") == 5
        fill(log, 20)
        assert log.retain("t") == 34  # 35 behind
        with pytest.raises(OffsetRemovedError, match="records 5 to 38"):
            reader.read()


def test_compaction_keeps_the_newest_of_each_key(log):
    log.create("t", TopicConfig(compact=True, tombstone_seconds=0))
    fill(log, 50)
    log.append("t", Event("e", "key 3", None))
    log.compact("t", now=time.time() + 1)
    assert sorted(numbers(log, "t")) == [40, 41, 42, 44, 45, 46, 47, 48, 49]


def test_what_a_topic_does_not_allow_is_refused(log):
    log.create("t", TopicConfig(partitions=2, max_record_bytes=500))
    with pytest.raises(ConfigError, match="4 partitions has 2"):
        log.create("t", TopicConfig(partitions=4))
    with pytest.raises(RecordTooLargeError, match=r"at most 500"):
        log.append("t", Event("e", "k", {"text": "x" * 600}))
    with pytest.raises(ConfigError, match="no topic 'other'"):
        log.append("other", Event("e", "k", {}))
    assert numbers(log, "t") == []

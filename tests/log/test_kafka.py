"""Kafka: tombstones, documents by the order of a topic, and librdkafka's mock of a cluster."""

from __future__ import annotations

import threading
import time

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from tests.support.log.groups import read_all
from tests.support.log.servers import running

from whorl.errors import ConfigError
from whorl.log import Event, OffsetRange, TopicConfig, kafka, open_log


@pytest.fixture(scope="module")
def url():
    with running("kafka") as server:
        yield server.url


@pytest.fixture(scope="module")
def mock():
    """A cluster of three brokers within this process; every topic has four partitions."""
    client = Producer({"test.mock.num.brokers": 3, "log_level": 0})
    for topic in (kafka.DOCUMENTS, "mocked"):
        client.list_topics(topic, timeout=10)  # makes it
    brokers = client.list_topics(timeout=10).brokers.values()
    yield "kafka://" + ",".join(f"{broker.host}:{broker.port}" for broker in brokers)


def test_a_mock_cluster_keeps_order_and_groups(mock):
    with open_log(mock) as log:
        log.create("mocked")
        log.append("mocked", *(Event("e", f"key {i % 10}", {"n": i}) for i in range(200)))
        assert sum(bound.next for bound in log.bounds("mocked")) == 200
        by_key: dict[str, list[int]] = {}
        for record in log.replay("mocked"):
            by_key.setdefault(record.key, []).append(record.event().data["n"])
        assert all(own == sorted(own) and len(own) == 20 for own in by_key.values())
        with log.group("g", ["mocked"]) as reader:
            assert len(read_all(reader, 200)) == 200
            reader.commit()
        assert log.lags("mocked") == {"g": 0}


def test_a_topic_of_the_broker_with_other_partitions_is_refused(mock):
    with open_log(mock) as log:
        Producer({"bootstrap.servers": mock.removeprefix("kafka://")}).list_topics("four", timeout=10)
        with pytest.raises(ConfigError, match="'four' of the broker has 4 partitions"):
            log.create("four", TopicConfig(partitions=2))


def test_a_tombstone_has_no_value_and_cloudevents_headers(url):
    event = Event("actor.erased", "naïve", None, version=2, id="one", source="phone", time=5.0)
    with open_log(url) as log:
        log.create("tombstones", TopicConfig(partitions=1))
        log.append("tombstones", event)
        ((record,),) = [[*log.replay("tombstones")]]
        assert record.event() == event and record.is_tombstone
    consumer = Consumer({"bootstrap.servers": url.removeprefix("kafka://"), "group.id": "x"})
    consumer.assign([TopicPartition("tombstones", 0, 0)])
    message = consumer.poll(10)
    consumer.close()
    assert message.value() is None and message.key() == "naïve".encode()
    assert dict(message.headers())["ce_type"] == b"actor.erased"


def test_of_two_proposals_of_a_document_one_wins(url):
    with open_log(url) as one, open_log(url) as two:
        won: list[tuple[int, int]] = []

        def propose(number: int, log) -> None:
            for version in range(10):
                while log.document("race")[1] < version:
                    time.sleep(0.005)
                if log.put_document("race", f"{number} {version}".encode(), version):
                    won.append((version, number))

        threads = [threading.Thread(target=propose, args=pair) for pair in enumerate((one, two))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(version for version, _ in won) == list(range(10))
        assert one.document("race") == two.document("race") == (f"{max(won)[1]} 9".encode(), 10)


def test_documents_begin_at_a_snapshot_when_older_proposals_are_removed(url, monkeypatch):
    with running("kafka") as server:
        monkeypatch.setattr(kafka, "SNAPSHOT", 10)
        with open_log(server.url) as log:
            for n in range(25):
                assert log.put_document(f"d{n % 3}", str(n).encode(), n // 3)
            expected = {name: log.document(name) for name in log.document_names("d")}
            snapshots = [m.offset() for m in log._reader(kafka.DOCUMENTS, 0).fetch(0, 100) if m.key() == b""]
            assert len(snapshots) == 2
        with open_log(server.url) as log:  # as if the broker had removed the records before the last snapshot
            log._folded = log._kept = snapshots[-1] - 1
            log._complete, log._contents = False, {}
            assert {name: log.document(name) for name in log.document_names("d")} == expected


def test_settings_of_the_url_reach_the_client(url):
    with pytest.raises(ConfigError, match="kafka://HOST:PORT"):
        open_log(f"{url}?security.protocol=nonsense")
    with open_log(f"{url}?linger.ms=0&fetch.wait.max.ms=20") as log:
        log.create("settings", TopicConfig(partitions=1))
        log.append("settings", Event("e", "k", {}))
        assert log.bounds("settings") == [OffsetRange(0, 1)]

"""A log in Kafka, or a broker with its protocol: `kafka://HOST:PORT,HOST:PORT?SETTING=VALUE`.

The settings are those of librdkafka, such as `security.protocol=SASL_SSL`. Events are CloudEvents in structured mode; a
tombstone has no value, as compaction requires, and its attributes are headers (binary mode).

Documents are a topic of one partition, `whorl.documents`. Kafka cannot compare and set, but its order decides: a record
proposes a version, and takes effect if that follows the version before it. All clients read the same order, so all agree.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any
from urllib.parse import parse_qsl

import orjson
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from whorl.errors import ConfigError, DataError
from whorl.log import port
from whorl.log.event import Event, LogRecord
from whorl.log.partitioning import partition_of
from whorl.log.port import OffsetRange, OffsetRemovedError, Position, TopicConfig

DOCUMENTS = "whorl.documents"
SNAPSHOT = 10_000  # proposals between two records of all documents
SECONDS = 10.0  # wait for an answer
_MAX_BYTES = 100 << 20
_ATTRIBUTES = ("specversion", "id", "source", "type", "subject", "time", "dataschema")
_KEPT = {"message.timestamp.type": "LogAppendTime", "retention.ms": "-1", "retention.bytes": "-1"}
_CLIENT = {"log_level": 0, "error_cb": lambda error: None, "reconnect.backoff.max.ms": 500}
_PRODUCER = {
    "acks": "all", "enable.idempotence": True, "linger.ms": 1, "message.timeout.ms": 30_000,
    "message.max.bytes": _MAX_BYTES,
}  # fmt: skip
_CONSUMER = {
    "group.id": "whorl", "enable.auto.commit": False, "auto.offset.reset": "error", "enable.partition.eof": True,
    "fetch.wait.max.ms": 10, "fetch.error.backoff.ms": 50,
}  # fmt: skip
_Sent = tuple[int, str, bytes | None, dict[str, str]]  # partition, key, value, headers


class KafkaLog(port.Log):
    """See the top of this file. Raises LogUnavailableError: no broker answers."""

    guarantees = port.Guarantees(
        survives="loss of all replicas but min.insync.replicas (acks=all); one broker alone may not flush its disk",
        duplicates="repeats by the client itself (idempotent producer), not an id that is appended again",
        misses=(
            ("compact", "the broker compacts in the background, by its own settings"),
            ("duplicates", "the broker does not compare ids"),
        ),
    )

    def __init__(self, url: str) -> None:
        super().__init__(url)
        servers, _, settings = url.removeprefix("kafka://").partition("?")
        self._settings = {"bootstrap.servers": servers.rstrip("/"), **_CLIENT, **dict(parse_qsl(settings))}
        self._lock, self._order = threading.RLock(), threading.Lock()  # of documents, of the producer
        self._readers = dict[tuple[str, int], _PartitionReader]()
        self._contents = dict[str, tuple[bytes, int]]()  # the documents, before the offset `_folded`
        self._folded, self._kept, self._complete = 0, 0, True
        try:
            self._admin, self._producer = AdminClient(self._settings), Producer(_PRODUCER | self._settings)
            self._admin.list_topics(timeout=SECONDS)
        except KafkaException as error:
            if error.args[0].code() == KafkaError._INVALID_ARG:
                raise ConfigError(f"{url}: {error.args[0].str()}", expected="kafka://HOST:PORT") from error
            raise self._unavailable(error) from error
        self._poller = threading.Thread(target=self._poll, name="whorl-kafka", daemon=True)
        self._poller.start()
        self._make_topic(DOCUMENTS, 1, {})
        self._restart_documents()

    def _poll(self) -> None:
        while not self._closed:
            self._producer.poll(0.1)

    def _make(self, topic: str, config: TopicConfig) -> None:
        settings = {"max.message.bytes": str(config.max_record_bytes + 4096)}
        if config.compact:
            seconds = int(config.tombstone_seconds)
            settings |= {"cleanup.policy": "compact", "delete.retention.ms": f"{seconds}000"}
        self._make_topic(topic, config.partitions, settings)

    def _make_topic(self, topic: str, partitions: int, settings: dict[str, str]) -> None:
        found = self._admin.list_topics(timeout=SECONDS).topics.get(topic)
        try:
            if found is None:
                made = self._admin.create_topics([NewTopic(topic, partitions, config=_KEPT | settings)])
                made[topic].result(SECONDS)
        except (KafkaException, TimeoutError) as error:  # another client was faster, or it may not be made
            if (found := self._admin.list_topics(timeout=SECONDS).topics.get(topic)) is None:
                raise self._unavailable(error) from error
        if found and len(found.partitions) != partitions and topic != DOCUMENTS:
            raise ConfigError(
                f"the topic {topic!r} of the broker has {len(found.partitions)} partitions",
                expected=str(partitions), do="delete it, or give another name",
            )  # fmt: skip

    def submit(self, topic: str, events: Sequence[Event]) -> Future[list[Position]]:
        self._check_open()
        config, sent = self.topic(topic), list[_Sent]()
        for event, value in zip(events, port.checked(config, topic, events, _MAX_BYTES), strict=True):
            attributes = orjson.loads(value) if event.data is None else {}
            headers = {f"ce_{name}": attributes[name] for name in _ATTRIBUTES if attributes}
            partition = partition_of(event.key, config.partitions)
            sent.append((partition, event.key, None if attributes else value, headers))
        return self._send(topic, sent)

    def _send(self, topic: str, sent: Sequence[_Sent]) -> Future[list[Position]]:
        future: Future[list[Position]] = Future()
        future.set_running_or_notify_cancel()  # it cannot be cancelled
        places = dict[int, Position]()

        def delivered(i: int, error: KafkaError | str | None, message: Message) -> None:
            places[i] = Position(message.partition(), message.offset())
            if error is None and (message.offset() is None or message.offset() < 0):
                error = (
                    "the broker took a repeat for known, without its offset"  # and may never have stored it
                )
            if error is not None and not future.done():
                future.set_exception(self._unavailable(error))
            if len(places) == len(sent) and not future.done():
                future.set_result([places[n] for n in range(len(sent))])

        if not sent:
            future.set_result([])
        with self._order:  # events of one key stay in order
            for i, (partition, key, value, headers) in enumerate(sent):
                done = lambda error, message, i=i: delivered(i, error, message)  # noqa: E731
                self._produce(topic, value, key, partition, headers=headers, on_delivery=done)
        return future

    def _produce(self, *arguments: Any, **options: Any) -> None:
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                self._producer.produce(*arguments, **options)
                return
            except BufferError as error:  # its queue is full
                if time.monotonic() > deadline:
                    raise self._unavailable(error) from error
                self._producer.poll(0.05)
            except KafkaException as error:
                if not error.args[0].fatal():
                    raise self._unavailable(error) from error
                lost, self._producer = self._producer, Producer(_PRODUCER | self._settings)
                lost.purge()
                lost.flush(1)

    def bounds(self, topic: str) -> list[OffsetRange]:
        return [self._reader(topic, p).bounds() for p in range(self.topic(topic).partitions)]

    def fetch(self, topic: str, partition: int, offset: int, limit: int = 1000) -> list[LogRecord]:
        return [_record(message) for message in self._reader(topic, partition).fetch(offset, limit)]

    def trim(self, topic: str, partition: int, offset: int) -> None:
        place = TopicPartition(topic, partition, min(offset, self.bounds(topic)[partition].next))
        try:
            self._admin.delete_records([place])[place].result(SECONDS)
        except (KafkaException, TimeoutError) as error:
            raise self._unavailable(error) from error

    def compact(self, topic: str, now: float | None = None) -> int:
        return 0

    def document(self, name: str) -> tuple[bytes, int]:
        with self._lock:
            self._fold()
            return self._contents.get(name, (b"", 0))

    def put_document(self, name: str, content: bytes, version: int) -> bool:
        with self._lock:
            if self.document(name)[1] != version:
                return False
            ((_, offset),) = self._send(DOCUMENTS, [(0, name, content, {"version": str(version)})]).result()
            accepted = self._fold(offset)
            if offset % SNAPSHOT == SNAPSHOT - 1:
                stored = {
                    name: (content.decode("latin-1"), v) for name, (content, v) in self._contents.items()
                }
                snapshot = (0, "", orjson.dumps(stored), {"snapshot": str(self._folded)})
                self._send(DOCUMENTS, [snapshot]).result()
                self._admin.delete_records(
                    [TopicPartition(DOCUMENTS, 0, self._folded)]
                )  # where the broker can
            return accepted

    def document_names(self, prefix: str) -> list[str]:
        with self._lock:
            self._fold()
            return [name for name in self._contents if name.startswith(prefix)]

    def _fold(self, until: int | None = None) -> bool:
        """Apply proposals to the end, or at least up to an offset; return whether the one there took effect."""
        accepted = False
        while until is None or self._folded <= until:
            try:
                found = self._reader(DOCUMENTS, 0).fetch(self._folded, 1000)
            except OffsetRemovedError:
                self._restart_documents()
                continue
            if not found and until is None:
                break
            for message in found:
                self._folded, headers = message.offset() + 1, dict(message.headers() or ())
                if self._complete and "version" in headers:
                    name, version = message.key().decode(), int(headers["version"])
                    if self._contents.get(name, (b"", 0))[1] == version:
                        self._contents[name] = (message.value() or b"", version + 1)
                        accepted |= message.offset() == until  # others may follow in the same fetch
                elif not self._complete and int(headers.get("snapshot", -1)) >= self._kept:
                    stored = orjson.loads(message.value())
                    self._contents = {name: (text.encode("latin-1"), v) for name, (text, v) in stored.items()}
                    self._complete, self._folded = True, int(headers["snapshot"])
                    break  # to the proposals between its making and its place
        if not self._complete:
            raise DataError(f"{self.url}: the topic {DOCUMENTS} lost its first records")
        return accepted

    def _restart_documents(self) -> None:
        """Begin at the first record that is kept. If it is not the first of all, a snapshot follows."""
        self._folded = self._kept = self._reader(DOCUMENTS, 0).bounds().first
        self._complete, self._contents = self._kept == 0, {}

    def close(self) -> None:
        if not self._closed:
            self._producer.flush(SECONDS)
            self._closed = True
            self._poller.join()
            for reader in self._readers.values():
                reader.consumer.close()

    def _reader(self, topic: str, partition: int) -> _PartitionReader:
        self._check_open()
        with self._order:
            if (topic, partition) not in self._readers:
                self._readers[topic, partition] = _PartitionReader(self, topic, partition)
            return self._readers[topic, partition]

    def _unavailable(self, error: object) -> port.LogUnavailableError:
        return port.unavailable(self.url, error, "a broker that answers")


class _PartitionReader:
    """A consumer of one partition. It is assigned for one fetch at a time, else it would poll the broker."""

    def __init__(self, log: KafkaLog, topic: str, partition: int) -> None:
        self._log, self._place, self._lock = log, (topic, partition), threading.Lock()
        self.consumer = Consumer(_CONSUMER | log._settings)

    def fetch(self, offset: int, limit: int) -> list[Message]:
        """Return messages from an offset on; empty only at the end."""
        with self._lock:
            return self._fetch(offset, limit)

    def bounds(self) -> OffsetRange:
        """Return the bounds. The end is that of a fetch: the one that a broker lists may be old."""
        with self._lock:
            first, end = self._listed()
            self._fetch(max(first, end - 1), 1)
            return OffsetRange(first, end if self._end < 0 else self._end)

    def _listed(self) -> tuple[int, int]:
        try:
            first, end = self.consumer.get_watermark_offsets(TopicPartition(*self._place), timeout=SECONDS)
            return first, end
        except KafkaException as error:
            raise self._log._unavailable(error) from error

    def _fetch(self, offset: int, limit: int) -> list[Message]:
        self.consumer.assign([TopicPartition(*self._place, offset)])
        try:
            deadline = time.monotonic() + SECONDS
            while time.monotonic() < deadline:
                if (message := self.consumer.poll(0.2)) is None:
                    continue
                if (error := message.error()) is None:
                    more = self.consumer.consume(limit - 1, 0) if limit > 1 else []
                    return [message, *(m for m in more if m.error() is None)]
                if error.code() == KafkaError._PARTITION_EOF:
                    return []
                if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
                    if offset < (first := self._listed()[0]):
                        raise OffsetRemovedError(*self._place, offset, first - 1)
                    return []
            raise self._log._unavailable("no answer")
        finally:
            self._end = self.consumer.get_watermark_offsets(TopicPartition(*self._place), cached=True)[1]
            self.consumer.unassign()


def _record(message: Message) -> LogRecord:
    key, value = (message.key() or b"").decode(errors="replace"), message.value()
    if value is None:
        headers = {name: (text or b"").decode(errors="replace") for name, text in message.headers() or ()}
        value = orjson.dumps({name: headers.get(f"ce_{name}", "") for name in _ATTRIBUTES} | {"data": None})
    recorded = message.timestamp()[1] / 1000
    return LogRecord(message.topic(), message.partition(), message.offset(), key, recorded, value)

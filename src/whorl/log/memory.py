"""A log in the memory of one process: for simulations and tests. `memory:`"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from operator import attrgetter

from whorl.log.event import Event, LogRecord
from whorl.log.partitioning import partition_of
from whorl.log.port import (
    FETCH,
    Guarantees,
    Log,
    OffsetRange,
    OffsetRemovedError,
    Position,
    TopicConfig,
    checked,
)

_OFFSET = attrgetter("offset")


class MemoryLog(Log):
    """See the top of this file. clock: time of the records and of groups."""

    guarantees = Guarantees(survives="nothing", duplicates="an id that the topic was given")

    def __init__(self, url: str = "memory:", clock: Callable[[], float] | None = None) -> None:
        super().__init__(url)
        self.clock, self._lock = clock or self.clock, threading.RLock()
        self._documents = dict[str, tuple[bytes, int]]()
        self._records, self._bounds = dict[str, list[list[LogRecord]]](), dict[str, list[OffsetRange]]()
        self._places = dict[tuple[str, str], Position]()

    def _make(self, topic: str, config: TopicConfig) -> None:
        with self._lock:
            self._records.setdefault(topic, [[] for _ in range(config.partitions)])
            self._bounds.setdefault(topic, [OffsetRange(0, 0)] * config.partitions)

    def submit(self, topic: str, events: Sequence[Event]) -> Future[list[Position]]:
        self._check_open()
        values = checked(self.topic(topic), topic, events)
        future: Future[list[Position]] = Future()
        with self._lock:
            future.set_result([self._append(topic, *pair) for pair in zip(events, values, strict=True)])
        return future

    def _append(self, topic: str, event: Event, value: bytes) -> Position:
        if (place := self._places.get((topic, event.id))) is None:
            partition = partition_of(event.key, len(self._records[topic]))
            first, end = self._bounds[topic][partition]
            place = self._places[topic, event.id] = Position(partition, end)
            self._bounds[topic][partition] = OffsetRange(first, end + 1)
            self._records[topic][partition].append(LogRecord(topic, *place, event.key, self.clock(), value))
        return place

    def bounds(self, topic: str) -> list[OffsetRange]:
        self.topic(topic)
        return list(self._bounds[topic])

    def fetch(self, topic: str, partition: int, offset: int, limit: int = FETCH) -> list[LogRecord]:
        with self._lock:
            if offset < (first := self._bounds[topic][partition].first):
                raise OffsetRemovedError(topic, partition, offset, first - 1)
            records = self._records[topic][partition]
            start = bisect_left(records, offset, key=_OFFSET)
            return records[start : start + limit]

    def trim(self, topic: str, partition: int, offset: int) -> None:
        with self._lock:
            first, end = self._bounds[topic][partition]
            first = max(first, min(end, offset))
            self._bounds[topic][partition] = OffsetRange(first, end)
            records = self._records[topic][partition]
            del records[: bisect_left(records, first, key=_OFFSET)]

    def compact(self, topic: str, now: float | None = None) -> int:
        oldest, removed = (now or self.clock()) - self.topic(topic).tombstone_seconds, 0
        with self._lock:
            for records in self._records[topic]:
                last, before = {record.key: record for record in records}, len(records)
                records[:] = [
                    record
                    for record in records
                    if record is last[record.key] and (record.recorded >= oldest or not record.is_tombstone)
                ]
                removed += before - len(records)
        return removed

    def document(self, name: str) -> tuple[bytes, int]:
        return self._documents.get(name, (b"", 0))

    def put_document(self, name: str, content: bytes, version: int) -> bool:
        with self._lock:
            if same := self.document(name)[1] == version:
                self._documents[name] = content, version + 1
            return same

    def document_names(self, prefix: str) -> list[str]:
        return [name for name in self._documents if name.startswith(prefix)]

    def close(self) -> None:
        self._closed = True

"""The interface of all back ends of the log: `Log`, the settings of a topic, and what an acknowledgement survives.

A topic has a fixed number of partitions; records of one key are in one partition, in order. `append` returns once its
records survive what `Log.guarantees` names. A back end gives the storage: `submit`, `fetch`, `bounds`, `trim`, `compact`
and documents with versions. Groups (`groups.py`), retention, replay and the search for a time are built on these and are
the same for all.
"""

from __future__ import annotations

import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from whorl.errors import ConfigError, DataError, WhorlError, shorten
from whorl.log.event import Event, LogRecord
from whorl.log.groups import GroupState, Reader

FETCH = 1000  # records at a time


class LogUnavailableError(WhorlError):
    """The log took nothing: a full disk, or a broker that is away. The same events may be sent again."""


class RecordTooLargeError(DataError):
    """An event is larger than its topic allows."""


class OffsetRemovedError(DataError):
    """Retention removed records before a reader came to them. first, last: the missing offsets."""

    def __init__(self, topic: str, partition: int, first: int, last: int) -> None:
        self.topic, self.partition, self.first, self.last = topic, partition, first, last
        super().__init__(
            f"{topic}/{partition}: the records {first} to {last} were removed by retention",
            expected=f"an offset from {last + 1}",
            do="rebuild the view from what is left (`whorl loop --rebuild`), or keep more (retention_seconds of the topic)",
        )

    def __reduce__(self) -> tuple[type[OffsetRemovedError], tuple[str, int, int, int]]:
        return OffsetRemovedError, (self.topic, self.partition, self.first, self.last)


class TopicConfig(BaseModel):
    """Settings of a topic."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    partitions: int = Field(default=4, ge=1, le=1024, description="fixed: keys would move")
    retention_seconds: float | None = Field(default=None, gt=0, description="older records may be removed")
    retention_records: int | None = Field(default=None, ge=1, description="per partition; older ones may go")
    compact: bool = Field(default=False, description="keep only the newest record of each key")
    tombstone_seconds: float = Field(
        default=86400.0, ge=0, description="compaction keeps a tombstone so long"
    )
    max_lag: int = Field(default=10_000_000, ge=1, description="retention waits for groups behind by less")
    max_record_bytes: int = Field(default=1 << 20, ge=64, description="larger events are refused")


class Position(NamedTuple):
    """The place of a record."""

    partition: int
    offset: int


class OffsetRange(NamedTuple):
    """Offsets of a partition: the first that is kept, and the next to be written."""

    first: int
    next: int


@dataclass(frozen=True)
class Guarantees:
    """The guarantees of a back end.

    Attributes:
        survives: what an acknowledged record survives. duplicates: which repeated appends it recognises.
        misses: operation -> why this back end lacks it.
    """

    survives: str
    duplicates: str
    misses: tuple[tuple[str, str], ...] = ()


class Log(ABC):
    """A log of events. A context manager; its methods may be called from any thread."""

    guarantees: ClassVar[Guarantees]
    clock: Callable[[], float] = time.time  # of groups; a simulation has its own

    def __init__(self, url: str) -> None:
        self.url, self._closed, self._process = url, False, os.getpid()
        self._known = dict[str, TopicConfig]()

    def create(self, topic: str, config: TopicConfig | None = None) -> TopicConfig:
        """Create a topic unless it exists, and return its settings, which are a document of the log.

        Raises:
            ConfigError: no name of a topic, or it exists with another number of partitions.
        """
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}", topic):
            expected = "1 to 200 letters, digits, dots, hyphens and underscores"
            raise ConfigError(f"the topic {shorten(topic)!r}", expected=expected)
        asked = (config or TopicConfig()).model_dump_json().encode()
        self.put_document(f"topic/{topic}", asked, 0)  # the first of several decides
        found = self.topic(topic)
        if config is not None and config.partitions != found.partitions:
            raise ConfigError(
                f"the topic {topic!r} with {config.partitions} partitions has {found.partitions}",
                expected="the same number: keys would move to other partitions and lose their order",
                do="copy it into a new log with `whorl log copy --partitions`",
            )
        self._make(topic, found)
        return found

    @abstractmethod
    def _make(self, topic: str, config: TopicConfig) -> None:
        """Make the partitions of a topic, unless they exist."""

    def topics(self) -> dict[str, TopicConfig]:
        """Return name -> settings of all topics."""
        names = sorted(self.document_names("topic/"))
        return {n.removeprefix("topic/"): TopicConfig.model_validate_json(self.document(n)[0]) for n in names}

    @abstractmethod
    def submit(self, topic: str, events: Sequence[Event]) -> Future[list[Position]]:
        """Begin to append events; the result is there once all of them are durable.

        An event whose id is in the topic already is not written again: its first position is returned, as far as
        `guarantees.duplicates` reaches.

        Raises:
            RecordTooLargeError, ConfigError (no such topic), at once. From the result: LogUnavailableError.
        """

    def append(self, topic: str, *events: Event, timeout: float = 60.0) -> list[Position]:
        """Append events; return their positions once they are durable. Raises as `submit`."""
        try:
            return self.submit(topic, events).result(timeout)
        except TimeoutError:
            problem = f"no acknowledgement within {timeout:g} s"
            raise unavailable(self.url, problem, "a back end that answers") from None

    @abstractmethod
    def bounds(self, topic: str) -> list[OffsetRange]:
        """Return the bounds of every partition."""

    @abstractmethod
    def fetch(self, topic: str, partition: int, offset: int, limit: int = FETCH) -> list[LogRecord]:
        """Return up to `limit` records from an offset on; empty at the end.

        Raises:
            OffsetRemovedError: retention removed the offset.
        """

    @abstractmethod
    def trim(self, topic: str, partition: int, offset: int) -> None:
        """Remove the records before an offset."""

    @abstractmethod
    def compact(self, topic: str, now: float | None = None) -> int:
        """Keep the newest record of each key; remove tombstones older than `tombstone_seconds`. Returns how many went."""

    def find_offset(self, topic: str, partition: int, when: float) -> int:
        """Return the offset from which records were recorded at `when` or later; the next offset if none is so new."""
        first, end = self.bounds(topic)[partition]
        while first < end:  # times do not decrease within a partition
            middle = (first + end) // 2
            try:
                found = self.fetch(topic, partition, middle, 1)
            except OffsetRemovedError as error:
                first = error.last + 1
                continue
            if found and found[0].recorded < when:
                first = found[0].offset + 1
            else:
                end = middle
        return first

    @abstractmethod
    def document(self, name: str) -> tuple[bytes, int]:
        """Return a document and its version; (b"", 0) if it does not exist."""

    @abstractmethod
    def put_document(self, name: str, content: bytes, version: int) -> bool:
        """Replace a document if it has this version (0: none); return whether it had."""

    @abstractmethod
    def document_names(self, prefix: str) -> list[str]:
        """Return the names of the documents that begin with `prefix`."""

    @abstractmethod
    def close(self) -> None:
        """Wait for what was submitted, and close."""

    def group(self, name: str, topics: Sequence[str], *, session: float = 10.0) -> Reader:
        """Return a new member of a group. Members share the partitions; each group reads everything.

        session: seconds without a `read` or `commit` after which others take the member's partitions.
        """
        return Reader(self, name, topics, session=session)

    def lags(self, topic: str) -> dict[str, int]:
        """Return group -> records that it has still to read, of the groups that read the topic."""
        bounds = self.bounds(topic)
        return {
            name: sum(max(0, b.next - max(b.first, state.committed(topic, p))) for p, b in enumerate(bounds))
            for name, state in self._groups().items()
            if topic in state.topics
        }

    def replay(
        self, topic: str, start: float = 0.0, bounds: Sequence[OffsetRange] | None = None
    ) -> Iterator[LogRecord]:
        """Yield the records of a topic up to now, partition by partition.

        Args:
            start: time of the record from which to begin. bounds: offsets of every partition in its place.

        Raises:
            OffsetRemovedError: from `bounds`.
        """
        now = self.bounds(topic)
        for partition, (first, end) in enumerate(bounds or now):
            offset = self.find_offset(topic, partition, start) if start else first
            while offset < end:
                records = self.fetch(topic, partition, offset, min(FETCH, end - offset))
                if not records:
                    break
                yield from (record for record in records if record.offset < end)
                offset = records[-1].offset + 1

    def retain(self, topic: str, now: float | None = None) -> int:
        """Remove what the settings of the topic let go, and return the number of offsets removed.

        Records that a group has still to read are kept, unless the group is `max_lag` records behind.
        """
        config, now = self.topic(topic), now or time.time()
        groups = [state for state in self._groups().values() if topic in state.topics]
        removed = 0
        for partition, (first, end) in enumerate(self.bounds(topic)):
            bound = first
            if config.retention_seconds is not None:
                bound = max(bound, self.find_offset(topic, partition, now - config.retention_seconds))
            if config.retention_records is not None:
                bound = max(bound, end - config.retention_records)
            held = [state.committed(topic, partition) for state in groups]
            bound = min([bound, *(offset for offset in held if end - offset <= config.max_lag)])
            if bound > first:
                self.trim(topic, partition, bound)
                removed += bound - first
        return removed

    def topic(self, name: str) -> TopicConfig:
        """Return the settings of a topic. Raises ConfigError: no such topic."""
        if name in self._known:  # settings do not change
            return self._known[name]
        self._known = found = self.topics()
        if name not in found:
            raise ConfigError(
                f"{self.url} has no topic {name!r}", expected=", ".join(found) or "a log with topics",
                do="`whorl log info` lists them",
            )  # fmt: skip
        return found[name]

    def _check_open(self) -> None:
        if self._closed or self._process != os.getpid():
            raise LogUnavailableError(
                f"{self.url} {'is closed' if self._closed else 'was opened before this process was forked'}",
                do="open it again with open_log",
            )

    def _groups(self) -> dict[str, GroupState]:
        return {
            name.removeprefix("group/"): GroupState.decode(self.document(name)[0])
            for name in self.document_names("group/")
        }

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def unavailable(url: str, problem: object, expected: str) -> LogUnavailableError:
    """Return the error of a back end that took nothing."""
    return LogUnavailableError(f"{url}: {problem}", expected=expected, do="check the server, then try again")


def checked(config: TopicConfig, topic: str, events: Sequence[Event], limit: int = 1 << 40) -> list[bytes]:
    """Return the events encoded. limit: bytes that the back end takes. Raises RecordTooLargeError, DataError."""
    values, limit = list[bytes](), min(limit, config.max_record_bytes)
    for event in events:
        if not re.fullmatch(r"[ -~]{1,200}", event.id):
            raise DataError(
                f"the id {shorten(event.id)!r} of an event {event.type}", expected="1 to 200 ASCII characters"
            )
        if (size := _least_bytes(event.data)) <= limit:  # no copy of 100 MB is made to refuse it
            values.append(event.encode())
            size = len(values[-1])
        if size > limit:
            raise RecordTooLargeError(
                f"the event {event.type} {event.id} has at least {size:,} bytes",
                expected=f"at most {limit:,} (max_record_bytes of the topic {topic!r}, or of the broker)",
            )
    return values


def _least_bytes(value: Any) -> int:
    """Return a lower bound of the size of JSON."""
    if isinstance(value, Mapping):
        return sum(map(_least_bytes, value.values()))
    if isinstance(value, list | tuple) and value and not isinstance(value[0], int | float):
        return sum(map(_least_bytes, value))
    return len(value) if isinstance(value, str | list | tuple) else 1

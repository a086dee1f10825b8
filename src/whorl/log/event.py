"""Events, and the records that a log makes of them.

On disk and on the wire an event is JSON with the attributes of CloudEvents 1.0 (https://cloudevents.io, structured mode):

    {"specversion": "1.0", "id": "...", "source": "whorl", "type": "feedback.given", "subject": KEY,
     "time": "2026-11-30T10:00:00+00:00", "dataschema": "feedback.given/1", "data": {...}}

`id` names the event, not the attempt to send it: a retry has the same one. `time` is when it happened; a record also has the
time of its append, and the two may be far apart where a browser was offline. `data` of None is a tombstone: compaction then
removes the key.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import orjson

from whorl.errors import DataError, shorten

TOMBSTONE_END = b'"data":null}'  # of `Event.encode`, and of no other event
Upcaster = Callable[[dict[str, Any]], dict[str, Any]]


class UnreadableRecordError(DataError):
    """A record is not an event that this version reads. Readers move it to the quarantine and continue."""


def new_id() -> str:
    """Return a unique id of 28 characters; later ones sort behind earlier ones, so that indexes grow at their end."""
    return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened.

    Attributes:
        type: such as "feedback.given". key: decides the partition; events of one key keep their order.
        data: JSON values; None is a tombstone. version: of the schema of `data`.
        id: the same for every attempt to append it. source: who saw it. time: seconds since 1970.
    """

    type: str
    key: str
    data: Mapping[str, Any] | None
    version: int = 1
    id: str = field(default_factory=new_id)
    source: str = "whorl"
    time: float = field(default_factory=time.time)

    def encode(self) -> bytes:
        """Return the event as JSON.

        Raises:
            DataError: a value is not JSON, or text is not Unicode.
        """
        try:
            when = datetime.fromtimestamp(self.time, UTC).isoformat()
            return orjson.dumps(
                {
                    "specversion": "1.0", "id": self.id, "source": self.source, "type": self.type,
                    "subject": self.key, "time": when, "dataschema": f"{self.type}/{self.version}",
                    "datacontenttype": "application/json", "data": self.data,
                }
            )  # fmt: skip
        except (TypeError, ValueError, OverflowError, OSError) as error:
            raise DataError(
                f"the event {self.type} {self.id} cannot be written: {error}",
                expected="JSON, and a time in seconds",
            ) from None


@dataclass(frozen=True, slots=True)
class LogRecord:
    """An event at its place in the log.

    Attributes:
        offset: grows by one with each record of a partition; compaction leaves gaps.
        recorded: time of the append, seconds since 1970. value: as `Event.encode`.
    """

    topic: str
    partition: int
    offset: int
    key: str
    recorded: float
    value: bytes

    @property
    def is_tombstone(self) -> bool:
        """Whether the data are None."""
        return self.value.endswith(TOMBSTONE_END)

    def event(self, schemas: Mapping[str, Schema] | None = None) -> Event:
        """Return the event, in the newest version of its schema.

        Args:
            schemas: event type -> `Schema`; types without one are read unchanged.

        Raises:
            UnreadableRecordError: no UTF-8, no JSON, no event, or a version from the future.
        """
        place = f"{self.topic}/{self.partition}, offset {self.offset}"
        try:
            found = orjson.loads(self.value)
            kind, version = found["dataschema"].rsplit("/", 1)
            when = datetime.fromisoformat(found["time"]).timestamp()
            event = Event(
                kind, found["subject"], found["data"], int(version), found["id"], found["source"], when
            )
            if not (event.data is None or isinstance(event.data, dict)):
                raise TypeError("data is no object")
            if not all(isinstance(text, str) for text in (event.id, event.key, event.source)):
                raise TypeError("id, subject or source is no text")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise UnreadableRecordError(
                f"{place}: {shorten(repr(error))}", expected="an event as JSON in UTF-8 (docs/log.md)"
            ) from None
        return event if schemas is None or kind not in schemas else schemas[kind].upcast(event, place)


@dataclass(frozen=True)
class Schema:
    """The newest version of an event type, and how data of older versions become it.

    upcasters: version -> function from data of that version to data of the next.
    """

    version: int = 1
    upcasters: Mapping[int, Upcaster] = field(default_factory=dict)

    def upcast(self, event: Event, place: str = "") -> Event:
        """Return the event in this version. Raises UnreadableRecordError: it is from the future."""
        if event.version > self.version:
            raise UnreadableRecordError(
                f"{place}: {event.type} of version {event.version}",
                expected=f"at most {self.version}", do="upgrade Whorl",
            )  # fmt: skip
        data = event.data
        try:
            for version in range(event.version, self.version):
                data = data if data is None else self.upcasters[version](dict(data))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise UnreadableRecordError(
                f"{place}: {event.type} of version {event.version}: {shorten(repr(error))}",
                expected=f"data that become version {self.version}",
            ) from error
        if data is event.data:
            return event
        return Event(event.type, event.key, data, self.version, event.id, event.source, event.time)

"""Capture: read committed transactions, append them to the log, then acknowledge them to the source.

The position is in the newest record of the topic (`source.position`), so no second store can disagree with it. A batch of
whole transactions is one append. Killed between append and acknowledgement, the same events are read again with the same
ids, which the log recognises. `steps` stops where a process may die; `run_capture` drives it with a clock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import xxhash

from whorl.errors import ConfigError, DataError, shorten
from whorl.log.event import Event
from whorl.log.port import Log, LogUnavailableError, TopicConfig, checked
from whorl.loop.capture.change import RowChange, Transaction
from whorl.loop.capture.source import ChangeSource, SourceLostError, SourceUnavailableError
from whorl.loop.events import QUARANTINE, TOPICS

TOPIC = TopicConfig(partitions=1, max_record_bytes=16 << 20)  # one partition keeps the order of commits
BATCH = 2000  # changes of one append, more if one transaction has more
POLL_SECONDS = 0.2
LONGEST_WAIT = 30.0
NAMED = 5  # rejections that are warned of
RETAINED_BYTES = 4 << 30  # that a source may keep for a capture that is behind; the alarm is at a quarter
NAMES = {"connector": "kind of source", "db": "place", "table": "table"}  # of a record's source
Warn = Callable[[str], None]


class Capture:
    """One source into one topic. For one thread.

    Attributes:
        changes, rejected: numbers since the start. retained: bytes that the source keeps. waiting: what for, else "".
    """

    def __init__(
        self, source: ChangeSource, log: Log, topic: str, warn: Warn = lambda text: None, limit: int = RETAINED_BYTES
    ) -> None:  # fmt: skip
        self.source, self.log, self.topic, self.warn, self.limit = source, log, topic, warn, limit
        self.changes = self.rejected = self.retained = 0
        self.waiting, self._alarmed = "", False
        prepare_topic(log, topic)
        self._info = {"connector": source.connector, "db": source.options.place}

    def steps(self) -> Iterator[str]:
        """Do the work, and yield the name of what was done: "idle" at the newest change, "waiting" if something is away.

        Raises:
            ConfigError, DataError: the source cannot be captured.
        """
        position = newest_position(self.log, self.topic, {**self._info, "table": self.source.options.table})
        while True:
            try:
                found = False
                for batch in self._batches(position):
                    yield "read"
                    self._append(batch, position)
                    yield "appended"
                    position = batch[-1].position
                    self.source.acknowledge(position)
                    yield "acknowledged"
                    self._watch_retained()
                    found = found or any(transaction.changes for transaction in batch)  # heartbeats are idle
                self._watch_retained()
                for key, reason in self.source.rejected():
                    self._reject(key, reason, f"{key} {reason}")
                self.waiting = ""
                if not found:
                    yield "idle"
            except SourceLostError as error:
                self.warn(f"a new snapshot begins: {error}")
                position = None
            except (SourceUnavailableError, LogUnavailableError) as error:
                if not self.waiting:  # once, not at each attempt
                    self.warn(f"waits, and tries again: {error}")
                self.waiting = shorten(error.what)
                with suppress(SourceUnavailableError):
                    self._watch_retained()
                yield "waiting"

    def _batches(self, position: Mapping[str, Any] | None) -> Iterator[list[Transaction]]:
        batch, size = list[Transaction](), 0
        for transaction in self.source.read(position):
            batch.append(transaction)
            size += len(transaction.changes)
            if size >= BATCH or not transaction.changes:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _append(self, batch: Sequence[Transaction], position: Mapping[str, Any] | None) -> None:
        events = list[Event]()
        for number, transaction in enumerate(batch):
            if transaction.last and (stale := self._stale_keys(transaction, batch[: number + 1])):
                gone = replace(
                    transaction, id=f"{transaction.id}/gone", position=batch[number - 1].position if number else position,
                    changes=[RowChange("d", key, None, None, self.source.options.table) for key in stale],
                )  # fmt: skip
                events += gone.events(self._info)
            events += transaction.events(self._info)
        if not events:
            return
        try:
            self.log.append(self.topic, *events)
        except LogUnavailableError:
            raise
        except DataError:
            self.log.append(self.topic, *map(self._fitting, events))
        self.changes += len(events)

    def _fitting(self, event: Event) -> Event:
        """Return the event; without its previous row, or as a deletion after a rejection, if the log cannot take it."""
        assert event.data is not None
        for data in (event.data, {**event.data, "before": None}):
            try:
                checked(self.log.topic(self.topic), self.topic, [replace(event, data=data)])
                return replace(event, data=data)
            except DataError as error:
                problem = error.what
        self._reject(event.key, problem, event.id)
        return replace(event, data={**event.data, "op": "d", "before": None, "after": None})

    def _reject(self, key: str, reason: str, place: str) -> None:
        """Put a row into the quarantine; once, if the log recognises its place."""
        self.rejected += 1
        if self.rejected <= NAMED:
            self.warn(f"{shorten(key)} of {self.topic} is in the quarantine: {shorten(reason)}")
        id = f"rejected/{self.topic}/{xxhash.xxh3_128_hexdigest(place.encode())}"
        data = {"topic": self.topic, "key": shorten(key), "reason": shorten(reason)}
        self.log.append(QUARANTINE, Event("record.rejected", self.topic, data, id=id))

    def _stale_keys(self, last: Transaction, batch: Sequence[Transaction]) -> list[str]:
        """Return the keys of the topic that a complete snapshot did not touch: their deletion was missed."""
        live, began, name = dict[str, int](), None, last.snapshot
        for record in self.log.replay(self.topic):
            data = record.event().data or {}
            if began is None and data.get("source", {}).get("snapshot") == name:
                began = record.offset
                if not live:
                    return []
            if data.get("op", "d") == "d":  # or a heartbeat
                live.pop(record.key, None)
            else:
                live[record.key] = record.offset
        touched = {change.key for transaction in batch for change in transaction.changes}
        old = (key for key, offset in live.items() if began is None or offset < began)
        return [key for key in old if key not in touched]

    def _watch_retained(self) -> None:
        """Warn once when the source keeps much; give it up before it fills the disk."""
        self.retained = self.source.retained()
        kept = f"{self._info['db']} keeps {self.retained:,} bytes for a capture that is behind"
        if self.retained > self.limit:
            self.warn(f"{kept}, more than {self.limit:,}: they are given up, and the topic is rebuilt")
            self.source.release()
        elif self.retained > self.limit / 4 and not self._alarmed:
            self.warn(f"{kept}; from {self.limit:,} on they are given up")
        self._alarmed = self.retained > self.limit / 4


def prepare_topic(log: Log, topic: str) -> None:
    """Create the topic of a capture and the quarantine, unless they exist. Raises ConfigError: several partitions."""
    log.create(topic, TOPIC)
    if QUARANTINE not in log.topics():
        log.create(QUARANTINE, TOPICS[QUARANTINE])


def newest_position(log: Log, topic: str, source: Mapping[str, str]) -> Mapping[str, Any] | None:
    """Return the position of the newest record; None before the first.

    Raises:
        ConfigError: it is of another source, whose documents a snapshot of this one would delete.
    """
    first, end = log.bounds(topic)[0]
    records = log.fetch(topic, 0, end - 1, 1) if end > first else []
    data = records[0].event().data if records else None
    if data is None:
        return None
    for name, value in source.items():
        if (other := data["source"].get(name, value)) != value:
            problem = f"the topic {topic} has changes of another {NAMES[name]} ({other})"
            raise ConfigError(problem, expected=value, do="give another --to")
    position: Mapping[str, Any] | None = data["source"]["position"]
    return position


def run_capture(capture: Capture, stop: threading.Event, once: bool = False) -> None:
    """Capture until `stop` is set; with `once` until everything that is there is read.

    Raises:
        SourceUnavailableError: with `once`, the source or the log was away for a minute.
    """
    delay = POLL_SECONDS
    for point in capture.steps():
        if point == "idle" and once:
            return
        delay = min(2 * delay, LONGEST_WAIT) if point == "waiting" else POLL_SECONDS
        if once and delay == LONGEST_WAIT:
            raise SourceUnavailableError(capture.waiting, do="start it, then try again")
        if point in ("idle", "waiting"):
            stop.wait(delay)
        if stop.is_set():
            return

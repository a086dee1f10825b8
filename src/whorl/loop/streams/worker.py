"""A view as a member of its group: read, fold and commit in one transaction, then effects, then the group's offset.

`steps` is a generator that stops where a process may die or sleep. `run_views` drives it with a clock; a simulation drives
several, crashes some, and expects the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from whorl.errors import DataError, shorten
from whorl.log.event import Event, LogRecord
from whorl.log.groups import FencedError, Partition
from whorl.log.port import Log, OffsetRemovedError
from whorl.loop.events import QUARANTINE, SCHEMAS, TOPICS
from whorl.loop.streams.store import ViewStore
from whorl.loop.streams.view import FoldedView, ViewEffect, ViewItem

BATCH = 10_000  # records of one transaction
COMMIT_SECONDS = 1.0  # between commits to the group, which `whorl log info` and retention see
Perform = Callable[[Sequence[ViewEffect]], None]
UNREADABLE = (DataError, TypeError, KeyError, ValueError, AttributeError)


class ViewWorker:
    """One view, folded by one member of the group `view/NAME`. For one thread.

    Attributes:
        offsets: next offset of each partition that it owns. epochs: of its ownership.
    """

    def __init__(
        self, view: FoldedView, log: Log, store: ViewStore, perform: Perform = lambda effects: None,
        *, session: float = 10.0, limit: int = BATCH,
    ) -> None:  # fmt: skip
        self.view, self.log, self.store, self.perform, self.limit = view, log, store, perform, limit
        self.reader = log.group(f"view/{view.name}", view.topics, session=session)
        self.partitions = [(t, p) for t in view.topics for p in range(log.topic(t).partitions)]
        self.offsets, self.epochs = dict[Partition, int](), dict[Partition, int]()
        self._generation, self._commit_at = -1, 0.0
        if QUARANTINE not in log.topics():
            log.create(QUARANTINE, TOPICS[QUARANTINE])

    def steps(self) -> Iterator[str]:
        """Do the work, and yield the name of what was done: "idle" where nothing was left to read.

        Raises:
            OffsetRemovedError: retention removed records that the view has not read.
            DataError: the log ends before the offset of the view. LogUnavailableError, ViewsUnavailableError.
        """
        while True:
            records = self._read()
            if self.reader.generation != self._generation:
                self._take()
                yield "taken"
                continue
            if records:
                yield "read"
                try:
                    effects = self._fold(records)
                except FencedError:
                    self._step_back()
                    yield "fenced"
                    continue
                yield "folded"
                self.perform(effects)
                yield "performed"
            self._commit_group()
            yield "more" if len(records) >= self.limit else "idle"

    def close(self) -> None:
        """Leave the group, so that others take over at once."""
        self._commit_at = 0.0
        self._commit_group()
        self.reader.close()

    def _read(self) -> Sequence[LogRecord]:
        try:
            return self.reader.read(self.limit, timeout=0.0)
        except OffsetRemovedError:
            if self.reader.generation == self._generation:
                raise
            return ()  # of the group's offset, which may be behind the store's

    def _take(self) -> None:
        """Own the partitions that the group assigned, and read on from where the store is."""
        bounds = {topic: self.log.bounds(topic) for topic in self.view.topics}
        first = {(t, p): bounds[t][p].first for t, p in self.reader.assigned}
        taken = self.store.take(self.view.name, first)
        for (topic, number), (offset, _) in taken.items():
            if offset > (end := bounds[topic][number].next):
                raise DataError(
                    f"the view {self.view.name} has read {topic}/{number} to {offset}, where the log ends at {end}",
                    expected="the log that the view was made of", do=f"{self.view.rebuild} {self.view.name}",
                )  # fmt: skip
            self.reader.seek((topic, number), offset)
        self.offsets = {p: offset for p, (offset, _) in taken.items()}
        self.epochs = {p: epoch for p, (_, epoch) in taken.items()}
        self._generation = self.reader.generation

    def _fold(self, records: Sequence[LogRecord]) -> Sequence[ViewEffect]:
        items, rejected = list[ViewItem](), list[Event]()
        for record in records:
            try:
                event = record.event(SCHEMAS)
                value = self.view.read(event)
            except UNREADABLE as error:
                rejected.append(_rejection(record, error))
            else:
                if value is not None:
                    items.append(ViewItem(record, min(event.time, record.recorded), value))
        if rejected:
            self.log.append(QUARANTINE, *rejected)
        ends = {(r.topic, r.partition): r.offset + 1 for r in records}
        moves = {p: (self.offsets[p], end) for p, end in ends.items()}
        with self.store.batch(self.view.name, moves, self.epochs, self.partitions) as state:
            if rejected:
                state.add("stats", "rejected", len(rejected))
            effects = tuple(self.view.apply(state, items))
        self.offsets |= ends
        return effects

    def _step_back(self) -> None:
        """After a fence: read nothing more as the old owner, and take what the group now assigns."""
        for partition, offset in self.offsets.items():
            self.reader.seek(partition, offset)
        self._commit_at = 0.0
        self._commit_group()
        self._generation = -1

    def _commit_group(self) -> None:
        if (now := self.log.clock()) >= self._commit_at and self.reader.assigned:
            self._commit_at = now + COMMIT_SECONDS
            try:
                self.reader.commit()
            except FencedError:
                self._generation = -1


def _rejection(record: LogRecord, error: Exception) -> Event:
    place = f"{record.topic}/{record.partition}/{record.offset}"
    data = {
        "topic": record.topic, "partition": record.partition, "offset": record.offset,
        "reason": shorten(f"{type(error).__name__}: {error}"),
    }  # fmt: skip
    return Event("record.rejected", place, data, id=f"rejected/{place}", time=record.recorded)

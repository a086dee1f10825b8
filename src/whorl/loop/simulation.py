"""A seeded world in which the real views run: workers, stores, folds and groups, over a log in memory.

Time is virtual. Each step is drawn: a client sends a click, a worker goes to its next `yield`. Requests and replies are lost
and sent again, and copies arrive late. Workers crash before and after each commit and between effects, and sleep longer than
their session while others take over. Retention removes records as soon as it may. One seed gives one history, so a
violation is repeated by its seed (deterministic simulation, as FoundationDB and TigerBeetle are tested).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, cast

from whorl.log.event import Event, LogRecord
from whorl.log.groups import Reader
from whorl.log.memory import MemoryLog
from whorl.log.port import OffsetRemovedError, Position, TopicConfig
from whorl.loop.counter.cache import SECONDS, LocalCache
from whorl.loop.counter.counts import Counts
from whorl.loop.counter.likes import THUMBS, LikesView
from whorl.loop.events import FEEDBACK, FeedbackGiven, FeedbackKind
from whorl.loop.streams.runner import lag_of
from whorl.loop.streams.store import ViewStore
from whorl.loop.streams.view import FoldedView, ViewEffect
from whorl.loop.streams.worker import ViewWorker

ACTORS, ANSWERS, CLICKS, SESSION = 4, 3, 8, 10.0  # clicks of each actor; seconds
CONFIG = TopicConfig(partitions=2, retention_records=4, max_lag=16)
CRASH, STALL, LOSS, COPY = 0.02, 0.02, 0.2, 0.1  # chances


class SimulatedCrash(BaseException):
    """The process ends here."""


class SimulatedLog(MemoryLog):
    """Recognises no duplicates, and keeps what retention removes in `history`."""

    def __init__(self, world: SimulatedWorld) -> None:
        super().__init__(clock=lambda: world.now)
        self.history, self._members = list[LogRecord](), 0

    def _append(self, topic: str, event: Event, value: bytes) -> Position:
        if topic == FEEDBACK:
            self._places.pop((topic, event.id), None)
        place = super()._append(topic, event, value)
        if topic == FEEDBACK:
            self.history += self.fetch(topic, *place)
        return place

    def group(self, name: str, topics: Sequence[str], *, session: float = SESSION) -> Reader:
        reader = super().group(name, topics, session=session)
        reader.member = f"member {self._members}"
        self._members += 1
        return reader


class SimulatedViews(ViewStore):
    """Crashes before, within and after transactions."""

    def __init__(self, world: SimulatedWorld) -> None:
        self.crash: Callable[[], None] = lambda: None
        super().__init__("sqlite::memory:")
        self.crash = world.crash

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with super().transaction():
            yield
            self.crash()
        self.crash()

    def execute_many(self, query: str, rows: Sequence[Sequence[Any]]) -> None:
        super().execute_many(query, rows)
        self.crash()


class SimulatedWorld:
    """The world of one seed. A subclass plants a fault.

    Attributes:
        now: seconds. points: how often each step was done. surfaced: the error of a worker that cannot continue.
    """

    log_type: ClassVar[type[SimulatedLog]] = SimulatedLog
    store_type: ClassVar[type[SimulatedViews]] = SimulatedViews
    view: FoldedView = LikesView()

    def __init__(self, seed: int) -> None:
        self.random, self.now, self.risky = random.Random(seed), 1000.0, False
        self.log = self.log_type(self)
        self.log.create(FEEDBACK, CONFIG)
        self.store, self.cache = self.store_type(self), LocalCache(clock=lambda: self.now)
        self.counts = Counts(self.store, self.cache)
        self.clicks = {
            f"actor {a}": [self._click(f"actor {a}", n) for n in range(CLICKS)] for a in range(ACTORS)
        }
        self.waiting = {actor: list(clicks) for actor, clicks in self.clicks.items()}
        self.acknowledged, self.copies = set[str](), list[tuple[float, Event]]()
        self.workers: list[tuple[float, Iterator[str] | None]] = [(0.0, None), (0.0, None)]
        self.surfaced: OffsetRemovedError | None = None
        self.points: dict[str, int] = {}

    def run(self) -> list[str]:
        """Live through one history, and return the violations."""
        state = random.getstate()
        random.seed(self.random.random())  # the order in which readers visit partitions
        try:
            self._work(0)  # the group is there before retention
            while any(self.waiting.values()) and self.surfaced is None:
                self._step()
            self.log.append(FEEDBACK, *(event for _, event in self.copies))
            self.workers, self.now = [(0.0, None)], self.now + 2 * SESSION
            while self.surfaced is None and (
                self._work(0) != "idle" or lag_of(self.view, self.log, self.store)
            ):
                pass
            return self.violations()
        finally:
            random.setstate(state)

    def crash(self) -> None:
        if self.risky and self.random.random() < CRASH:
            raise SimulatedCrash

    def delivery(self, click: Event) -> Event:
        """Return the event of one delivery of a click."""
        return click

    def violations(self) -> list[str]:
        """Compare with a count by brute force, with the last click of each client, and with a replay."""
        done = self.store.offsets(self.view.name)
        read = [r for r in self.log.history if r.offset < done.get((r.topic, r.partition), (0, 0))[0]]
        last, seen = dict[tuple[str, str], str](), set[str]()
        for event in (record.event() for record in read):
            if event.data and event.version == 1 and event.id not in seen:
                last[event.key, f"{event.data['completion']}/0"] = event.data["kind"]
                seen.add(event.id)
        found = list[str]()
        answers = [f"answer {n}/0" for n in range(ANSWERS)]
        self.now += SECONDS
        for answer, count in self.counts.get(answers).items():
            kinds = [kind for (_, other), kind in last.items() if other == answer]
            if count != {"likes": kinds.count("like"), "dislikes": kinds.count("dislike")}:
                found.append(f"{answer}: {count}, by brute force {kinds}")
        if self.surfaced is None:
            if missing := self.acknowledged - seen:
                found.append(f"acknowledged and not read: {sorted(missing)}")
            for actor, clicks in self.clicks.items():
                clicked = {f"{c.data['completion']}/0": c.data["kind"] for c in clicks if c.data}
                if self.counts.mine(actor, list(clicked)) != clicked:
                    found.append(f"{actor} clicked {clicked}")
        if self._rows(self.store) != self._replayed(read):
            found.append("a replay gives other rows")
        return found

    def _click(self, actor: str, number: int) -> Event:
        completion, kind = f"answer {self.random.randrange(ANSWERS)}", self.random.choice(THUMBS)
        return FeedbackGiven(actor, completion, cast(FeedbackKind, kind)).event(f"{actor} {number}", self.now)

    def _step(self) -> None:
        self.now += self.random.expovariate(2.0)
        due = [event for time, event in self.copies if time <= self.now]
        self.copies = [copy for copy in self.copies if copy[0] > self.now]
        self.log.append(FEEDBACK, *due)
        if self.random.random() < 0.4:
            self._send(self.random.choice([actor for actor, left in self.waiting.items() if left]))
        else:
            self.risky = True
            self._work(self.random.randrange(len(self.workers)))
            self.risky = False
        if self.random.random() < 0.1:
            self.log.retain(FEEDBACK, self.now)
            self.counts.get([f"answer {n}/0" for n in range(ANSWERS)])

    def _send(self, actor: str) -> None:
        """Send the next click of an actor; it stays the next until its acknowledgement arrives."""
        event, chance = self.delivery(self.waiting[actor][0]), self.random.random
        if chance() < LOSS:  # the request
            return
        if chance() < COPY:
            self.copies.append((self.now + 30 * chance(), self.delivery(event)))
        if chance() < 0.05:  # of a version from the future
            self.log.append(FEEDBACK, dataclasses.replace(event, version=9, id=f"{event.id}, version 9"))
        self.log.append(FEEDBACK, event)
        if chance() >= LOSS:  # the reply
            self.acknowledged.add(event.id)
            self.waiting[actor].pop(0)

    def _work(self, number: int) -> str:
        """Take one step of a worker, which may be asleep or crash."""
        wake, steps = self.workers[number]
        if wake > self.now:
            return "asleep"
        if self.risky and self.random.random() < STALL:
            self.workers[number] = (self.now + self.random.uniform(0, 2 * SESSION), steps)
            return "asleep"
        try:
            if steps is None:
                worker = ViewWorker(self.view, self.log, self.store, self._perform, session=SESSION, limit=5)
                steps = worker.steps()
            point = next(steps)
        except SimulatedCrash:
            point, steps, wake = "crash", None, self.now + self.random.uniform(0, 2 * SESSION)
        except OffsetRemovedError as error:
            point, self.surfaced = "surfaced", error
        self.workers[number] = (wake, steps)
        self.points[point] = self.points.get(point, 0) + 1
        return point

    def _perform(self, effects: Sequence[ViewEffect]) -> None:
        for effect in effects:
            self.crash()
            self.cache.perform([effect])

    def _rows(self, store: ViewStore) -> list[tuple[Any, ...]]:
        return store.execute("SELECT name, key, value FROM view_rows ORDER BY name, key")

    def _replayed(self, read: Sequence[LogRecord]) -> list[tuple[Any, ...]]:
        log, store = MemoryLog(clock=lambda: self.now), ViewStore("sqlite::memory:")
        log.create(FEEDBACK, TopicConfig(partitions=CONFIG.partitions))
        for record in read:
            log._records[FEEDBACK][record.partition].append(record)
        for point in ViewWorker(self.view, log, store).steps():
            if point == "idle":
                break
        return self._rows(store)

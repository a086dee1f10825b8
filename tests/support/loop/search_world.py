"""The simulated world with an index in place of counters: crashes, stalls, and writes that arrive late."""

from __future__ import annotations

from tests.support.search.memory_index import MemoryIndex
from whorl.log.event import Event
from whorl.loop.capture.change import ROW_CHANGED
from whorl.loop.events import FEEDBACK
from whorl.loop.search.documents import DocumentsView, content_of
from whorl.loop.search.indexer import TOMBSTONE_SECONDS, IndexStore
from whorl.loop.search.passages import Enrichment, VectorCache
from whorl.loop.search.settings import SearchSettings
from whorl.loop.simulation import SimulatedViews, SimulatedWorld
from whorl.loop.streams.runner import lag_of
from whorl.search.documents import content_digest

KEYS = 4
LATE = 0.05  # chance that a write of an indexer that dies is applied later


class SimulatedIndex(MemoryIndex):
    """A server of an index: a write may be lost with its indexer, or be applied after its successor has written."""

    def __init__(self, world):
        super().__init__()
        self.world, self.late = world, []

    def write(self, *values):
        self.world.crash()
        if self.world.risky and self.world.random.random() < LATE:
            self.late.append((self.world.now + self.world.random.uniform(0, TOMBSTONE_SECONDS), values))
            self.world.points["late"] = self.world.points.get("late", 0) + 1
            self.world.risky, crash = True, self.world.crash_now
            crash()
        super().write(*values)
        self.world.crash()

    def deliver(self):
        for due in [late for late in self.late if late[0] <= self.world.now]:
            self.late.remove(due)
            super().write(*due[1])


class SimulatedIndexStore(IndexStore, SimulatedViews):
    """Crashes in the transactions of `SimulatedViews`, and between them and the index."""

    def __init__(self, world):
        SimulatedViews.__init__(self, world)
        self.index = world.index = SimulatedIndex(world)
        settings = SearchSettings(topic=FEEDBACK)
        self.enrichment = Enrichment(settings, VectorCache(":memory:", {}))
        self.clock = lambda: world.now
        self._marked, self._mark = self.clock(), 0


class SearchWorld(SimulatedWorld):
    """Rows are inserted, changed in part, deleted and inserted again. Time runs to twice that of tombstones."""

    store_type = SimulatedIndexStore
    view = DocumentsView("world", FEEDBACK)

    def crash_now(self):
        from whorl.loop.simulation import SimulatedCrash

        raise SimulatedCrash

    def _click(self, actor, number):
        key, op = f"k{self.random.randrange(KEYS)}", self.random.choice("cud")
        text = f"{actor} {number}"
        after = {"c": {"text": text, "n": number}, "u": {"n": number}, "d": None}[op]
        return Event(ROW_CHANGED, key, {"op": op, "after": after}, id=text, time=self.now)

    def _step(self):
        self.now += self.random.expovariate(1 / 20)
        self.index.deliver()
        super()._step()

    def violations(self):
        self.now += 2 * TOMBSTONE_SECONDS
        self.index.deliver()
        done = self.store.offsets(self.view.name)
        read = [r for r in self.log.history if r.offset < done.get((r.topic, r.partition), (0, 0))[0]]
        rows, versions = {}, {}
        for record in read:
            event = record.event()
            if event.version == 1:
                op, after = event.data["op"], event.data["after"]
                rows[event.key] = {**(rows.get(event.key) or {}), **after} if op == "u" else after
                versions[event.key] = record.offset
        wanted = {
            (k, versions[k], content_digest(*content_of(row, "text")))
            for k, row in rows.items()
            if row is not None
        }
        found = []
        if set(self.index.documents()) != wanted:
            found.append(f"the index has {set(self.index.documents())}, the rows are {wanted}")
        if self.surfaced is None and lag_of(self.view, self.log, self.store):
            found.append("records were not read")
        return found


class IgnoredVersions(SearchWorld):
    """The index replaces a document by an older one."""

    class store_type(SimulatedIndexStore):
        def __init__(self, world):
            super().__init__(world)
            self.index.replaces = lambda version, known: True


class ForgottenTombstones(SearchWorld):
    """The version of a deletion is dropped with the next write."""

    class store_type(SimulatedIndexStore):
        def flush(self, view):
            super().flush(view)
            MemoryIndex.write(self.index, [], [], None, 1 << 40)


class LostWrite(SearchWorld):
    """After a crash between transaction and index, the write is not repeated."""

    class store_type(SimulatedIndexStore):
        def take(self, view, first):
            with self.transaction():
                self.execute("DELETE FROM view_rows WHERE name = 'pending'")
            return super().take(view, first)


FAULTS = (IgnoredVersions, ForgottenTombstones, LostWrite)

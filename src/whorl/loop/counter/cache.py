"""A cache of counts: an entry has the cells of all partitions, and lives for `seconds`.

A cold entry is dropped when its count changes, and the next reader fills it again (`cache-aside`). A hot one, read at least
HOT times while it lived, takes the changed cell instead, so that a viral answer never misses. Cells of different partitions
are independent, and of two versions of a cell the newer stays. So an effect may be lost or repeated: the entry is then old
for at most `seconds`.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from whorl.errors import ConfigError
from whorl.loop.streams.view import ViewEffect

HOT = 20  # reads
SECONDS = 2.0
MOST = 100_000  # entries in process
Cells = dict[str, list[int]]  # partition -> changes, likes, dislikes


class CountCache(ABC):
    """Entries answer -> cells. Its methods may be called from any thread."""

    @abstractmethod
    def get(self, answers: Sequence[str]) -> dict[str, Cells]:
        """Return the entries that are alive."""

    @abstractmethod
    def fill(self, entries: Mapping[str, Cells]) -> None: ...

    @abstractmethod
    def merge(self, answer: str, partition: str, cell: Sequence[int]) -> None:
        """Take a changed cell into a hot entry, or drop a cold one."""

    def perform(self, effects: Iterable[ViewEffect]) -> None:
        """Take the effects of the view of likes."""
        for effect in effects:
            if effect.name == "count":
                self.merge(effect.key, effect.value["partition"], effect.value["cell"])


@dataclass(slots=True)
class _Entry:
    cells: Cells
    until: float
    reads: int = 0


class LocalCache(CountCache):
    """Entries of this process."""

    def __init__(self, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._entries, self._lock = dict[str, _Entry](), threading.Lock()
        self._seconds, self._clock = seconds, clock

    def get(self, answers: Sequence[str]) -> dict[str, Cells]:
        with self._lock:
            now = self._clock()
            alive = {a: e for a in answers if (e := self._entries.get(a)) is not None and e.until > now}
            for entry in alive.values():
                entry.reads += 1
            return {answer: dict(entry.cells) for answer, entry in alive.items()}

    def fill(self, entries: Mapping[str, Cells]) -> None:
        with self._lock:
            if len(self._entries) + len(entries) > MOST:
                self._entries.clear()
            until = self._clock() + self._seconds
            self._entries |= {answer: _Entry(dict(cells), until) for answer, cells in entries.items()}

    def merge(self, answer: str, partition: str, cell: Sequence[int]) -> None:
        with self._lock:
            if (entry := self._entries.get(answer)) is None:
                return
            if entry.reads < HOT:
                del self._entries[answer]
            elif entry.cells.get(partition, (0,))[0] < cell[0]:
                entry.cells[partition] = list(cell)


def open_cache(url: str = "") -> CountCache:
    """Return a cache: "" in this process, or redis://HOST. Raises ConfigError."""
    if url:
        raise ConfigError(f"the cache {url!r}", expected="redis://HOST")
    return LocalCache()

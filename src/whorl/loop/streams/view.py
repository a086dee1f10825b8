"""A view: a fold of records over named tables of JSON values, and effects that follow its commit.

    class Clicks(FoldedView):
        name, topics = "clicks", ("feedback",)

        def read(self, event):                        # map and filter
            return event.data["actor"] if event.type == "feedback.given" else None

        def apply(self, state, items):
            for item in items:
                state.add("clicks", item.value)
            return ()

Equal records must give equal rows, in any batches and with any partition first; then a replay from 0 gives equal rows. So
`apply` takes items one by one, commutes over items of two partitions, and reads neither clock nor network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from whorl.log.event import Event, LogRecord
from whorl.log.groups import Partition

if TYPE_CHECKING:
    from whorl.loop.streams.store import ViewStore

END = "\U0010ffff"  # above every character of a key


@dataclass(frozen=True, slots=True)
class ViewEffect:
    """A change outside the store after the commit; it may run twice or never. key, value: JSON."""

    name: str
    key: str
    value: Any


@dataclass(frozen=True, slots=True)
class ViewItem:
    """A record as `FoldedView.read` gave it. time: of the event in seconds since 1970, at most that of the append."""

    record: LogRecord
    time: float
    value: Any

    @property
    def partition(self) -> Partition:
        return self.record.topic, self.record.partition


class ViewState:
    """The tables of a view within one transaction. Reads see its writes. partitions: all that the view reads."""

    def __init__(self, store: ViewStore, view: str, partitions: Sequence[Partition] = ()) -> None:
        self._store, self._view, self.partitions = store, view, partitions
        self._known = dict[tuple[str, str], Any]()
        self.written = dict[tuple[str, str], Any]()  # None: deleted
        self._keys = defaultdict[str, list[str]](list)  # written, of each table, sorted

    def load(self, table: str, keys: Iterable[str]) -> None:
        """Fetch rows in one query, before `get` of each."""
        if missing := list({key: None for key in keys if (table, key) not in self._known}):
            found = self._store.load(self._view, table, missing)
            self._known |= {(table, key): found.get(key) for key in missing}

    def get(self, table: str, key: str, default: Any = None) -> Any:
        self.load(table, [key])
        found = self._known[table, key]
        return default if found is None else found

    def put(self, table: str, key: str, value: Any) -> None:
        """Replace a row; None deletes it."""
        if (table, key) not in self.written:
            insort(self._keys[table], key)
        self._known[table, key] = self.written[table, key] = value

    def add(self, table: str, key: str, amount: float = 1) -> None:
        self.put(table, key, self.get(table, key, 0) + amount)

    def scan(self, table: str, low: str, high: str) -> dict[str, Any]:
        """Return the rows with low <= key < high, sorted by key."""
        found = self._store.scan(self._view, table, low, high)
        keys = self._keys[table]
        found |= {
            key: self.written[table, key] for key in keys[bisect_left(keys, low) : bisect_left(keys, high)]
        }
        return {key: found[key] for key in sorted(found) if found[key] is not None}


class FoldedView(ABC):
    """See the top of this file. name: of its group and rows. rebuild: the command that folds it again."""

    name: str
    topics: tuple[str, ...]
    rebuild = "whorl loop --rebuild"

    @abstractmethod
    def read(self, event: Event) -> Any:
        """Return what `apply` needs of an event; None leaves it out.

        Raises:
            DataError, TypeError, ValueError, KeyError: the record goes to the quarantine.
        """

    @abstractmethod
    def apply(self, state: ViewState, items: Sequence[ViewItem]) -> Iterable[ViewEffect]:
        """Fold items, which keep the order of their partition, into the state."""

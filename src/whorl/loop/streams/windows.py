"""Watermarks, windows and joins over event time.

The watermark of a partition is the greatest event time seen there, less a grace. A record before the watermark of its
partition is late: it is counted (table "stats") and left out. The decision depends on one partition alone, so a replay
decides the same. State is dropped once the watermarks of all partitions have passed it, which an idle partition delays and
never changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from whorl.loop.streams.view import END, ViewItem, ViewState

MARKS = "watermarks"


def is_late(state: ViewState, item: ViewItem, grace: float) -> bool:
    """Move the watermark of the item's partition; return whether the item is late, and count it then."""
    name = "{}/{}".format(*item.partition)
    mark: float = state.get(MARKS, name, -math.inf)
    if item.time > mark:
        state.put(MARKS, name, item.time)
    if late := item.time < mark - grace:
        state.add("stats", "late")
    return late


def watermark(state: ViewState, grace: float) -> float:
    """Return the time before which every record of every partition is late."""
    return float(min(state.get(MARKS, f"{t}/{p}", -math.inf) for t, p in state.partitions) - grace)


@dataclass(frozen=True)
class TumblingWindow:
    """Sums by key in windows of `seconds` that do not overlap. Rows of `table`: "START KEY" -> sum, START in seconds."""

    table: str
    seconds: int

    def add(self, state: ViewState, time: float, key: str, amount: float = 1) -> None:
        start = int(time // self.seconds * self.seconds)
        state.add(self.table, f"{start:012d} {key}", amount)

    def closed(self, state: ViewState, mark: float) -> dict[str, Any]:
        """Return the windows to which nothing is added any more. mark: `watermark`."""
        last = math.floor(mark) - self.seconds + 1 if mark >= self.seconds else 0
        return state.scan(self.table, "", f"{last:012d}")


@dataclass(frozen=True)
class StreamJoin:
    """Pairs of records with one key from two streams, at most `within` seconds apart; without bound it joins to a table.

    Whichever side comes first waits in `table` for the other, so the pairs do not depend on the order of arrival.
    """

    table: str
    within: float = math.inf

    def add(self, state: ViewState, item: ViewItem, side: str, key: str, value: Any) -> list[tuple[Any, Any]]:
        """Add a record to a side, "left" or "right"; return its new pairs (left, right)."""
        place = "{}/{}/{}".format(*item.partition, item.record.offset)
        state.put(self.table, f"{key}\n{side} {place}", [item.time, value])
        if math.isfinite(self.within):
            state.put(
                f"{self.table} ends", f"{item.time + self.within:020.6f} {place}", f"{key}\n{side} {place}"
            )
        other = "right" if side == "left" else "left"
        found = state.scan(self.table, f"{key}\n{other} ", f"{key}\n{other} {END}").values()
        met = [one for time, one in found if abs(time - item.time) <= self.within]
        return [(value, one) if side == "left" else (one, value) for one in met]

    def drop_old(self, state: ViewState, mark: float) -> int:
        """Drop what no record can meet any more; return how many rows went. mark: `watermark`."""
        old = state.scan(f"{self.table} ends", "", f"{mark:020.6f}") if mark > 0 else {}
        for name, key in old.items():
            state.put(f"{self.table} ends", name, None)
            state.put(self.table, key, None)
        return len(old)

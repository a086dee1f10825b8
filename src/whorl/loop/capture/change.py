"""A change of a row or a file, with the fields of Debezium (https://debezium.io), and how it enters the log.

    {"op": "c" | "u" | "d" | "r", "before": {...} | None, "after": {...} | None,
     "source": {"connector", "db", "table", "position", "snapshot"}, "ts_ms": ..., "transaction": {"id", "total_order"}}

"r" is a row of a snapshot, whose name is in `source.snapshot`, else "". A column that the source did not send (PostgreSQL's
unchanged TOAST values) is absent, never null.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from whorl.log.event import Event

ROW_CHANGED = "row.changed"
HEARTBEAT = "capture.heartbeat"  # a record with a position and without a change
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RowChange:
    """One change. key: of the document, one text for all columns of the key. row: JSON values; bytes are base64."""

    op: Literal["c", "u", "d", "r"]
    key: str
    before: Row | None
    after: Row | None
    table: str


@dataclass(frozen=True, slots=True)
class Transaction:
    """Changes that were committed together, in the order of the source.

    Attributes:
        position: where to continue, as JSON; None: from the beginning. time: of the commit, seconds since 1970.
        changes: none in a heartbeat, which only moves the position.
        snapshot: name of the snapshot of which these are rows. last: it is complete with these.
    """

    id: str
    position: Mapping[str, Any] | None
    changes: Sequence[RowChange]
    time: float
    snapshot: str = ""
    last: bool = False

    def events(self, source: Mapping[str, Any]) -> list[Event]:
        """Return the events. Their ids follow from the transaction, so a repeat is recognised.

        A transaction without changes is a heartbeat: its position is in the log, so the source may move on.
        """
        place = {**source, "position": self.position, "snapshot": self.snapshot}
        if not self.changes:
            return [Event(HEARTBEAT, "", {"source": place}, id=f"{self.id}/heartbeat", time=self.time)]
        return [
            Event(
                ROW_CHANGED, change.key,
                {
                    "op": change.op, "before": change.before, "after": change.after, "ts_ms": int(self.time * 1000),
                    "source": {**place, "table": change.table},
                    "transaction": {"id": self.id, "total_order": number},
                },
                id=f"{self.id}/{number}", time=self.time,
            )
            for number, change in enumerate(self.changes)
        ]  # fmt: skip


def json_value(value: Any) -> Any:
    """Return a value of a row as JSON: bytes are base64."""
    return b64encode(value).decode() if isinstance(value, bytes) else value


def row_key(values: Sequence[Any]) -> str:
    """Return the key of a row as one text: the value of its only column, or a JSON array."""
    first, *more = map(json_value, values)
    return orjson.dumps([first, *more]).decode() if more else str(first)

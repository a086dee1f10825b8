"""The fold from records to documents: the newest row of each key in each topic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whorl.log.event import Event
from whorl.loop.capture.change import HEARTBEAT, ROW_CHANGED
from whorl.loop.streams.view import FoldedView, ViewEffect, ViewItem, ViewState
from whorl.search.documents import FieldValue

DOCUMENTS = "documents"
MAX_FIELD = 200  # characters of an exact value; longer texts are no field
Row = Mapping[str, Any]
Entry = Mapping[str, Sequence[Any]]  # topic -> [offset, row or None]


class DocumentsView(FoldedView):
    """Rows of a topic, with those of joined topics by the same key. Table "documents": id -> `Entry`."""

    rebuild = "whorl search --rebuild --in"

    def __init__(self, name: str, topic: str, joins: Sequence[str] = ()) -> None:
        self.name, self.topics = name, (topic, *joins)

    def read(self, event: Event) -> tuple[str, Mapping[str, Any] | None, bool] | None:
        """Return the key, the row (None: deleted), and whether columns may be absent, which then keep their values."""
        if event.type == HEARTBEAT:
            return None
        if event.type != ROW_CHANGED or event.data is None:
            return event.key, event.data, False
        return event.key, event.data["after"], event.data["op"] == "u"

    def apply(self, state: ViewState, items: Sequence[ViewItem]) -> Sequence[ViewEffect]:
        state.load(DOCUMENTS, [item.value[0] for item in items])
        for item in items:
            key, row, partial = item.value
            entry, topic = state.get(DOCUMENTS, key, {}), item.record.topic
            if partial and row is not None:
                row = {**(entry.get(topic, (0, None))[1] or {}), **row}
            state.put(DOCUMENTS, key, {**entry, topic: [item.record.offset, row]})
        return ()


def version_of(entry: Entry, topic: str) -> int:
    """Return the version of a document: the offset of its record. Joined records add one more than their offset."""
    return sum(offset + (name != topic) for name, (offset, _) in entry.items())


def content_of(
    row: Mapping[str, Any], text: str, title: str = "title", fields: Sequence[str] | None = None
) -> tuple[str, str, dict[str, FieldValue]]:
    """Return title, text and fields of a row. fields: columns; None is all others that have an exact value."""
    names = [name for name in row if name not in (text, title)] if fields is None else fields
    values = {name: _field_value(row.get(name)) for name in names}
    known = {name: value for name, value in values.items() if value is not None}
    return _text(row.get(title)), _text(row.get(text)), known


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _field_value(value: Any) -> FieldValue | None:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        return value
    return (
        value
        if isinstance(value, int | float) or (isinstance(value, str) and len(value) <= MAX_FIELD)
        else None
    )

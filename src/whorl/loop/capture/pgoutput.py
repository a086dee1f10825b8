"""Messages of `pgoutput`, PostgreSQL's plugin for logical decoding, as transactions of one table with JSON values.

Version 1 of its protocol (https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html). A value out of
line (TOAST) that an update did not change is not sent.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from whorl.loop.capture.change import Row, json_value

EPOCH = 946_684_800  # 2000-01-01, from which PostgreSQL counts microseconds
Op = Literal["c", "u", "d"]


@dataclass
class PgTransaction:
    """A committed transaction.

    Attributes:
        xid: lower 32 bits of its id. lsn: the end of its commit. time: of the commit, seconds since 1970.
        changes: (op, old, new). old: the columns of the replica identity, if they changed or the row is deleted.
        columns: (name, object id of the type) of the table, if it changed. truncated: whether the table was emptied.
        messages: (prefix, content) of pg_logical_emit_message.
    """

    xid: int
    lsn: int = 0
    time: float = 0.0
    changes: list[tuple[Op, Row | None, Row | None]] = field(default_factory=list)
    columns: list[tuple[str, int]] = field(default_factory=list)
    truncated: bool = False
    messages: list[tuple[str, bytes]] = field(default_factory=list)


def _number(text: str) -> float | str:
    return value if math.isfinite(value := float(text)) else text  # JSON has no NaN


# Object id of the type -> JSON value of a text; all other types are texts.
CONVERTERS: Mapping[int, Callable[[str], Any]] = {
    16: lambda text: text == "t", 17: lambda text: json_value(bytes.fromhex(text.removeprefix("\\x"))),
    20: int, 21: int, 23: int, 26: int, 700: _number, 701: _number, 1700: _number,
}  # fmt: skip


def convert(type: int, value: bytes) -> Any:
    """Return the JSON value of the text of a type (an object id); the text, if its type was another one."""
    text = value.decode("utf-8", "replace")
    try:
        return CONVERTERS[type](text) if type in CONVERTERS else text
    except ValueError:
        return text


class _Message:
    """Reads a message from front to back."""

    def __init__(self, content: bytes) -> None:
        self.content, self.at = content, 0

    def take(self, layout: str) -> Any:
        values = struct.unpack_from(f">{layout}", self.content, self.at)
        self.at += struct.calcsize(f">{layout}")
        return values[0] if len(values) == 1 else values

    def text(self) -> str:
        size = self.content.index(0, self.at) - self.at
        return cast(bytes, self.take(f"{size}sx")).decode("utf-8", "replace")


class PgDecoder:
    """Decodes the messages of one session. types: column of the table -> object id of its type."""

    def __init__(self, types: Mapping[str, int]) -> None:
        self.types = types
        self._columns, self._keys = list[tuple[str, int]](), list[bool]()

    def transactions(self, messages: Iterable[bytes]) -> Iterator[PgTransaction]:
        """Yield the transactions of the messages, each once its commit is read."""
        transaction = PgTransaction(0)
        for message in map(_Message, messages):
            match kind := message.take("c"):
                case b"B":
                    transaction = PgTransaction(message.take("qqI")[2])
                case b"C":
                    _, _, transaction.lsn, microseconds = message.take("Bqqq")
                    transaction.time = EPOCH + microseconds / 1e6
                    yield transaction
                case b"R":
                    self._read_columns(message)
                case b"I" | b"U" | b"D":
                    op, rows = {b"I": "c", b"U": "u", b"D": "d"}[kind], self._rows(message)
                    old = rows.get(b"K", rows.get(b"O"))
                    transaction.changes.append((cast(Op, op), old, rows.get(b"N")))
                    transaction.columns = self._columns
                case b"T":
                    transaction.truncated = True
                case b"M":
                    message.take("Bq")
                    prefix, size = message.text(), message.take("i")
                    transaction.messages.append((prefix, message.take(f"{size}s")))

    def _read_columns(self, message: _Message) -> None:
        message.take("I")
        message.text(), message.text(), message.take("c")
        self._columns, self._keys = [], []
        for _ in range(message.take("h")):
            self._keys.append(bool(message.take("B")))
            self._columns.append((message.text(), message.take("Ii")[0]))

    def _rows(self, message: _Message) -> dict[bytes, Row]:
        """Return kind of row -> row."""
        message.take("I")
        rows: dict[bytes, Row] = {}
        while message.at < len(message.content):
            (kind, _), row = message.take("ch"), dict[str, Any]()
            for (name, type), is_key in zip(self._columns, self._keys, strict=True):
                state = message.take("c")  # "n": null, "t": a text, "u": unchanged and not sent
                value = message.take(f"{message.take('i')}s") if state == b"t" else None
                if state != b"u" and (is_key or kind != b"K"):  # in "K" all but the key is null
                    row[name] = None if value is None else convert(self.types.get(name, type), value)
            rows[kind] = row
        return rows

"""Reads of a group: one may return a part of what a broker has."""

from __future__ import annotations

from whorl.log.event import LogRecord
from whorl.log.groups import Reader


def read_all(reader: Reader, count: int) -> list[LogRecord]:
    """Read until there are `count` records or none come, and then what is there beyond them."""
    records: list[LogRecord] = []
    while len(records) < count and (some := reader.read()):
        records += some
    return records + reader.read(timeout=0)

"""SQLite's files as far as a capture reads them (https://sqlite.org/walformat.html, https://sqlite.org/fileformat2.html).

The write-ahead log is a header and frames: page number, size of the database if the frame commits, two salts, a checksum
that continues from the frame before, the page. A reset changes the salts. The wal-index (`-shm`) has the newest committed
frame. Frames count only if their salts and the whole chain of checksums fit.

A changed leaf of a table names the rows whose cells differ. A page that leaves the table is often not written at all: it is
missing among the children of a changed interior page. An overflow page may be overwritten in place, without a write to its
leaf. Too many rows may be named, also of other tables, never too few: the rows are compared afterwards.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

HEADER, FRAME = 32, 24  # bytes of the two heads
INTERIOR, LEAF, TREES = 5, 13, b"\x02\x05\x0a\x0d"  # types of pages
Pages = Callable[[int], bytes]  # number -> content, b"" behind the end


class WalChangedError(Exception):
    """The log does not continue from a position: it was reset, or its end was lost with the power."""


class WalPosition(NamedTuple):
    """Behind a committed frame. salt: of this use of the log, as hex. sum0, sum1: checksum of the frame."""

    salt: str
    frame: int
    sum0: int
    sum1: int

    def json(self) -> dict[str, Any]:
        return {"wal": [*self]}


START = WalPosition("", 0, 0, 0)


@dataclass(frozen=True)
class PageCommit:
    """The pages that a transaction wrote, by number from 1. size: of the database behind it, in pages of `page_size`."""

    id: str
    position: WalPosition
    size: int
    page_size: int
    pages: Mapping[int, bytes]
    time: float = field(default_factory=time.time)


class WriteAheadLog:
    """The log of a database that this process has open. page_size: bytes."""

    def __init__(self, database: Path, page_size: int) -> None:
        self.width = FRAME + page_size
        self._log, self._index = (os.open(f"{database}-{end}", os.O_RDONLY) for end in ("wal", "shm"))

    def close(self) -> None:
        os.close(self._log)
        os.close(self._index)

    def end(self) -> tuple[WalPosition, int]:
        """Return the newest commit, and the size of the database there in pages."""
        while True:
            head = os.pread(self._index, 96, 0)
            if len(head) == 96 and head[:48] == head[48:]:  # no writer is between the two copies
                frame, size, *sums = struct.unpack_from("=4I", head, 16)
                return WalPosition(head[32:40].hex(), frame, *sums), size
            time.sleep(0.001)

    def continues(self, position: WalPosition) -> bool:
        """Return whether the log still holds what follows a position."""
        end, _ = self.end()
        if position.frame == 0 or position.salt != end.salt or position.frame > end.frame:
            return position == end
        head = os.pread(self._log, FRAME, HEADER + (position.frame - 1) * self.width)
        return head[8:16].hex() == position.salt and _pair(head[16:]) == position[2:]

    def commits(self, start: WalPosition, end: WalPosition) -> Iterator[PageCommit]:
        """Yield the transactions from `start`, else from the beginning if the salt is another, to `end`.

        Raises:
            WalChangedError: salts or checksums do not fit.
        """
        salt, head = bytes.fromhex(end.salt), os.pread(self._log, HEADER, 0)
        frame, sums = (start.frame, start[2:]) if start.salt == end.salt else (0, _pair(head[24:]))
        order, pages = ("<" if head[3:4] == b"\x82" else ">"), dict[int, bytes]()
        while frame < end.frame:
            content = os.pread(self._log, self.width, HEADER + frame * self.width)
            sums = _checksum(content[:8] + content[FRAME:], order, *sums)
            if not content[8:16] == head[16:24] == salt or _pair(content[16:FRAME]) != sums:
                raise WalChangedError
            frame, (number, size) = frame + 1, _pair(content)
            pages[number] = content[FRAME:]
            if size:
                position = WalPosition(end.salt, frame, *sums)
                yield PageCommit(f"{end.salt}-{frame}", position, size, self.width - FRAME, pages)
                pages = {}


def _pair(content: bytes) -> tuple[int, int]:
    return int.from_bytes(content[:4], "big"), int.from_bytes(content[4:8], "big")


def _checksum(content: bytes, order: str, first: int, second: int) -> tuple[int, int]:
    """Return the checksum of a frame, which continues that of the frame before."""
    words = struct.unpack(f"{order}{len(content) // 4}I", content)
    for x, y in zip(words[::2], words[1::2], strict=True):
        first = (first + x + second) & 0xFFFFFFFF
        second = (second + y + first) & 0xFFFFFFFF
    return first, second


def changed_rowids(
    changed: Iterable[int], old: Pages, new: Pages, usable: int, owners: Callable[[set[int]], Iterable[tuple[int, int]]]
) -> set[int]:  # fmt: skip
    """Return rowids. usable: bytes of a page. owners: of overflow pages, leaf and number of the cell in the old state."""
    numbers, ids = set(changed) - {1}, set[int]()
    if new(1)[52:56] != bytes(4):  # auto_vacuum has pages of pointers
        numbers = {n for n in numbers if (n - 2) % (usable // 5 + 1)}
    loose = {n for n in numbers if (new(n) or TREES)[0] not in TREES}
    if loose:
        loose -= _chain(int.from_bytes(new(1)[32:36], "big"), new)  # lists of free pages
    follow = bool(loose)
    for number in numbers:
        before, after = old(number), new(number)
        cells, written = leaf_cells(before, usable), leaf_cells(after, usable)
        ids |= {rowid for rowid, _ in cells.items() ^ written.items()}
        for rowid, cell in written.items() if follow else ():
            if _varint(cell, 0)[0] > usable - 35:
                owned = _chain(int.from_bytes(cell[-4:], "big"), new) & numbers
                ids |= {rowid} if owned else set()
                loose -= owned
        was, now = _children(before), _children(after)
        ids |= _rowids_below(was - now, old, usable) | _rowids_below(now - was, new, usable)
    return ids | {[*leaf_cells(old(leaf), usable)][cell] for leaf, cell in (owners(loose) if loose else ())}


def leaf_cells(page: bytes, usable: int) -> dict[int, bytes]:
    """Return rowid -> cell of a leaf of a table, in order; empty for other pages."""
    found = dict[int, bytes]()
    for start in _pointers(page, 8) if page[:1] == bytes([LEAF]) else ():
        payload, at = _varint(page, start)
        rowid, at = _varint(page, at)
        if payload > usable - 35:  # the rest is in a chain of pages, whose first number ends the cell
            least = (usable - 12) * 32 // 255 - 23
            kept = least + (payload - least) % (usable - 4)
            payload = (kept if kept <= usable - 35 else least) + 4
        found[rowid - 2**64 if rowid >= 2**63 else rowid] = page[start : at + payload]
    return found


def _chain(number: int, pages: Pages) -> set[int]:
    """Return the pages of a list, each of which begins with the number of the next."""
    found = set[int]()
    while number not in found and (page := pages(number)):
        found.add(number)
        number = int.from_bytes(page[:4], "big")
    return found


def _rowids_below(roots: set[int], pages: Pages, usable: int) -> set[int]:
    waiting, found = [*roots], set[int]()
    while waiting:
        page = pages(waiting.pop())
        found |= leaf_cells(page, usable).keys()
        waiting += _children(page)
    return found


def _children(page: bytes) -> set[int]:
    if page[:1] != bytes([INTERIOR]):
        return set()
    return {int.from_bytes(page[at : at + 4], "big") for at in (8, *_pointers(page, 12))}


def _pointers(page: bytes, start: int) -> list[int]:
    end = start + 2 * int.from_bytes(page[3:5], "big")
    return [int.from_bytes(page[at : at + 2], "big") for at in range(start, end, 2)]


def _varint(page: bytes, at: int) -> tuple[int, int]:
    """Return the number at a place, and the place behind it."""
    value = 0
    for end in range(at, at + 8):
        value = value << 7 | page[end] & 0x7F
        if page[end] < 0x80:
            return value, end + 1
    return value << 8 | page[at + 8], at + 9

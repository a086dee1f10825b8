"""The interface of a format: a file as records, and as blocks that can be read alone.

A block is a range [start, stop) of a file, in the unit of its format: bytes, or row groups of Parquet. A record belongs
to the block that contains its beginning, so blocks that cover a file give each record once, in any order. A format that
cannot be divided (any compressed file) has one block.
"""

from __future__ import annotations

import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whorl.data.files import file_size
from whorl.data.quarantine import BadRecordError

LONGEST_RECORD = 32 << 20
DEFAULT_FIELD = "text"
DAMAGE = (OSError, ValueError, NotImplementedError, EOFError, tarfile.TarError)  # raised for damaged files


@dataclass(frozen=True, slots=True)
class Block:
    """A range of a file. size: in bytes."""

    start: int
    stop: int
    size: int


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a file.

    number: line, row or member from 1, counted from the start of what is read.
    offset, end: where it and the next begin: bytes (of the decompressed content), or rows of Parquet.
    length: bytes; 0 if unknown.
    value: its fields, or the error of an unreadable record.
    """

    number: int
    offset: int
    length: int
    value: Mapping[str, Any] | BadRecordError
    end: int


class Format(ABC):
    """A format of files. A subclass implements `read`, and `blocks` if its files can be divided.

    Args:
        fields: the fields that are used, of which the first must exist; empty for all of them.
        longest: bytes of the longest record. A longer one is rejected, without reading it into memory.

    extracts: the text is taken out of a markup, so the suffix does not name its language, and it may be normalised.
    """

    extracts = False

    def __init__(self, *, fields: Sequence[str] = (), longest: int = LONGEST_RECORD) -> None:
        self.fields, self.longest = tuple(fields), longest

    @property
    def text_field(self) -> str:
        """The field that holds the text of a record without fields."""
        return self.fields[0] if self.fields else DEFAULT_FIELD

    @abstractmethod
    def read(self, uri: str, start: int, stop: int | None) -> Iterator[Record]:
        """Yield the records that begin in [start, stop), in order.

        OSError and ValueError mean damage; a BadRecordError ends the file.
        """

    def blocks(self, uri: str, block_bytes: int) -> Iterator[Block]:
        """Yield blocks of about `block_bytes` that cover the file, in order. Raises as `read`."""
        size = file_size(uri)
        yield Block(0, size, size)

    def records(self, uri: str, start: int = 0, stop: int | None = None) -> Iterator[Record]:
        """Yield the records of a file, or of a block, in order.

        An unreadable record is yielded with its error. Damage ends the file with one such record, whose error has the number
        of records before it.
        """
        number = end = 0
        try:
            for record in self.read(uri, start, stop):
                number, end = record.number, record.end
                yield record
        except BadRecordError as error:
            yield Record(number + 1, end, 0, error, end)
        except DAMAGE as error:
            # Arrow's streams raise OSError without an errno for damaged data; errors of the system always have one.
            refused = isinstance(error, OSError) and error.errno is not None
            detail = (error.strerror if refused and isinstance(error, OSError) else None) or str(error)
            reason = "unreadable" if refused else "damaged"
            if not refused:
                detail = f"the file ends or is damaged after {number:,} records, the rest is lost: {detail}"
            yield Record(number + 1, end, 0, BadRecordError(reason, "", detail[:300]), end)

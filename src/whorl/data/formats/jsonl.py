"""JSONL: one JSON object per line, plain or compressed; a file with the suffix .json may also hold one array of them.

The subtle part is hostile or broken files. A 2 GB file without a line end must not be read into one line: lines are read
up to a limit and the rest is skipped in pieces. A line belongs to the block that contains its first byte, so the reader
of a block looks for a line end from one byte before it, and no further than its end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import orjson

from whorl.data.files import compression, file_size, format_suffix, open_decompressed
from whorl.data.formats.format import Block, Format, Record
from whorl.data.formats.text import MARK
from whorl.data.quarantine import BadRecordError

PIECE = 1 << 20
_EXACT = float(1 << 63)  # orjson reads larger integers as floats


class JSONL(Format):
    """See the top of this file."""

    def blocks(self, uri: str, block_bytes: int) -> Iterator[Block]:
        size = file_size(uri)
        step = size or 1 if compression(uri) or format_suffix(uri) == ".json" else block_bytes
        for start in range(0, size, step):
            stop = min(size, start + step)
            yield Block(start, stop, stop - start)

    def read(self, uri: str, start: int, stop: int | None) -> Iterator[Record]:
        with open_decompressed(uri) as stream:
            if format_suffix(uri) == ".json":
                head = stream.read(len(MARK) + 1).removeprefix(MARK)
                if head.startswith(b"["):
                    yield from _array(head + stream.read())
                    return
                stream.seek(0)
            position = 0
            if start:
                stream.seek(start - 1)
                position = _next_line(stream, start - 1, stop)
            if compression(uri):
                stop = None  # the size of the file is not that of the content
            yield from self._lines(stream, position, stop)

    def _lines(self, stream: BinaryIO, position: int, stop: int | None) -> Iterator[Record]:
        number = 0
        while (stop is None or position < stop) and (line := stream.readline(self.longest)):
            number, offset = number + 1, position
            position += len(line)
            if len(line) == self.longest and not line.endswith(b"\n"):
                position = _next_line(stream, position, None)
                error = BadRecordError("too_large", "", f"a line of {position - offset} bytes")
                yield Record(number, offset, position - offset, error, position)
            elif not line.isspace():
                if offset == 0 and line.startswith(MARK):
                    line, offset = line.removeprefix(MARK), len(MARK)
                yield Record(number, offset, len(line.rstrip(b"\r\n")), parse_object(line), position)


def parse_object(line: bytes) -> Mapping[str, Any] | BadRecordError:
    """Return the object of a line, or its error."""
    try:
        value = orjson.loads(line)
        if isinstance(value, dict) and not _is_rounded(value):
            return value
    except ValueError:
        pass  # not valid, or of what only the standard library reads: NaN, lone surrogates, integers of any size
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return BadRecordError("invalid_utf8", "", f"byte {error.start}: {error.reason}")
    except (ValueError, RecursionError) as error:
        return BadRecordError("binary" if b"\0" in line else "bad_json", "", str(error)[:200])
    return _object(value)


def _is_rounded(value: Any) -> bool:
    """Return whether a value holds a number that may be an integer beyond 64 bits."""
    if type(value) is float:
        return abs(value) >= _EXACT
    if type(value) is dict:
        value = value.values()
    elif type(value) is not list:
        return False
    return any(map(_is_rounded, value))


def _object(value: Any) -> Mapping[str, Any] | BadRecordError:
    if not isinstance(value, dict):
        return BadRecordError("bad_json", "", f"expected an object, found {type(value).__name__}")
    return value


def _next_line(stream: BinaryIO, position: int, stop: int | None) -> int:
    """Move behind the next line end, or to `stop`; return the position there."""
    while piece := stream.readline(PIECE if stop is None else min(PIECE, stop - position)):
        position += len(piece)
        if piece.endswith(b"\n"):
            break
    return position


def _array(data: bytes) -> Iterator[Record]:
    try:
        values = json.loads(data.decode())
    except ValueError as error:  # includes decoding errors
        yield Record(1, 0, len(data), BadRecordError("bad_json", "", str(error)), len(data))
        return
    for number, value in enumerate(values, 1):
        yield Record(number, number - 1, 0, _object(value), number)

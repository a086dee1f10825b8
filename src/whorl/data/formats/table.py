"""Tables as text, CSV and TSV: one record per row, with its cells as texts under the names of the first row.

The delimiter of a CSV is the one of `,;|` and tab that is most frequent in the first row; of a TSV it is a tab. A first row
without one is that of a table of one column. A cell in double quotes may hold delimiters and line ends. A record's number is
that of its row, the first row included, as in a spreadsheet. Blank rows give no record.

Bytes are divided into cells before they are decoded. In no encoding but UTF-16, which has a mark at its start, is a comma,
quote or line end a part of another character. So one row of another encoding is no damage, and offsets are bytes.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from contextlib import suppress
from io import TextIOWrapper
from typing import Any

from whorl.data.extraction.charset import MARKS, MULTI_BYTE, WIDE, decode, detect
from whorl.data.files import open_decompressed
from whorl.data.formats.format import Format, Record
from whorl.data.quarantine import BadRecordError

SAMPLE = 1 << 20  # bytes in which the encoding is detected
QUOTED = re.compile(r'"[^"]*"')
BYTES = "latin-1"  # one character for each byte
NO_DELIMITER = "\x1f"


class CSV(Format):
    """See the top of this file."""

    delimiters = ",;|\t"

    def columns(self, uri: str) -> list[str]:
        """Return the names of the columns; none of an empty or damaged table. Raises OSError and BadRecordError."""
        cells: list[str] | BadRecordError = next((row[3] for row in self._rows(uri)), [])
        return [] if isinstance(cells, BadRecordError) else [cell.strip() for cell in cells]

    def read(self, uri: str, start: int, stop: int | None) -> Iterator[Record]:
        if start:
            return
        names: list[str] = []
        for number, offset, end, cells in self._rows(uri):
            value: dict[str, Any] | BadRecordError
            if isinstance(cells, BadRecordError):
                value = cells
            elif not names:
                names = [name.strip() for name in cells]
                twice = next((name for name in names if names.count(name) > 1), None)
                if twice is None:
                    continue
                names = []
                value = BadRecordError("no_header", twice, f"two columns are named {twice!r}: rename one")
            elif len(cells) != len(names):
                detail = f"{len(cells)} fields, the first row has {len(names)}"
                value = BadRecordError("ragged", "", f"{detail}; put a cell that holds a delimiter in quotes")
            else:
                value = dict(zip(names, cells, strict=True))
            yield Record(number, offset, end - offset, value, end)
            if not names:
                return

    def _rows(self, uri: str) -> Iterator[tuple[int, int, int, list[str] | BadRecordError]]:
        """Yield number, offset, end, and cells or error of each row that is not blank."""
        with open_decompressed(uri) as stream:
            head = stream.read(SAMPLE)
        mark, encoding = next(((m, name) for m, name in MARKS if head.startswith(m)), (b"", BYTES))
        encoding = encoding if encoding in WIDE else BYTES
        if encoding == BYTES and b"\0" in head:
            raise BadRecordError("binary", "", f"NUL at byte {head.index(0)}")
        charset = detect(head) if encoding == BYTES else encoding
        first = QUOTED.sub("", head[len(mark) :].decode(encoding, "replace")).lstrip("\r\n").splitlines()
        delimiter = max(self.delimiters, key=(first or [""])[0].count)
        if not (first and delimiter in first[0]):
            delimiter = NO_DELIMITER
        csv.field_size_limit(max(csv.field_size_limit(), self.longest))
        with open_decompressed(uri) as stream:
            begin = position = len(stream.read(len(mark)))
            lines = TextIOWrapper(stream, encoding, "replace", newline="")

            def line() -> str:
                nonlocal position
                text = lines.readline(self.longest)
                position += len(text.encode(encoding))
                if position - begin < self.longest:
                    return text
                while text and not text.endswith(("\n", "\r")):
                    text = lines.readline(SAMPLE)
                    position += len(text.encode(encoding))
                detail = f"a row of over {self.longest} bytes, or a quote that is not closed"
                raise BadRecordError("too_large", "", detail)

            rows, number = csv.reader(iter(line, ""), delimiter=delimiter, strict=True), 0
            while True:
                number, begin = number + 1, position
                cells: list[str] | BadRecordError
                try:
                    cells = [cell if cell.isascii() else _text(cell, charset) for cell in next(rows)]
                except StopIteration:
                    return
                except BadRecordError as error:
                    cells = error
                except csv.Error as error:
                    cells = BadRecordError("bad_quotes", "", f"{error}: double the quotes within a cell")
                if cells:
                    yield number, begin, position, cells


class TSV(CSV):
    """A table whose delimiter is a tab."""

    delimiters = "\t"


def _text(cell: str, charset: str) -> str:
    """Return the text of a cell. Raises BadRecordError as `decode`."""
    if charset in WIDE:
        return cell
    data = cell.encode(BYTES)
    with suppress(UnicodeDecodeError):
        if charset not in MULTI_BYTE:
            return data.decode()
    return decode(data, charset)

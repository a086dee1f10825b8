"""A text file: one record, the whole file in UTF-8. A byte-order mark is not part of the text.

With `in_pieces`, a file longer than the longest record is several: each ends at a paragraph, else at a line, else between
characters.
"""

from __future__ import annotations

from collections.abc import Iterator

from whorl.data.files import open_decompressed
from whorl.data.formats.format import Format, Record
from whorl.data.quarantine import BadRecordError

MARK = b"\xef\xbb\xbf"


class TextFile(Format):
    """See the top of this file."""

    in_pieces = False

    def read(self, uri: str, start: int, stop: int | None) -> Iterator[Record]:
        if start:
            return
        with open_decompressed(uri) as stream:
            data = stream.read(8192)
            if b"\0" not in data and len(data) == 8192:
                data += stream.read(self.longest + len(MARK) + 1 - len(data))
            offset, number = len(MARK) if data.startswith(MARK) else 0, 1
            data = data[offset:]
            while self.in_pieces and len(data) > self.longest:
                end = _end_of_piece(data[: self.longest])
                yield self._record(number, offset, data[:end])
                offset, number = offset + end, number + 1
                data = data[end:] + stream.read(self.longest + 1 - len(data) + end)
            yield self._record(number, offset, data)

    def _record(self, number: int, offset: int, data: bytes) -> Record:
        length = len(data)
        value: dict[str, str] | BadRecordError
        if b"\0" in data:
            value = BadRecordError("binary", "", f"NUL at byte {data.index(0)}{_kind_of_binary(data)}")
        elif length > self.longest:
            value = BadRecordError("too_large", "", f"over {self.longest} bytes when decompressed")
        else:
            try:
                value = {self.text_field: data.decode()}
            except UnicodeDecodeError as error:
                value = BadRecordError("invalid_utf8", "", f"byte {error.start + offset}: {error.reason}")
        return Record(number, offset, length, value, offset + length)


def _end_of_piece(data: bytes) -> int:
    """Return where a piece ends: after an empty line in its second half, else after a line, else before a character."""
    paragraph = data.rfind(b"\n\n", len(data) // 2)
    if paragraph >= 0:
        return paragraph + 2
    if (line := data.rfind(b"\n")) >= 0:
        return line + 1
    end = len(data) - 1
    while end > len(data) - 4 and data[end] & 0xC0 == 0x80:
        end -= 1
    return end


def _kind_of_binary(data: bytes) -> str:
    """Return what to do with two kinds of files that are often mistaken for text, or ""."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "; this is UTF-16, convert it: iconv -f UTF-16 -t UTF-8"
    if data.startswith(b"%PDF-"):
        return "; this is a PDF, read it as one: formats = { '.pdf' = 'pdf' }"
    if data[257:262] == b"ustar":
        return "; this is a tar archive, give it the suffix .tar"
    return ""

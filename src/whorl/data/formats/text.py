"""A text file: one record, the whole file in UTF-8. A byte-order mark is not part of the text."""

from __future__ import annotations

from collections.abc import Iterator

from whorl.data.files import open_decompressed
from whorl.data.formats.format import Format, Record
from whorl.data.quarantine import BadRecordError

MARK = b"\xef\xbb\xbf"


class TextFile(Format):
    """See the top of this file."""

    def read(self, uri: str, start: int, stop: int | None) -> Iterator[Record]:
        if start:
            return
        with open_decompressed(uri) as stream:
            data = stream.read(8192)
            if b"\0" not in data and len(data) == 8192:
                data += stream.read(self.longest + len(MARK) + 1 - len(data))
        offset = len(MARK) if data.startswith(MARK) else 0
        length = len(data) - offset
        value: dict[str, str] | BadRecordError
        if b"\0" in data:
            value = BadRecordError("binary", "", f"NUL at byte {data.index(0)}{_kind_of_binary(data)}")
        elif length > self.longest:
            value = BadRecordError("too_large", "", f"over {self.longest} bytes when decompressed")
        else:
            try:
                value = {self.text_field: data[offset:].decode()}
            except UnicodeDecodeError as error:
                value = BadRecordError("invalid_utf8", "", f"byte {error.start + offset}: {error.reason}")
        yield Record(1, offset, length, value, offset + length)


def _kind_of_binary(data: bytes) -> str:
    """Return what to do with two kinds of files that are often mistaken for text, or ""."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "; this is UTF-16, convert it: iconv -f UTF-16 -t UTF-8"
    if data.startswith(b"%PDF-"):
        return "; this is a PDF, read it as one: formats = { '.pdf' = 'pdf' }"
    if data[257:262] == b"ustar":
        return "; this is a tar archive, give it the suffix .tar"
    return ""

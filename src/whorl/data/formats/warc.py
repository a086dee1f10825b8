"""Web archives (WARC 1.0 and 1.1, ISO 28500): one record per response, resource or conversion (the text of a WET file).

    {"text": "...", "url": "https://...", "title": "...", "time": "2026-11-24T12:00:00Z", "media_type": "text/html"}

A page is extracted by its media type (`data/extraction`). Other kinds of WARC records (requests, metadata, revisits of equal
pages, information on the crawl) are no documents. Offsets are those of the decompressed stream.

Records are framed here; fastwarc parses them. The iterator of fastwarc ends without an error at a truncated file, and
loses the rest of a file after one wrong `Content-Length`. Here a record that does not end where it declares is
rejected, and reading continues at the next line that begins a record. A lengthy record is passed without being held. If
its length was wrong, the stream is opened again, at most `MAX_REOPENED` times.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from whorl.data.extraction import corpus_extra, extract, media_type_of
from whorl.data.files import compression, open_decompressed
from whorl.data.formats.format import Block, Format, Record
from whorl.data.quarantine import BadRecordError

MAGIC = b"WARC/"
MARKER = b"\nWARC/1."  # begins a record inside a stream
END = b"\r\n\r\n"
MAX_HEADER = 1 << 16
PIECE = 1 << 16
ZLIB = (b"\x78", b"\x58")  # begins of a zlib stream
MAX_REOPENED = 20
PAGES = ("response", "resource", "conversion")
OTHER_KINDS = ("warcinfo", "request", "metadata", "revisit")


@dataclass(frozen=True, slots=True)
class Frame:
    """A record in the stream: its bytes, or why it has none."""

    offset: int
    end: int
    data: bytes
    error: BadRecordError | None = None


class WARC(Format):
    """See the top of this file."""

    extracts = True
    main_content = True

    def blocks(self, uri: str, block_bytes: int) -> Iterator[Block]:
        """Yield blocks of whole records. A compressed archive is one block: its records end at unknown bytes."""
        if compression(uri):
            yield from super().blocks(uri, block_bytes)
            return
        start = stop = 0
        for frame in _frames(uri, 0, self.longest):
            if frame.end - start > block_bytes and stop > start:
                yield Block(start, stop, stop - start)
                start = stop
            stop = frame.end
        if stop > start:
            yield Block(start, stop, stop - start)

    def read(self, uri: str, start: int, stop: int | None) -> Iterator[Record]:
        if compression(uri):
            stop = None  # the size of the file is not that of the content
        number = 0
        for frame in _frames(uri, start, self.longest):
            if stop is not None and frame.offset >= stop:
                return
            value = frame.error or self._value(frame.data)
            if value is not None:
                number += 1
                yield Record(number, frame.offset, frame.end - frame.offset, value, frame.end)

    def _value(self, data: bytes) -> Mapping[str, Any] | BadRecordError | None:
        """Return the fields of a record, its error, or None for a record that is no page."""
        try:
            from fastwarc.warc import WarcRecord
        except ImportError:
            return corpus_extra("fastwarc")
        try:
            record: Any = WarcRecord.from_bytes(data)
            kind = (record.headers.get("WARC-Type") or "").lower()
            if kind in OTHER_KINDS:
                return None
            if kind not in PAGES:
                return BadRecordError("bad_field", "WARC-Type", f"WARC-Type is {ascii(kind)[:100]}")
            return self._page(record, is_http=kind == "response" and record.is_http)
        except BadRecordError as error:
            return error
        except OSError as error:
            return BadRecordError("damaged", "", f"WARC record: {error}")

    def _page(self, record: Any, is_http: bool) -> dict[str, Any]:
        """Return the fields of a page. Raises BadRecordError, and OSError for damaged HTTP headers."""
        media_type, charset, encoding = record.headers.get("Content-Type") or "", "", ""
        if is_http:
            record.parse_http(auto_decode="transfer")
            status = record.http_headers.status_code if record.http_headers else None
            if status is None or not 200 <= status < 300:
                raise BadRecordError("http_status", "", f"HTTP status {status}")
            media_type, charset = record.http_content_type or "", record.http_charset or ""
            encoding = record.http_headers.get("Content-Encoding") or ""
        body = _decompress(record.reader.read(self.longest + 1), encoding, self.longest)
        media_type = media_type_of(body, media_type)
        page = extract(body, media_type, charset, main_content=self.main_content)
        return {
            self.text_field: page.text,
            "url": (record.headers.get("WARC-Target-URI") or "").strip("<> ") or None,
            "title": page.title,
            "time": record.headers.get("WARC-Date"),
            "media_type": media_type,
        }


class AllWARC(WARC):
    """A WARC whose HTML pages give all visible text, with navigation and footers."""

    main_content = False


class _Window:
    """A stream seen through a window that grows at its end and is consumed at its start."""

    def __init__(self, uri: str, position: int) -> None:
        self.uri, self.position = uri, position  # of the window's start, in the decompressed content
        self.data = bytearray()
        self.stream = self._open(position)
        self.at_end = False

    def _open(self, position: int) -> BinaryIO:
        stream = open_decompressed(self.uri)
        if stream.seekable():
            stream.seek(position)
            return stream
        while position and (piece := stream.read(min(position, PIECE))):
            position -= len(piece)
        return stream

    def fill(self, size: int) -> bool:
        """Read until the window has `size` bytes; return whether it has. Raises OSError: the data is damaged."""
        while len(self.data) < size and not self.at_end:
            piece = self.stream.read(min(PIECE, max(size - len(self.data), 4096)))
            self.data += piece
            self.at_end = not piece
        return len(self.data) >= size

    def consume(self, size: int) -> None:
        del self.data[:size]
        self.position += size

    def find(self, marker: bytes, start: int = 0) -> bool:
        """Consume up to the next `marker` and return True; without one, consume everything."""
        while (at := self.data.find(marker, start)) < 0:
            start = len(marker) - 1
            self.consume(max(0, len(self.data) - start))
            if not self.fill(start + 1):
                self.consume(len(self.data))
                return False
            self.fill(PIECE)
            start = 0
        self.consume(at)
        return True

    def reopen(self, position: int) -> None:
        self.close()
        self.data.clear()
        self.stream, self.position, self.at_end = self._open(position), position, False

    def close(self) -> None:
        self.stream.close()


def _frames(uri: str, start: int, longest: int) -> Iterator[Frame]:
    """Yield the records from `start` on. Raises OSError at a truncated end."""
    window = _Window(uri, start)
    try:
        reopened = 0
        while _skip_blank(window):
            offset = window.position
            header, length = _header(window)
            if header is None or length is None:
                reason = "no record begins here" if header is None else "no valid Content-Length"
                yield _resync(window, offset, reason)
            elif length <= longest:
                yield _frame(window, offset, header, length)
            else:
                marker = _pass_over(window, header + length)
                if marker is None:
                    error = BadRecordError("too_large", "", f"a record of {length} bytes")
                    yield Frame(offset, window.position, b"", error)
                elif marker < 0 or reopened == MAX_REOPENED:
                    raise OSError(f"a record of {length} bytes is cut off, or its length is wrong")
                else:
                    reopened += 1
                    window.reopen(marker)
                    yield _wrong_length(offset, marker, length)
    finally:
        window.close()


def _skip_blank(window: _Window) -> bool:
    """Consume line ends before a record; return whether there is one."""
    while window.fill(1):
        blank = len(window.data) - len(window.data.lstrip(b"\r\n"))
        window.consume(blank)
        if window.data:
            return True
    return False


def _header(window: _Window) -> tuple[int | None, int | None]:
    """Return the length of a record's header and the declared length of its content; None if it has none."""
    window.fill(len(MAGIC))
    if not window.data.startswith(MAGIC):
        return None, None
    while (end := window.data.find(END, 0, MAX_HEADER)) < 0 and len(window.data) < MAX_HEADER:
        if not window.fill(len(window.data) + 1):
            if window.data.find(MARKER, 1) > 0:
                return None, None
            raise OSError("the header of a record is cut off")
    if end < 0:
        return None, None
    for line in bytes(window.data[:end]).split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            value = value.strip()
            return end + len(END), int(value) if value.isdigit() and len(value) < 19 else None
    return end + len(END), None


def _frame(window: _Window, offset: int, header: int, length: int) -> Frame:
    """Return a record whose content has a declared `length` that can be held."""
    size = header + length
    is_whole = window.fill(size)
    window.fill(size + len(END))
    tail = bytes(window.data[size : size + len(END)])
    if is_whole and END.startswith(tail):  # the last record of a file may lack its end
        data = bytes(window.data[:size])
        window.consume(size + len(tail))
        return Frame(offset, window.position, data)
    if not is_whole and window.data.find(MARKER, 1) < 0:
        raise OSError(f"a record has {len(window.data) - header} bytes of {length}")
    return _resync(window, offset, f"Content-Length is {length}, but no record ends there")


def _resync(window: _Window, offset: int, reason: str) -> Frame:
    """Move to the next line that begins a record; return the rejection of what is between."""
    if window.find(MARKER, 1):
        window.consume(1)
    return Frame(offset, window.position, b"", BadRecordError("damaged", "", reason))


def _wrong_length(offset: int, end: int, length: int) -> Frame:
    error = BadRecordError("damaged", "", f"Content-Length is {length}, but no record ends there")
    return Frame(offset, end, b"", error)


def _pass_over(window: _Window, size: int) -> int | None:
    """Consume a record of `size` bytes without holding it.

    Returns:
        None if it ends as declared; else the position of the next record that begins inside it, -1 without one.
    """
    marker, keep = -1, len(MARKER) - 1
    while size > 0:
        window.fill(min(PIECE, size + len(END)))
        if marker < 0 and (at := window.data.find(MARKER, 1)) > 0:
            marker = window.position + at + 1
        step = min(size, len(window.data) if window.at_end else max(1, len(window.data) - keep))
        if not step:
            return marker
        window.consume(step)
        size -= step
        if window.at_end and not window.data and size:
            return marker
    window.fill(len(END))
    tail = bytes(window.data[: len(END)])
    if not END.startswith(tail):
        return marker
    window.consume(len(tail))
    return None


def _decompress(body: bytes, encoding: str, longest: int) -> bytes:
    """Return the content of a body. Raises BadRecordError: it is damaged, too large, or in an unknown encoding.

    Crawlers often store the decoded body and keep the header. A body that does not begin as its encoding does is returned.
    """
    if len(body) > longest:
        raise BadRecordError("too_large", "", f"over {longest} bytes")
    for name in reversed([part.strip().lower() for part in encoding.split(",")]):
        if name not in DECODERS:
            raise BadRecordError("bad_field", "Content-Encoding", f"Content-Encoding is {ascii(name)[:100]}")
        content = DECODERS[name](body, longest + 1)
        if len(content) > longest:
            raise BadRecordError("too_large", "", f"over {longest} bytes when decompressed")
        body = content
    return body


def _gzip(body: bytes, most: int) -> bytes:
    """Decode all members of a gzip body. Bytes behind them that begin no member are ignored."""
    if not body.startswith(b"\x1f\x8b"):
        return _inflate(body, most, zlib.MAX_WBITS) if body.startswith(ZLIB) else body
    stream, content = gzip.GzipFile(fileobj=io.BytesIO(body)), bytearray()
    try:
        while len(content) < most and (piece := stream.read1(min(PIECE, most - len(content)))):
            content += piece
    except (EOFError, OSError, zlib.error) as error:
        if not (content and isinstance(error, gzip.BadGzipFile) and "Not a gzipped" in str(error)):
            raise BadRecordError("damaged", "", f"Content-Encoding: {error}") from error
    return bytes(content)


def _inflate(body: bytes, most: int, bits: int) -> bytes:
    """Decode zlib, or with negative `bits` deflate without a header."""
    inflater = zlib.decompressobj(bits)
    try:
        content = inflater.decompress(body, most)
    except zlib.error as error:
        if bits > 0:
            raise BadRecordError("damaged", "", f"Content-Encoding: {error}") from error
        return body
    return _complete(content, inflater.eof, most)


def _deflate(body: bytes, most: int) -> bytes:
    """Decode "deflate": zlib by the standard, and deflate without a header by some servers."""
    return _inflate(body, most, zlib.MAX_WBITS if body.startswith(ZLIB) else -zlib.MAX_WBITS)


def _brotli(body: bytes, most: int) -> bytes:
    import brotli  # fastwarc depends on it

    decoder = brotli.Decompressor()
    try:
        content = decoder.process(body, output_buffer_limit=most)
    except brotli.error:
        return body  # Brotli has no magic number: this was stored decoded
    return _complete(content, decoder.is_finished(), most)


def _zstandard(body: bytes, most: int) -> bytes:
    """Decode all frames of a Zstandard body."""
    import pyarrow as pa

    if not body.startswith(b"\x28\xb5\x2f\xfd"):
        return body
    content = bytearray()
    with pa.CompressedInputStream(pa.BufferReader(body), "zstd") as stream:
        try:
            while len(content) < most and (piece := stream.read(min(PIECE, most - len(content)))):
                content += piece
        except OSError as error:
            raise BadRecordError("damaged", "", f"Content-Encoding: {error}") from error
    return bytes(content)


def _complete(content: bytes, is_complete: bool, most: int) -> bytes:
    if not is_complete and len(content) < most:
        raise BadRecordError("damaged", "", "the compressed body ends early")
    return content


def _plain(body: bytes, most: int) -> bytes:
    return body


# Content-Encoding -> decoder(body, maximum number of bytes to return)
DECODERS = {
    "gzip": _gzip, "x-gzip": _gzip, "deflate": _deflate, "br": _brotli, "zstd": _zstandard,
    "": _plain, "identity": _plain, "none": _plain, "utf-8": _plain,
}  # fmt: skip

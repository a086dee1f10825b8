"""Tar (webdataset): one record per member. A `.json` member is an object; any other is the text of one record."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Mapping
from typing import Any

from whorl.data.files import compression, open_decompressed
from whorl.data.formats.format import Block, Format, Record
from whorl.data.formats.jsonl import parse_object
from whorl.data.formats.text import MARK
from whorl.data.quarantine import BadRecordError

RECORD_BYTES = 512


class Tar(Format):
    """See the top of this file. A block is a run of whole members."""

    def blocks(self, uri: str, block_bytes: int) -> Iterator[Block]:
        if compression(uri):
            yield from super().blocks(uri, block_bytes)
            return
        start = stop = 0
        with open_decompressed(uri) as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
            for member in archive:
                after = _end(member)
                if after - start > block_bytes and stop > start:
                    yield Block(start, stop, stop - start)
                    start = stop
                stop = after
        if stop > start:
            yield Block(start, stop, stop - start)

    def read(self, uri: str, start: int, stop: int | None) -> Iterator[Record]:
        with open_decompressed(uri) as stream:
            if start:
                stream.seek(start)
            if compression(uri):
                stop = None  # the size of the file is not that of the content
            number = 0
            with tarfile.open(fileobj=stream, mode="r|" if compression(uri) else "r:") as archive:
                while (member := archive.next()) is not None and (stop is None or member.offset < stop):
                    archive.members = []  # type: ignore[attr-defined]  # or every member stays in memory
                    inside = archive.extractfile(member) if member.isfile() else None
                    if inside is None:
                        continue
                    number += 1
                    value = self._value(member, inside.read(self.longest + 1))
                    yield Record(number, member.offset_data, member.size, value, _end(member))

    def _value(self, member: tarfile.TarInfo, data: bytes) -> Mapping[str, Any] | BadRecordError:
        if len(data) > self.longest:
            return BadRecordError("too_large", "", f"{member.name} has {member.size} bytes")
        data = data.removeprefix(MARK)
        if member.name.endswith(".json"):
            return parse_object(data)
        try:
            return {self.text_field: data.decode()}
        except UnicodeDecodeError as error:
            return BadRecordError("invalid_utf8", "", f"{member.name}, byte {error.start}: {error.reason}")


def _end(member: tarfile.TarInfo) -> int:
    return member.offset_data + -(-member.size // RECORD_BYTES) * RECORD_BYTES

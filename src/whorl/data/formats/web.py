"""Pages and documents as single files: HTML, PDF, Word, EPUB. A file is one record with its text, title and media type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from whorl.data.extraction import DOCX_TYPE, EPUB_TYPE, extract
from whorl.data.files import open_decompressed
from whorl.data.formats.format import Format, Record
from whorl.data.quarantine import BadRecordError

FILE_BYTES = 64_000_000  # of a file that is many times larger than its text


class HTML(Format):
    """The main content of an HTML page, without navigation, side bars and footers."""

    extracts = True
    media_type = "text/html"
    main_content = True

    def read(self, uri: str, start: int, stop: int | None) -> Iterator[Record]:
        if start:
            return
        with open_decompressed(uri) as stream:
            data = stream.read(self.longest + 1)
        value: dict[str, Any] | BadRecordError
        try:
            if len(data) > self.longest:
                raise BadRecordError("too_large", "", f"over {self.longest} bytes when decompressed")
            value = self._value(data)
        except BadRecordError as error:
            value = error
        yield Record(1, 0, len(data), value, len(data))

    def _value(self, data: bytes) -> dict[str, Any]:
        """Return the fields of a file. Raises BadRecordError."""
        page = extract(data, self.media_type, main_content=self.main_content)
        return {self.text_field: page.text, "title": page.title, "media_type": self.media_type}


class AllHTML(HTML):
    """All visible text of an HTML page."""

    main_content = False


class PDF(HTML):
    """The text of a PDF."""

    media_type = "application/pdf"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.longest = max(self.longest, FILE_BYTES)


class Docx(PDF):
    """The paragraphs and tables of a Word document."""

    media_type = DOCX_TYPE


class Epub(PDF):
    """The chapters of a book."""

    media_type = EPUB_TYPE

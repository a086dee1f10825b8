"""PDF as text, by pdfium: lines in reading order, joined to paragraphs; running heads and page numbers removed.

A PDF has glyphs at positions, and no words, lines or paragraphs. pdfium returns lines. A line that ends in a hyphen before a
lower-case letter is joined to the next. Lines at the top or bottom of most pages, equal but for digits, are running heads.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from whorl.data.extraction.page import Page, corpus_extra
from whorl.data.quarantine import BadRecordError

MARGIN_LINES = 2  # of each page, at its top and bottom, that may be running heads
MIN_PAGES = 4  # fewer have too little evidence of repetition
MIN_SHARE = 0.4  # of the pages that a running head is on; even and odd pages may differ
PAGE_NUMBER = re.compile(r"[\divxlcIVXLC]{1,8}")
HYPHEN = re.compile(
    r"(?<=\w)[\ufffe\u00ad\u0002](?:\r?\n)?|(?<=[a-z\u00df-\u00ff])-\r?\n(?=[a-z\u00df-\u00ff])"
)


def extract_pdf(data: bytes) -> Page:
    """Return the text and the title of a PDF.

    Raises:
        BadRecordError: "encrypted", a password is needed; "damaged", pdfium cannot read it.
        BadRecordError: "not_installed", the extra `corpus` is missing.
    """
    try:
        import pypdfium2
    except ImportError as error:
        raise corpus_extra("pypdfium2") from error
    try:
        document: Any = pypdfium2.PdfDocument(data)
        try:
            pages = [_page_text(document, number) for number in range(len(document))]
            title = " ".join(document.get_metadata_value("Title").split())
        finally:
            document.close()
    except pypdfium2.PdfiumError as error:
        reason = "encrypted" if "password" in str(error).lower() else "damaged"
        raise BadRecordError(reason, "", f"PDF: {error}") from error
    return Page("\n\n".join(_without_running_heads(pages)), title or None)


def _page_text(document: Any, number: int) -> str:
    page = document[number]
    try:
        text_page = page.get_textpage()
        try:
            text: str = text_page.get_text_range()
        finally:
            text_page.close()
    finally:
        page.close()
    # pdfium marks a hyphen at a line end by U+FFFE or U+0002
    return HYPHEN.sub("", text).replace("\r\n", "\n")


def _without_running_heads(pages: Sequence[str]) -> list[str]:
    """Return the pages without lines that repeat, but for digits, at the top or bottom of many, and without page numbers."""
    split = [[line for line in page.split("\n") if line.strip()] for page in pages]
    counts = Counter(key for lines in split for key in {_key(line) for line in _margins(lines)})
    least = max(MIN_SHARE * len(pages), MIN_PAGES / 2) if len(pages) >= MIN_PAGES else len(pages) + 1
    heads = {key for key, count in counts.items() if count >= least}

    def is_head(line: str) -> bool:
        return _key(line) in heads or (
            len(pages) >= MIN_PAGES and PAGE_NUMBER.fullmatch(line.strip()) is not None
        )

    kept = []
    for lines in split:
        first, last = 0, len(lines)
        while first < min(MARGIN_LINES, last) and is_head(lines[first]):
            first += 1
        while last > max(first, len(lines) - MARGIN_LINES) and is_head(lines[last - 1]):
            last -= 1
        kept.append("\n".join(lines[first:last]))
    return [page for page in kept if page]


def _margins(lines: Sequence[str]) -> list[str]:
    return [*lines[:MARGIN_LINES], *lines[-MARGIN_LINES:]]


def _key(line: str) -> str:
    return re.sub(r"\d+", "0", " ".join(line.split()))

"""Text of web pages and documents: bytes of a media type as text, with a title.

    page = extract(body, "text/html", "iso-8859-1")     # page.text, page.title

The libraries are the extra `corpus`. Each function is pure: bytes or a string, no files. `extract` reads all but plain text
in a child process with bounds (`bounded.py`).
"""

from __future__ import annotations

from whorl.data.extraction.bounded import run_bounded
from whorl.data.extraction.charset import decode
from whorl.data.extraction.html import extract_html
from whorl.data.extraction.page import Page, corpus_extra
from whorl.data.extraction.pdf import extract_pdf
from whorl.data.extraction.zipped import extract_docx, extract_epub
from whorl.data.quarantine import BadRecordError

HTML_TYPES = ("text/html", "application/xhtml+xml")
TEXT_TYPES = ("text/plain", "text/markdown", "text/x-rst")
PDF_TYPE = "application/pdf"
PDF_MAGIC = b"%PDF-"
DOCX_TYPE = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"
EPUB_TYPE = "application/epub+zip"
EXTRACTORS = {PDF_TYPE: extract_pdf, DOCX_TYPE: extract_docx, EPUB_TYPE: extract_epub}
MAX_CHARACTERS = 1 << 26

__all__ = [
    "DOCX_TYPE",
    "EPUB_TYPE",
    "Page",
    "corpus_extra",
    "decode",
    "extract",
    "extract_html",
    "extract_pdf",
    "media_type_of",
    "run_bounded",
]


def extract(data: bytes, media_type: str, charset: str = "", *, main_content: bool = True) -> Page:
    """Return the text of a page.

    Args:
        media_type: as declared; "" if unknown. A PDF is recognised by its first bytes first.
        charset: as declared in a header; "" if unknown.
        main_content: of HTML, without navigation, side bars and footers.

    Raises:
        BadRecordError: "media_type" (not read), "binary", "encrypted", "damaged", "too_costly", "too_large", or
            "not_installed" (the extra `corpus`).
    """
    kind = media_type_of(data, media_type)
    if kind in HTML_TYPES or kind in EXTRACTORS:
        return run_bounded(_extract, data, kind, charset, main_content, n_bytes=len(data))
    if kind in TEXT_TYPES:
        return Page(decode(data, charset))
    raise BadRecordError("media_type", "", f"{ascii(kind)[:100]} is not read")


def _extract(data: bytes, kind: str, charset: str, main_content: bool) -> Page:
    """Return the text of a page, in the child."""
    if kind in HTML_TYPES:
        page = extract_html(decode(data, charset, is_html=True), main_content=main_content)
    else:
        page = EXTRACTORS[kind](data)
    if len(page.text) > MAX_CHARACTERS:
        raise BadRecordError("too_large", "", f"a text of {len(page.text)} characters")
    return page


def media_type_of(data: bytes, declared: str) -> str:
    """Return the media type in lower case and without parameters; from the first bytes if none is declared."""
    if data.startswith(PDF_MAGIC):
        return PDF_TYPE
    kind = declared.partition(";")[0].strip().lower()
    if not kind and data[:512].lstrip()[:14].lower().startswith((b"<!doctype html", b"<html")):
        return HTML_TYPES[0]
    return kind

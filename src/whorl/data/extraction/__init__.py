"""Text of web pages and documents: bytes of a media type as text, with a title.

    page = extract(body, "text/html", "iso-8859-1")     # page.text, page.title

The libraries are the extra `corpus`. Each function is pure: bytes or a string, no files.
"""

from __future__ import annotations

from whorl.data.extraction.charset import decode
from whorl.data.extraction.html import extract_html
from whorl.data.extraction.page import Page, corpus_extra
from whorl.data.extraction.pdf import extract_pdf
from whorl.data.quarantine import BadRecordError

HTML_TYPES = ("text/html", "application/xhtml+xml")
TEXT_TYPES = ("text/plain", "text/markdown", "text/x-rst")
PDF_TYPE = "application/pdf"
PDF_MAGIC = b"%PDF-"

__all__ = ["Page", "corpus_extra", "decode", "extract", "extract_html", "extract_pdf", "media_type_of"]


def extract(data: bytes, media_type: str, charset: str = "", *, main_content: bool = True) -> Page:
    """Return the text of a page.

    Args:
        media_type: as declared; "" if unknown. A PDF is recognised by its first bytes first.
        charset: as declared in a header; "" if unknown.
        main_content: of HTML, without navigation, side bars and footers.

    Raises:
        BadRecordError: "media_type" (not read), "binary", "encrypted" or "damaged".
        ConfigError: the extra `corpus` is not installed.
    """
    kind = media_type_of(data, media_type)
    if kind in HTML_TYPES:
        return extract_html(decode(data, charset, is_html=True), main_content=main_content)
    if kind == PDF_TYPE:
        return extract_pdf(data)
    if kind in TEXT_TYPES:
        return Page(decode(data, charset))
    raise BadRecordError("media_type", "", f"{ascii(kind)[:100]} is not read")


def media_type_of(data: bytes, declared: str) -> str:
    """Return the media type in lower case and without parameters; from the first bytes if none is declared."""
    if data.startswith(PDF_MAGIC):
        return PDF_TYPE
    kind = declared.partition(";")[0].strip().lower()
    if not kind and data[:512].lstrip()[:14].lower().startswith((b"<!doctype html", b"<html")):
        return HTML_TYPES[0]
    return kind

"""Documents that are zip archives of XML: Word (.docx) and EPUB.

Members are read one at a time, and their sum is bounded. XML with a document type is
refused, so it can declare no entity. Chapters of a book are read as HTML, which has none to declare.
"""

from __future__ import annotations

import posixpath
import re
import zlib
from io import BytesIO
from urllib.parse import unquote
from xml.etree import ElementTree
from xml.etree.ElementTree import Element
from zipfile import BadZipFile, ZipFile

from whorl.data.extraction.charset import decode
from whorl.data.extraction.html import extract_html
from whorl.data.extraction.page import Page
from whorl.data.quarantine import BadRecordError

BROKEN = (BadZipFile, zlib.error, EOFError, OSError, ValueError, RuntimeError)  # raised for damaged archives
MAX_BYTES = 1 << 26  # of all members that are read
OLE = b"\xd0\xcf\x11\xe0"  # container of a Word document with a password, and of documents before 2007
IN_TEXT = {"tab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}
# Properties, among them tab stops; and the second form of a drawing.
LEFT_OUT = {"pPr", "rPr", "Fallback"}
LOCKS = "META-INF/encryption.xml"
CHAPTER_TYPES = ("application/xhtml+xml", "text/html")
# XHTML; in HTML, the text behind these would belong to the element.
SELF_CLOSED = re.compile(r"<(title|script|style|iframe|textarea|noscript)\b([^<>]*)/>", re.IGNORECASE)


def extract_docx(data: bytes) -> Page:
    """Return the text of a Word document: a line per paragraph, and per row of a table, whose cells tabs separate.

    Raises:
        BadRecordError: "damaged", "encrypted", "too_large" or "too_costly".
    """
    archive = _Archive(data)
    parts = {e.get("Type", "").rpartition("/")[2]: e.get("Target", "") for e in archive.xml("_rels/.rels")}
    root = archive.xml(parts.get("officeDocument", "word/document.xml").lstrip("/"))
    try:
        return Page(_text(root))
    except RecursionError:
        raise BadRecordError("too_costly", "", "its elements are nested too deep") from None


def extract_epub(data: bytes) -> Page:
    """Return the text of a book: all visible text of its chapters in the order of reading, and its title.

    Raises:
        BadRecordError: as `extract_docx`, and "not_installed" without the extra `corpus`.
    """
    archive = _Archive(data)
    root = next((e for e in archive.xml("META-INF/container.xml").iter() if _name(e) == "rootfile"), None)
    if root is None:
        raise BadRecordError("damaged", "", "META-INF/container.xml names no package")
    folder, package = posixpath.dirname(path := root.get("full-path", "")), archive.xml(path)
    items = {e.get("id"): e for e in package.iter() if _name(e) == "item"}
    locks = archive.xml(LOCKS).iter() if LOCKS in archive.names else ()
    locked = {unquote(e.get("URI", "")) for e in locks if _name(e) == "CipherReference"}
    texts = []
    for link in package.iter():
        item = items.get(link.get("idref")) if _name(link) == "itemref" else None
        if item is None or item.get("media-type") not in CHAPTER_TYPES:
            continue
        if link.get("linear") == "no" or "nav" in item.get("properties", "").split():  # tables of contents
            continue
        name = posixpath.normpath(posixpath.join(folder, unquote(item.get("href", ""))))
        if name in locked:
            raise BadRecordError("encrypted", "", f"{name} is encrypted")
        html = SELF_CLOSED.sub(r"<\1\2></\1>", decode(archive.read(name), is_html=True))
        texts.append(extract_html(html, main_content=False).text.strip())
    title = next((e.text for e in package.iter() if _name(e) == "title" and e.text), None)
    return Page("\n\n".join(filter(None, texts)), title)


class _Archive:
    """A zip archive whose members are read up to a bound."""

    def __init__(self, data: bytes) -> None:
        if data.startswith(OLE):
            raise BadRecordError("encrypted", "", "it has a password or is a .doc: save it as .docx without")
        try:
            self.zip = ZipFile(BytesIO(data))
        except BROKEN as error:
            raise BadRecordError("damaged", "", f"no zip archive: {error}") from None
        self.names, self.left = set(self.zip.namelist()), MAX_BYTES

    def read(self, name: str) -> bytes:
        if name not in self.names:
            raise BadRecordError("damaged", "", f"the archive has no {name}")
        if self.zip.getinfo(name).flag_bits & 1:
            raise BadRecordError("encrypted", "", f"{name} needs a password")
        try:
            with self.zip.open(name) as stream:
                data = stream.read(self.left + 1)
        except BROKEN as error:
            raise BadRecordError("damaged", "", f"{name}: {error}") from None
        self.left -= len(data)
        if self.left < 0:
            raise BadRecordError("too_large", "", f"over {MAX_BYTES} bytes when decompressed")
        return data

    def xml(self, name: str) -> Element:
        data = self.read(name)
        if b"<!DOCTYPE" in data or b"<!ENTITY" in data or b"\0" in data:
            raise BadRecordError("damaged", "", f"{name} declares a document type, or is no UTF-8")
        try:
            return ElementTree.fromstring(data)
        except (ElementTree.ParseError, LookupError, ValueError) as error:
            raise BadRecordError("damaged", "", f"{name}: {error}") from None


def _name(element: Element) -> str:
    return element.tag.rpartition("}")[2]


def _text(element: Element) -> str:
    name = _name(element)
    if name in LEFT_OUT:
        return ""
    if name == "t":
        return element.text or ""
    if name == "tr":
        cells = (_text(cell) for cell in element if _name(cell) != "trPr")
        return "\t".join(" ".join(cell.split()) for cell in cells) + "\n"
    return IN_TEXT.get(name) or "".join(map(_text, element)) + "\n" * (name == "p")

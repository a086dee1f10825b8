"""Bytes of unknown or wrongly declared encoding as text.

The order is that of browsers, with one exception. A byte-order mark wins; then bytes that are valid UTF-8, since text of
another encoding almost never is; then the declared encoding (HTTP header, `meta` element); then a statistical detector.
The exception: browsers prefer a declared single-byte encoding to valid UTF-8, and show mojibake.

A declared multi-byte encoding (GBK, Shift JIS, ...) is used if the bytes are valid in it: short texts may be valid UTF-8 as
well. A page that was cut in the middle of a character loses this character only.
"""

from __future__ import annotations

import codecs
import re

from whorl.data.extraction.page import corpus_extra
from whorl.data.quarantine import BadRecordError

MARKS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))
MULTI_BYTE = {
    "gb2312", "gbk", "gb18030", "hz", "big5", "big5hkscs", "shift_jis", "cp932", "euc_jp", "euc_kr", "cp949",
    "iso2022_jp", "iso2022_kr",
}  # fmt: skip
# Encodings that the table of labels of the WHATWG replaces by larger ones.
LARGER = {
    "ascii": "cp1252", "iso8859-1": "cp1252", "iso8859-9": "cp1254",
    "gb2312": "gbk", "shift_jis": "cp932", "euc_kr": "cp949",
}  # fmt: skip
META = re.compile(rb"<meta[^>]{0,500}?charset\s*=\s*[\"']?\s*([A-Za-z0-9_:.\-]{2,40})", re.IGNORECASE)
XML = re.compile(rb"^\s*<\?xml[^>]{0,200}?encoding\s*=\s*[\"']([A-Za-z0-9_:.\-]{2,40})")
META_BYTES = 1024
ESCAPE = b"\x1b"  # begins a shift of ISO-2022, whose bytes are ASCII
LONGEST_CHARACTER = 4
CUT = ("unexpected end of data", "incomplete multibyte sequence")
MAX_BAD_SHARE = (
    0.1  # of the characters of several bytes that are invalid in a text that is UTF-8 all the same
)
UNPRINTABLE = re.compile("[\0-\x08\x0e-\x1a\x1c-\x1f\x7f\ufffd]")
SAMPLE = 1 << 16
MAX_UNPRINTABLE = 0.05


def decode(data: bytes, declared: str = "", *, is_html: bool = False) -> str:
    """Return the text of `data`.

    Args:
        declared: the name of the encoding in a header, or "".
        is_html: look for a `meta` element, or an XML declaration, in the first bytes.

    Raises:
        BadRecordError: "binary", more than 5 % of the first characters are unprintable.
        ConfigError: an encoding must be detected, and the extra `corpus` is not installed.
    """
    text = _decode(data, declared, is_html)
    if (bad := len(UNPRINTABLE.findall(text, 0, SAMPLE))) > MAX_UNPRINTABLE * min(len(text), SAMPLE):
        raise BadRecordError(
            "binary", "", f"{bad} of the first {min(len(text), SAMPLE)} characters are unprintable"
        )
    return text


def _decode(data: bytes, declared: str, is_html: bool) -> str:
    for mark, encoding in MARKS:
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding, "replace")
    names = [codec for name in _declared(data, declared, is_html) if (codec := _codec(name))]
    if data.isascii() and ESCAPE not in data:
        return data.decode("ascii")
    strict = [name for name in names if name in MULTI_BYTE]
    for encoding in (*strict, "utf-8", *names):
        text = _strictly(data, encoding)
        if text is not None:
            return text
    text = data.decode("utf-8", "replace")
    bad = text.count("\ufffd")
    if bad <= MAX_BAD_SHARE * sum(1 for _ in re.finditer("[^\0-\x7f]", text)):
        return text
    single_byte = [name for name in names if name != "utf-8" and name not in MULTI_BYTE]
    return data.decode(single_byte[0] if single_byte else _detect(data), "replace")


def _declared(data: bytes, header: str, is_html: bool) -> list[str]:
    found = [header] if header else []
    if is_html:
        head = data[:META_BYTES]
        found += [match[1].decode() for pattern in (META, XML) if (match := pattern.search(head))]
    return found


def _codec(name: str) -> str | None:
    """Return Python's name of an encoding; None if it is unknown, no text encoding, or cannot be that of the bytes."""
    try:
        info = codecs.lookup(name.strip(" \"'"))
    except (LookupError, ValueError):
        return None
    is_text: bool = getattr(info, "_is_text_encoding", True)
    if not is_text or info.name.startswith(
        ("utf-7", "utf-16", "utf-32", "idna", "punycode", "unicode", "raw")
    ):
        return None  # a `meta` element that is readable as ASCII is not in UTF-16
    return LARGER.get(info.name, info.name)


def _strictly(data: bytes, encoding: str) -> str | None:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        if error.reason in CUT and len(data) - error.start < LONGEST_CHARACTER and error.start:
            return data[: error.start].decode(encoding, "ignore")
        return None
    except UnicodeError:
        return None


def _detect(data: bytes) -> str:
    try:
        from resiliparse.parse.encoding import detect_encoding
    except ImportError as error:
        raise corpus_extra("resiliparse") from error
    return _codec(detect_encoding(data) or "") or "cp1252"

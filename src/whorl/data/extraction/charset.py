"""Bytes of unknown or wrongly declared encoding as text.

The order is that of browsers, with one exception. A byte-order mark wins; then bytes that are valid UTF-8, since text of
another encoding almost never is; then the declared encoding (HTTP header, `meta` element); then a statistical detector.
The exception: browsers prefer a declared single-byte encoding to valid UTF-8, and show mojibake.

A declared multi-byte encoding (GBK, Shift JIS, ...) is used if the bytes are valid in it: short texts may be valid UTF-8 as
well. A page that was cut in the middle of a character loses this character only. No encoding is used in which more than
`MAX_BAD_SHARE` of the characters are invalid, if another one remains.

Names are those of the WHATWG's Encoding Standard (228 labels of 40 encodings), then Python's.
"""

from __future__ import annotations

import codecs
import re

from whorl.data.extraction.page import corpus_extra
from whorl.data.quarantine import BadRecordError

MARKS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))
MULTI_BYTE = {
    "gbk", "gb18030", "hz", "big5hkscs", "cp932", "euc_jp", "cp949", "johab", "iso2022_jp", "iso2022_kr",
}  # fmt: skip
LARGER = {"gbk": "gb18030", "euc_jp": "euc_jis_2004"}  # with more characters, some of which no page means
WIDE = ("utf-16-le", "utf-16-be")
META = re.compile(rb"<meta[^>]{0,500}?charset\s*=\s*[\"']?\s*([A-Za-z0-9_:.\-]{2,40})", re.IGNORECASE)
XML = re.compile(rb"^\s*<\?xml[^>]{0,200}?encoding\s*=\s*[\"']([A-Za-z0-9_:.\-]{2,40})")
META_BYTES = 1024
ESCAPE = b"\x1b"  # begins a shift of ISO-2022, whose bytes are ASCII
LONGEST_CHARACTER = 4
CUT = ("unexpected end of data", "incomplete multibyte sequence")
MAX_BAD_SHARE = 0.1  # of the characters beyond ASCII
NO_PAGES = ("utf-7", "utf-32", "idna", "punycode", "unicode", "raw")
BEYOND_ASCII = re.compile("[^\0-\x7f]")
UNPRINTABLE = re.compile("[\0-\x08\x0e-\x1a\x1c-\x1f\x7f\ufffd]")
SAMPLE = 1 << 16
MAX_UNPRINTABLE = 0.05


def decode(data: bytes, declared: str = "", *, is_html: bool = False) -> str:
    """Return the text of `data`.

    Args:
        declared: the name of the encoding in a header, or "".
        is_html: look for a `meta` element, or an XML declaration, in the first bytes.

    Raises:
        BadRecordError: "binary", more than 5 % of the first characters are unprintable; "not_installed", an encoding must be
            detected, and the extra `corpus` is not installed.
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
    names = _declared(data, declared, is_html)
    if data.isascii() and ESCAPE not in data and b"\0" not in data and "hz" not in names:
        return data.decode("ascii")
    first = [name for name in names if name in (WIDE if b"\0" in data else MULTI_BYTE)]
    names = [name for name in names if name not in WIDE]
    names += [LARGER[name] for name in names if name in LARGER]
    is_other = bool(names) and "utf-8" not in names
    for encoding in (*first, "utf-8", *names):
        text = _strictly(data, encoding, in_doubt=is_other and encoding == "utf-8")
        if text is not None:
            return text
    for encoding in ("utf-8", *names):
        text = data.decode(encoding, "replace")
        if text.count("\ufffd") <= MAX_BAD_SHARE * len(BEYOND_ASCII.findall(text)):
            return text
    detected = _detect(data)
    text = _strictly(data, detected) if detected else None
    return data.decode(names[0] if names else "cp1252", "replace") if text is None else text


def _declared(data: bytes, header: str, is_html: bool) -> list[str]:
    """Return Python's names of the declared encodings, that of the header first."""
    names = [_codec(header)] if header else []
    if is_html:
        found = (pattern.search(data[:META_BYTES]) for pattern in (META, XML))
        inside = [_codec(match[1].decode()) for match in found if match]
        names += [None if name in WIDE else name for name in inside]  # it is readable as ASCII
    return [name for name in names if name is not None]


def _codec(name: str) -> str | None:
    """Return Python's name of an encoding; None if it is unknown, or no encoding of pages."""
    try:
        import webencodings
    except ImportError as error:
        raise corpus_extra("webencodings") from error
    name = name.strip(" \"'")
    standard = webencodings.lookup(name)
    if standard is not None and standard.name == "x-user-defined":
        return "cp1252"
    try:
        # The standard refuses "hz-gb-2312" and "iso-2022-kr" (as "replacement"), which Python reads.
        info = standard.codec_info if standard and standard.name != "replacement" else codecs.lookup(name)
    except (LookupError, ValueError):
        return None
    is_text: bool = getattr(info, "_is_text_encoding", True)
    if not is_text or info.name.startswith(NO_PAGES):
        return None
    return info.name


def _strictly(data: bytes, encoding: str, *, in_doubt: bool = False) -> str | None:
    """Return the text if the bytes are valid, but for a cut last character. in_doubt: which is not all that shows it."""
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        is_cut = error.reason in CUT and len(data) - error.start < LONGEST_CHARACTER and error.start
        if is_cut and not (in_doubt and data[: error.start].isascii()):
            return data[: error.start].decode(encoding, "ignore")
        return None
    except UnicodeError:
        return None


def detect(data: bytes) -> str:
    """Return the likely encoding of the start of a text without a mark; "" for UTF-8. Raises BadRecordError as `decode`."""
    return "" if _strictly(data, "utf-8") is not None else _detect(data) or "cp1252"


def _detect(data: bytes) -> str | None:
    try:
        from resiliparse.parse.encoding import detect_encoding
    except ImportError as error:
        raise corpus_extra("resiliparse") from error
    return _codec(detect_encoding(data) or "")

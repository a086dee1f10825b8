"""Normalisation of text: mojibake, line ends, control characters, NFC; in this order.

Mojibake is UTF-8 that was decoded as Windows-1252: "Ã©" for "é". A line is repaired if every character of it beyond ASCII is
part of a sequence whose bytes are valid UTF-8, and at least two sequences of the text are. So "AMANHÃ”", in which one
sequence looks the same, stays.

NFC sorts the marks on a character by insertion, so 100,000 marks take seconds. More than `MAX_MARKS` on one
character are cut.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence

import regex

MAX_MARKS = 64
MIN_SEQUENCES = 2
LINE_END = re.compile("\r\n|[\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
CONTROL = re.compile("[\0-\x08\x0e-\x1f\x7f-\x9f\ufeff\ufffe\uffff]")
MANY_MARKS = regex.compile(rf"(\p{{M}}{{{MAX_MARKS}}})\p{{M}}+")


def _windows_1252() -> dict[str, int]:
    """Return character -> byte, for 0x80 to 0xff; the five bytes without a character stand for C1 controls."""
    table = {}
    for byte in range(0x80, 0x100):
        table[chr(byte)] = byte
        table[bytes([byte]).decode("cp1252", "ignore") or chr(byte)] = byte
    return table


BYTES = _windows_1252()


def _class(first: int, last: int) -> str:
    return "[" + "".join(re.escape(c) for c, byte in BYTES.items() if first <= byte <= last) + "]"


_NEXT = _class(0x80, 0xBF)
SEQUENCE = re.compile(
    f"{_class(0xC2, 0xDF)}{_NEXT}|{_class(0xE0, 0xEF)}{_NEXT}{{2}}|{_class(0xF0, 0xF4)}{_NEXT}{{3}}"
)
BEYOND_ASCII = re.compile("[^\0-\x7f]")


def repair_mojibake(text: str) -> str:
    """Return the text with UTF-8 that was decoded as Windows-1252 repaired (see the top of this file)."""
    if text.isascii() or SEQUENCE.search(text) is None:
        return text
    repaired, n_sequences = [], 0
    for line in text.split("\n"):
        fixed, count = SEQUENCE.subn(_decode, line)
        is_whole = count and BEYOND_ASCII.search(SEQUENCE.sub("", line)) is None and "\ufffd" not in fixed
        repaired.append(fixed if is_whole else line)
        n_sequences += count if is_whole else 0
    return "\n".join(repaired) if n_sequences >= MIN_SEQUENCES else text


def _decode(match: re.Match[str]) -> str:
    return bytes(BYTES[c] for c in match[0]).decode("utf-8", "replace")


def line_ends(text: str) -> str:
    """Return the text with every line end as "\\n": CR LF, CR, vertical tab, form feed, NEL and Unicode's separators."""
    return LINE_END.sub("\n", text)


def remove_controls(text: str) -> str:
    """Return the text without control characters, byte-order marks and noncharacters; tabs and line ends stay."""
    return CONTROL.sub("", text)


def nfc(text: str) -> str:
    """Return the text in Unicode's normal form C."""
    if text.isascii():
        return text
    return unicodedata.normalize("NFC", MANY_MARKS.sub(r"\1", text))


STEPS: dict[str, Callable[[str], str]] = {
    "mojibake": repair_mojibake,
    "line_ends": line_ends,
    "control_characters": remove_controls,
    "nfc": nfc,
}


def normalise(text: str, steps: Sequence[str] = tuple(STEPS)) -> str:
    """Apply the named steps of `STEPS`, in its order."""
    for name, step in STEPS.items():
        if name in steps:
            text = step(text)
    return text

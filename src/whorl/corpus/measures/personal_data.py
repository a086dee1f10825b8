"""Personal data and secrets: their counts as a measure, and a function that masks them.

    mask("Write to ann@example.org")    ("Write to <EMAIL>", {"email": 1, ...})

Patterns are strict, to spare ordinary numbers. A card number has a known first digit and a valid check digit (Luhn 1960).

An IP address is masked if it can be that of a host:

- It has four numbers up to 255.
- It is no version: "version", a comparison or a product name with a slash ("Chrome/114.0.5735.90") is not before it.
- Its first number is 1 to 223 and not 127, and its last is neither 0 nor 255, which are networks and broadcasts
  (RFC 1122, section 3.2.1.3). So 1.84.1.0, 255.255.255.0 and 127.0.0.1 stay.

A bare 1.84.1.7 is masked, since nothing distinguishes it from an address.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from whorl.corpus.measures.measure import Columns, Measure, Texts

_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_VERSION = re.compile(
    r"(?:\b(?:versions?|release|ver\.?|v|rev\.?)\s*[:=]?\s*|[<>=~^]=?\s*|\b[a-z][\w+-]*/)\Z", re.IGNORECASE
)


def _is_card(match: re.Match[str]) -> bool:
    digits = [int(c) for c in match.group() if c.isdigit()]
    doubled = [d if i % 2 == 0 else sum(divmod(2 * d, 10)) for i, d in enumerate(reversed(digits))]
    return sum(doubled) % 10 == 0


def _is_address(match: re.Match[str]) -> bool:
    first, *_, last = map(int, match.group().split("."))
    if not (0 < first < 224 and first != 127 and 0 < last < 255):
        return False
    return not _VERSION.search(match.string, max(0, match.start() - 20), match.start())


def _always(match: re.Match[str]) -> bool:
    return True


# kind -> pattern, further check. Earlier kinds are masked first.
KINDS: dict[str, tuple[re.Pattern[str], Callable[[re.Match[str]], bool]]] = {
    "secret": (
        re.compile(
            r"\bAKIA[0-9A-Z]{16}\b|\bgh[pousr]_[A-Za-z0-9]{36,}\b|\bsk-[A-Za-z0-9_-]{20,}|\bxox[abprs]-[A-Za-z0-9-]{10,}"
            r"|\bAIza[0-9A-Za-z_-]{35}|-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]+-----END [A-Z ]*PRIVATE KEY-----"
        ),
        _always,
    ),
    "email": (
        re.compile(r"(?<![\w.+-])[\w+-][\w.+-]{0,63}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}\b"),
        _always,
    ),
    "card": (re.compile(r"(?<![\d.-])[3-6]\d{3}([ -]?)\d{4}\1\d{4}\1\d{1,4}(?![\d-])(?!\.\d)"), _is_card),
    "ip": (re.compile(rf"(?<![\w.-]){_BYTE}(?:\.{_BYTE}){{3}}(?![\w-])(?!\.\d)"), _is_address),
    "phone": (
        re.compile(r"(?<![\w.+-])(?:\+\d{1,3}[ .-]?(?:\(\d{1,4}\)[ .-]?)?\d{1,4}(?:[ .-]?\d{2,4}){2,4}"
                   r"|\(\d{3}\) ?\d{3}-\d{4}|\d{3}-\d{3}-\d{4})(?![\w-])(?!\.\d)"),
        _always,
    ),
}  # fmt: skip


def mask(text: str) -> tuple[str, dict[str, int]]:
    """Return the text with <EMAIL>, <IP>, <PHONE>, <CARD> and <SECRET> for what was found, and the count of each kind."""
    counts = dict.fromkeys(KINDS, 0)
    for kind, (pattern, check) in KINDS.items():

        def replace(match: re.Match[str], kind: str = kind, check: Callable[..., bool] = check) -> str:
            if not check(match):
                return match.group()
            counts[kind] += 1
            return f"<{kind.upper()}>"

        text = pattern.sub(replace, text)
    return text, counts


def measure_personal_data(batch: Texts) -> Columns:
    """Return the count of each kind in each text."""
    found = [mask(text)[1] for text in batch.texts]
    return {f"n_{kind}": [counts[kind] for counts in found] for kind in KINDS}


PERSONAL_DATA = Measure(
    "personal_data",
    2,
    "Penedo et al. 2024, FineWeb; Luhn 1960, US patent 2950048",
    {f"n_{kind}": "int64" for kind in KINDS},
    lambda: measure_personal_data,
)

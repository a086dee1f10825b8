"""Sentences of a text, by rules.

A sentence ends at . ! ? or an ellipsis, with its closing quotes and brackets, before white space; and at the full stops of
Chinese, Japanese, Hindi and Urdu. These end none: an abbreviation, an initial ("J. Smith"), a list marker ("1. First"), a
full stop or an ellipsis before a small letter ("e.g. this"). A line break ends no sentence, as in the tokenizer that IFEval
uses (Kiss and Strunk 2006, doi:10.1162/coli.2006.32.4.485).
"""

from __future__ import annotations

import re

# Before a small letter no full stop ends a sentence, so "etc" and "Inc" need no entry.
_TITLES = "mr mrs ms dr prof st sr jr rev gen col capt lt sgt gov sen rep hon"
_OTHERS = "vs dept univ est approx vol fig figs eq eds cf e.g i.e eg ie u.s jan feb aug sept oct nov dec"
ABBREVIATIONS = frozenset(f"{_TITLES} {_OTHERS}".split())
_END = re.compile(r"(?P<mark>[.!?\u2026]+)[\"'\u2019\u201d)\]*_]*(?=\s|$)|[\u3002\uff01\uff1f\u0964\u06d4]+")
_LAST_WORD = re.compile(r"\S*\Z")
_LIST_MARKER = re.compile(r"(?:\A|\n)\s*\(?(?:\d{1,3}|[A-Za-z])\Z")


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text, without surrounding white space."""
    parts, start = [], 0
    for match in _END.finditer(text):
        if match["mark"] and not set(match["mark"]) & set("!?") and not _ends(text, start, match):
            continue
        parts.append(text[start : match.end()])
        start = match.end()
    return [part.strip() for part in [*parts, text[start:]] if re.search(r"\w", part)]


def _ends(text: str, start: int, match: re.Match[str]) -> bool:
    """Return whether the full stop of a match ends a sentence."""
    before = text[max(start, match.start() - 40) : match.start()]
    found = _LAST_WORD.search(before)
    word = found[0].lstrip("(\"'\u201c*_[") if found else ""
    after = text[match.end() : match.end() + 40].lstrip()
    if not after:
        return True
    if after[0].islower() or _LIST_MARKER.search(before):
        return False
    if word.lower() in ABBREVIATIONS:
        return False
    return not (len(word) == 1 and word.isupper() and word != "I" and after[0].isupper())

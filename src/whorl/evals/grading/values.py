"""Values in texts: numbers as exact fractions, and letters of options.

A number has one grammar. "1,234.50" is one number: commas or spaces separate groups of three digits, so "1,2" and "0,001"
are two numbers each. "3/4", "1 1/2" and "½" are one number, and "10-3" is two: a sign belongs to a number only if no number
or word precedes it.

Two different values side by side, or joined by "or", are alternatives ("12 or 13", "A, B"). A text whose answer is one of
several alternatives has no answer.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

_SPACES = " \xa0\u2009\u202f"
_GROUPS = rf"[1-9]\d{{0,2}}(?:(?:,\d{{3}}){{1,100}}|(?:[{_SPACES}]\d{{3}}){{1,100}})(?!\d)"
_DIGITS = rf"(?:{_GROUPS}|\d{{1,400}})(?:\.\d{{1,400}})?|\.\d{{1,400}}"
_NUMBER = re.compile(
    r"(?<![\w.])(?P<sign>(?<![)\]\d\w.])[-+\u2212])?\s?(?:[$€£]\s?)?(?P<minus>(?<=[$€£])[-\u2212])?"
    rf"(?P<top>{_DIGITS})"
    rf"(?:[eE](?P<power>[-+]?\d{{1,3}})(?!\w)|\s?/\s?(?P<bottom>{_DIGITS}))?"
)
_FILLER = (
    r"(?:\s+(?:the|answers?|is|it|could|might|may|be|maybe|perhaps|possibly|even|else|also|option|choice))*"
)
# Text between alternatives: "12 or 13", "12 apples or maybe 13", "12 and 13", "12, 13", "12-13", "7+5".
_NUMBERS_APART = re.compile(
    r"[^\d.!?\n]{0,40}\bor\b[^\d.!?\n]{0,30}|[ \t%$€£,;&/+*×~–—\u2212-]{1,8}(?:(?:and|to|by|x)[ \t$€£*-]{1,8})?"
)
_FRAC = re.compile(
    r"(?:(?<!\d)(?P<whole>\d{1,9})\s?)?\\[dt]?frac(?:\{(?P<top>[^{}]*)\}\{(?P<bottom>[^{}]*)\}|(?P<a>\d)(?P<b>\d))"
)
_MIXED = re.compile(r"(?<![\w.,/])(\d{1,9}) (\d{1,9})\s?/\s?(\d{1,9})(?![\w/])")
_GLYPH = re.compile(r"(?:(?<![\d.,])(\d{1,9})\s?)?([¼-¾⅐-⅞])")

CHOICE_LETTERS = "ABCDEFGHIJKLMNOPQR"
# An option, also (B), ( B ), **B** or "B". The words "A" and "I" before a small letter are no options.
_PLAIN_LETTER = (
    r"(?P<letter>[A-Z])(?![\w']|(?<=A) (?!because|since|as |and |or |is |with )[a-z]"
    r"|(?<=I) (?!because|since|as |and |or |is )[a-z])"
)
# Repetitions have limits, since adjacent ones take long.
_LETTER = rf"(?:[(\[*_\"'$]{{1,6}}\s?)?(?:\\text\{{)?{_PLAIN_LETTER}"
_LEADING = re.compile(rf"^[\W_]*{_PLAIN_LETTER}(?=[)\].:*\s]*$|[)\].:*]+\s)(?![)\].:*]*\s+(?:or|and|nor)\b)")
_OPTION = re.compile(rf"(?i:\b(?:option|choice)\b(?:\s{{1,4}}is\b:?)?)\s{{0,4}}{_LETTER}")
_TRAILING = re.compile(r"(?:\*\*\(?|__\(?|\(|\[)(?P<letter>[A-Z])(?:\)?\*\*|\)?__|\)|\])\W{0,20}$")
# From the most explicit form to the least. The last match counts.
_CHOICES = (
    re.compile(rf"\\boxed\{{\s*(?:\\text\{{)?\s*{_LETTER}"),
    re.compile(
        r"(?i:\banswers?\b(?:\s{1,4}(?:is|(?:would|must|should)\s+be))?[*_]{0,3}\s{0,4}[:=]?[*_]{0,3}\s{0,4}"
        rf"(?:therefore|thus|likely|probably|either)?\s{{0,4}}(?:option|choice)?)\s{{0,4}}{_LETTER}"
    ),
    re.compile(
        rf"(?<!\w){_LETTER}\s?[)\]*_\"']{{0,6}}(?i:\s{{1,4}}(?:is|must be|would be)\s{{1,4}}(?:\w+\s+)?the\s+(?:\w+\s+)?"
        r"(?:answer|option|choice)\b)"
    ),
    _LEADING,
)
_SMALL = re.compile(r"[\W_]{0,6}[a-z][\W_]{0,6}")  # a small letter alone
_ANY_LETTER = re.compile(rf"(?<![\w']){_PLAIN_LETTER}(?!\s+(?:is|are|was|fails?|can|does|has|would)\b)")
_LETTERS_APART = re.compile(
    rf"(?:[^.!?\n]{{0,40}}\bor\b{_FILLER}"
    rf"|[)\]*_\"'$}} ]{{0,6}}(?:[,/;&]|\b(?:and|nor)\b)(?:\s*(?:option|choice))?)[(\[*_\"'$ ]{{0,6}}"
)
_SENTENCE_BREAK = re.compile(r"[.!?](?=\s)|\n")


def plain_fractions(text: str) -> str:
    """Return the text with fractions of LaTeX and of Unicode, and mixed numbers, as quotients: 1/2."""
    if "\\" in text:
        text = _FRAC.sub(_quotient, text)
    if not text.isascii():
        text = _GLYPH.sub(
            lambda m: str(int(m[1] or 0) + Fraction(unicodedata.numeric(m[2])).limit_denominator(99)), text
        )
    if "/" in text:
        text = _MIXED.sub(lambda m: _mixed(m[1], m[2], m[3]) if int(m[2]) < int(m[3]) else m[0], text)
    return text


def _quotient(found: re.Match[str]) -> str:
    top, bottom = (found["top"] or found["a"] or "").strip(), (found["bottom"] or found["b"] or "").strip()
    if found["whole"] and top.isdecimal() and bottom.isdecimal() and len(top + bottom) < 400:
        return _mixed(found["whole"], top, bottom)
    return f"{found['whole'] or ''}{top}/{bottom}"


def _mixed(whole: str, top: str, bottom: str) -> str:
    return f"{int(whole) * int(bottom) + int(top)}/{bottom}"


def read_number(text: str) -> Fraction | None:
    """Return the number that a text is, also with a currency, a percent sign or a full stop; None for any other text."""
    found = _NUMBER.fullmatch(plain_fractions(text).strip().rstrip("%. "))
    return None if found is None else _value(found)


def find_number(text: str, *, last: bool) -> tuple[Fraction | None, bool]:
    """Return (the first or last number in a text, whether the text has a number); no number if it has an alternative."""
    text = plain_fractions(text)
    chosen = other = None
    for found in _NUMBER.finditer(text):
        other, chosen = (chosen, found) if last else (found, chosen or found)
        if not last and other is not chosen:
            break
    if chosen is None:
        return None, False
    value = _value(chosen)
    if other is not None and other is not chosen and _value(other) != value:
        first, second = (other, chosen) if last else (chosen, other)
        if _NUMBERS_APART.fullmatch(text, first.end(), second.start("top")):
            return None, True
    return value, True


def _value(found: re.Match[str]) -> Fraction | None:
    value = Fraction(re.sub(rf"[,{_SPACES}]", "", found["top"]))
    if found["power"]:
        value *= Fraction(10) ** int(found["power"])
    if found["bottom"]:
        denominator = Fraction(re.sub(rf"[,{_SPACES}]", "", found["bottom"]))
        if denominator == 0:
            return None
        value /= denominator
    return -value if found["minus"] or found["sign"] in ("-", "\u2212") else value


def find_choice(text: str, letters: str = CHOICE_LETTERS) -> str | None:
    """Return the letter that a text gives as its answer to a multiple-choice question, or None.

    The text is searched for these forms, in this order:

        stated        \\boxed{B}; "answer is (B)", "Answer: B"; "(B) is the correct option"
        at the start  "B", "b", "(B) because"
        last line     begins with a letter ("(B) Paris"), or ends with a marked one ("so it must be **B**.")
        first line    begins with a letter
        named         "option B", in the last line or the first

    None if the letter is not one of `letters`, or the sentence has another letter as an alternative.
    """
    text = text.strip()
    if _SMALL.fullmatch(text):
        text = text.upper()
    lines = text.split("\n")
    places = [(pattern, text) for pattern in _CHOICES]
    places += [(_LEADING, lines[-1]), (_TRAILING, lines[-1]), (_LEADING, lines[0])]
    places += [(_OPTION, lines[-1]), (_OPTION, lines[0])]
    for pattern, part in places:
        found = [match for match in pattern.finditer(part) if match["letter"] in letters]
        if found:
            return None if _has_alternative(part, found[-1], letters) else found[-1]["letter"]
    return None


def _has_alternative(text: str, found: re.Match[str], letters: str) -> bool:
    start, end = found.span("letter")
    begin = max(
        (m.end() for m in _SENTENCE_BREAK.finditer(text, max(0, start - 200), start)),
        default=max(0, start - 200),
    )
    stop = _SENTENCE_BREAK.search(text, end, end + 200)
    for other in _ANY_LETTER.finditer(text, begin, stop.start() if stop else end + 200):
        if other["letter"] != found["letter"] and other["letter"] in letters:
            between = (end, other.start()) if other.start() > start else (other.end(), start)
            if _LETTERS_APART.fullmatch(text, *between):
                return True
    return False

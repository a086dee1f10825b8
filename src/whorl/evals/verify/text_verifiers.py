"""Verifiers of texts: exact, numeric, choice, format. No program runs.

The answer of a completion is the text in its last <answer> tags. Without tags it is the text after the last `#### `
(the format of GSM8K, arXiv 2110.14168), or else the whole completion. The text up to `</think>` does not count. A numeric
answer is the last number in it, since a chain of thought ends with its result.

The subtle part is the grammar of numbers. "1,234.50" is one number (a comma is followed by three digits), "3/4" is one,
and "10-3" is two: a sign belongs to a number only if no number or word precedes it. Numbers are compared as exact
fractions, so 0.5 equals 1/2.

Patterns are matched by the `regex` library with a time limit, because some texts take a backtracking matcher
exponential time.
"""

from __future__ import annotations

import re
from fractions import Fraction

import regex

from whorl.errors import DataError
from whorl.evals.verify.task import Verdict, VerifiableTask

PATTERN_SECONDS = 1.0
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,400})(?:\.\d{1,400})?|\.\d{1,400}"
_NUMBER = re.compile(
    rf"(?<![\w.])(?P<sign>(?<![)\]\d\w.])[-+\u2212])?\s?(?:[$€£]\s?)?(?P<top>{_DIGITS})"
    rf"(?:[eE](?P<power>[-+]?\d{{1,3}})(?!\w)|\s?/\s?(?P<bottom>{_DIGITS}))?"
)
CHOICE_LETTERS = "ABCDEFGHIJKLMNOPQR"
# An option, also (B), **B** or "B". The words "A" and "I" before a small letter are no options.
_PLAIN_LETTER = (
    r"(?P<letter>[A-Z])(?![\w']|(?<=A) (?!because|since|as |and |or |is |with )[a-z]"
    r"|(?<=I) (?!because|since|as |and |or |is )[a-z])"
)
_LETTER = rf"[(\[*_\"'$]{{0,6}}(?:\\text\{{)?{_PLAIN_LETTER}"  # repetitions have limits, since adjacent ones take long
_LEADING = re.compile(rf"^[\W_]*{_PLAIN_LETTER}(?=[)\].:*\s]*$|[)\].:*]+\s)(?![)\].:*]*\s+(?:or|and|nor)\b)")
_OPTION = re.compile(rf"(?i:\b(?:option|choice)\b(?:\s{{1,4}}is\b:?)?)\s{{0,4}}{_LETTER}")
_TRAILING = re.compile(r"(?:\*\*\(?|__\(?|\(|\[)(?P<letter>[A-Z])(?:\)?\*\*|\)?__|\)|\])\W{0,20}$")
# From the most explicit form to the least. The last match counts.
_CHOICES = (
    re.compile(rf"\\boxed\{{\s*(?:\\text\{{)?\s*{_LETTER}"),
    re.compile(
        r"(?i:\banswers?\b(?:\s{1,4}(?:is|(?:would|must|should)\s+be))?[*_]{0,3}\s{0,4}[:=]?[*_]{0,3}\s{0,4}"
        rf"(?:therefore|thus|likely|probably)?\s{{0,4}}(?:option|choice)?)\s{{0,4}}{_LETTER}"
    ),
    re.compile(
        rf"(?<!\w){_LETTER}[)\]*_\"']{{0,6}}(?i:\s{{1,4}}(?:is|must be|would be)\s{{1,4}}(?:\w+\s+)?the\s+(?:\w+\s+)?"
        r"(?:answer|option|choice)\b)"
    ),
    _LEADING,
)
_FRAC = re.compile(
    r"(?:(?<!\d)(?P<whole>\d{1,9})\s?)?\\[dt]?frac(?:\{(?P<top>[^{}]*)\}\{(?P<bottom>[^{}]*)\}|(?P<a>\d)(?P<b>\d))"
)


def after_thinking(text: str) -> str:
    """Return the text after the last `</think>`, all of a text without thoughts, and "" if the thoughts did not end."""
    _, closed, after = text.rpartition("</think>")
    return "" if not closed and "<think>" in text else after


def extract_answer(text: str) -> str:
    """Return the answer part of a completion; see the top of this file."""
    text = after_thinking(text) or text
    for part in reversed(
        text.split("</answer>")[:-1]
    ):  # a pattern would take quadratic time on unclosed tags
        _, opened, inside = part.partition("<answer>")
        if opened:
            return inside.strip()
    return text.rpartition("####")[2].strip()


def plain_fractions(text: str) -> str:
    """Return the text with LaTeX's fractions as quotients: 1/2; a mixed number is one quotient."""

    def quotient(found: re.Match[str]) -> str:
        top, bottom = (
            (found["top"] or found["a"] or "").strip(),
            (found["bottom"] or found["b"] or "").strip(),
        )
        if found["whole"] and top.isdecimal() and bottom.isdecimal() and len(top + bottom) < 400:
            return f"{int(found['whole']) * int(bottom) + int(top)}/{bottom}"
        return f"{found['whole'] or ''}{top}/{bottom}"

    return _FRAC.sub(quotient, text)


def last_number(text: str) -> Fraction | None:
    """Return the last number in a text, or None."""
    found = None
    for found in _NUMBER.finditer(plain_fractions(text)):  # noqa: B007 (the last one is wanted)
        pass
    return None if found is None else _value(found)


def first_number(text: str) -> Fraction | None:
    """Return the first number in a text, or None."""
    found = _NUMBER.search(plain_fractions(text))
    return None if found is None else _value(found)


def _value(found: re.Match[str]) -> Fraction | None:
    value = Fraction(found["top"].replace(",", ""))
    if found["power"]:
        value *= Fraction(10) ** int(found["power"])
    if found["bottom"]:
        denominator = Fraction(found["bottom"].replace(",", ""))
        if denominator == 0:
            return None
        value /= denominator
    return -value if found["sign"] in ("-", "\u2212") else value


def extract_choice(text: str, letters: str = CHOICE_LETTERS) -> str | None:
    """Return the letter that a completion gives as its answer to a multiple-choice question, or None.

    The answer part (`extract_answer`) is searched for these forms, in this order:

        stated        \\boxed{B}; "answer is (B)", "Answer: B"; "(B) is the correct option"
        at the start  "B", "b", "(B) because"
        last line     begins with a letter ("(B) Paris"), or ends with a marked one ("so it must be **B**.")
        first line    begins with a letter
        named         "option B", in the last line or the first

    None if the letter is not one of `letters`.
    """
    answer = extract_answer(text)
    if len(answer) == 1:
        answer = answer.upper()
    lines = answer.split("\n")
    places = [(pattern, answer) for pattern in _CHOICES]
    places += [(_LEADING, lines[-1]), (_TRAILING, lines[-1]), (_LEADING, lines[0])]
    places += [(_OPTION, lines[-1]), (_OPTION, lines[0])]
    for pattern, part in places:
        found = [match["letter"] for match in pattern.finditer(part) if match["letter"] in letters]
        if found:
            return found[-1]
    return None


def choice(task: VerifiableTask, completion: str) -> Verdict:
    """Check that the completion chooses the expected option, a letter (see `extract_choice`).

    Raises:
        DataError: the expected answer has no letter.
    """
    expected = extract_choice(task.answer)
    if expected is None:
        raise DataError(
            f"task {task.id!r}: answer {task.answer!r} has no letter", expected="the letter of an option"
        )
    got = extract_choice(completion)
    return _verdict(got == expected, "another choice" if got is not None else "no choice")


def exact(task: VerifiableTask, completion: str) -> Verdict:
    """Check that the answer equals the expected text, except for surrounding white space."""
    return _verdict(extract_answer(completion) == extract_answer(task.answer), "another answer")


def numeric(task: VerifiableTask, completion: str) -> Verdict:
    """Check that the last number of the answer equals the last number of the expected answer.

    Raises:
        DataError: the expected answer has no number.
    """
    expected = last_number(extract_answer(task.answer))
    if expected is None:
        raise DataError(
            f"task {task.id!r}: answer {task.answer!r} has no number", expected="a number to compare with"
        )
    got = last_number(extract_answer(completion))
    return _verdict(got == expected, "another number" if got is not None else "no number")


def format_match(task: VerifiableTask, completion: str) -> Verdict:
    """Check the completion's form: `task.answer` is a pattern for all of it, or a list of tags ("<think><answer>").

    Tags must appear in this order, each opened and closed once and not empty, with only white space around them.
    """
    if re.fullmatch(r"(<\w+>)+", task.answer):
        names = re.findall(r"<(\w+)>", task.answer)
        pattern = r"\s*".join(rf"<{n}>(?=.*?\S.*?</{n}>)(?:(?!</?{n}>).)*</{n}>" for n in names)
        for name in names:
            inner = re.search(rf"<{name}>\s*</{name}>", completion)
            if inner or completion.count(f"<{name}>") != 1 or completion.count(f"</{name}>") != 1:
                return Verdict(0.0, False, "another form")
    else:
        pattern = task.answer
    try:
        match = regex.fullmatch(pattern, completion.strip(), flags=regex.DOTALL, timeout=PATTERN_SECONDS)
    except TimeoutError:
        return Verdict(0.0, False, "timeout: the pattern takes too long on this text", failed=True)
    except regex.error as error:
        raise DataError(f"task {task.id!r}: {task.answer!r} is not a valid pattern: {error}") from error
    return _verdict(match is not None, "another form")


def _verdict(passed: bool, otherwise: str) -> Verdict:
    return Verdict(float(passed), passed, "passed" if passed else otherwise)

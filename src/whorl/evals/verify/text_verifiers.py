"""Verifiers of texts: exact, numeric, choice, format. No program runs.

The answer of a completion is the text in its last <answer> tags. Without tags it is the text after the last `#### `
(the format of GSM8K, arXiv 2110.14168), or else the whole completion. A numeric answer is the last number in it, since
a chain of thought ends with its result.

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
_LETTER = r"[(\[*_\"']*(?P<letter>[A-Z])(?![\w'])"  # an option, also (B), **B** or "B"
# From the most explicit form to the least. The last match counts.
_CHOICES = (
    re.compile(rf"\\boxed\{{\s*(?:\\text\{{)?\s*{_LETTER}"),
    re.compile(rf"(?i:\banswer\b(?:\s+is|\s+would\s+be)?\s*[:=]?\s*(?:option|choice)?)\s*{_LETTER}"),
    re.compile(rf"^\W*{_LETTER}(?=[)\].:*\s]*$|[)\].:*]+\s)"),
    re.compile(rf"(?i:\b(?:option|choice)\b)\s*{_LETTER}"),
)
_FRAC = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")


def extract_answer(text: str) -> str:
    """Return the answer part of a completion; see the top of this file."""
    for part in reversed(
        text.split("</answer>")[:-1]
    ):  # a pattern would take quadratic time on unclosed tags
        _, opened, inside = part.partition("<answer>")
        if opened:
            return inside.strip()
    return text.rpartition("####")[2].strip()


def last_number(text: str) -> Fraction | None:
    """Return the last number in a text, or None."""
    found = None
    for found in _NUMBER.finditer(_FRAC.sub(r"\1/\2", text)):  # noqa: B007 (the last one is wanted)
        pass
    if found is None:
        return None
    value = Fraction(found["top"].replace(",", ""))
    if found["power"]:
        value *= Fraction(10) ** int(found["power"])
    if found["bottom"]:
        denominator = Fraction(found["bottom"].replace(",", ""))
        if denominator == 0:
            return None
        value /= denominator
    return -value if found["sign"] in ("-", "\u2212") else value


def extract_choice(text: str, letters: str = "ABCDEFGHIJ") -> str | None:
    """Return the letter that a completion gives as its answer to a multiple-choice question, or None.

    The answer part (`extract_answer`) is searched for "\\\\boxed{B}", then "answer is (B)" or "Answer: B", then a letter at
    its start ("B", "b", "(B) because"), then "option B". None if the letter is not one of `letters`.
    """
    answer = extract_answer(text)
    if len(answer) == 1:
        answer = answer.upper()
    for pattern in _CHOICES:
        found = [match["letter"] for match in pattern.finditer(answer) if match["letter"] in letters]
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

"""Answers that are texts: exact, numeric, of a form. No program runs here.

What of a completion is its answer? The text inside its last <answer> tags; if there are none, what follows the last `#### `
(as GSM8K writes its solutions, arXiv 2110.14168); if that is missing too, all of it. For a number, then, the last one that
stands there, since a chain of thought ends with its result.

The subtle part is what counts as one number. "1,234.50" is one (the commas stand before three digits each), "3/4" is one,
"10-3" are two, 10 and 3 (a sign belongs to a number only where no number or word goes before), and 0.5 equals 1/2: numbers
are compared as exact fractions, never as floats.

Patterns are tried by the `regex` library under a time limit: the pattern is ours, but the text is not, and some texts take
a backtracking matcher for ever.
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
_FRAC = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def extract_answer(text: str) -> str:
    """The part of a completion that is its answer; see the top of this file."""
    tagged: list[str] = _ANSWER.findall(text)
    return (tagged[-1] if tagged else text.rpartition("####")[2]).strip()


def last_number(text: str) -> Fraction | None:
    """The last number in a text; None where there is none."""
    found = None
    for found in _NUMBER.finditer(_FRAC.sub(r"\1/\2", text)):  # noqa: B007 (the last one is wanted)
        pass
    if found is None:
        return None
    value = Fraction(found["top"].replace(",", ""))
    if found["power"]:
        value *= Fraction(10) ** int(found["power"])
    if found["bottom"]:
        below = Fraction(found["bottom"].replace(",", ""))
        if below == 0:
            return None
        value /= below
    return -value if found["sign"] in ("-", "\u2212") else value


def exact(task: VerifiableTask, completion: str) -> Verdict:
    """The answer is the expected text, but for white space around it."""
    return _verdict(extract_answer(completion) == extract_answer(task.answer), "another answer")


def numeric(task: VerifiableTask, completion: str) -> Verdict:
    """The last number of the answer equals the last number of what is expected.

    Raises:
        DataError: what is expected has no number.
    """
    expected = last_number(extract_answer(task.answer))
    if expected is None:
        raise DataError(
            f"task {task.id!r}: answer {task.answer!r} has no number", expected="a number to compare with"
        )
    got = last_number(extract_answer(completion))
    return _verdict(got == expected, "another number" if got is not None else "no number")


def format_match(task: VerifiableTask, completion: str) -> Verdict:
    """The completion has a form: `task.answer` is a pattern for all of it, or tags ("<think><answer>").

    Tags are to stand in this order, each opened and closed once, none empty, with nothing but white space around them.
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
        fits = regex.fullmatch(pattern, completion.strip(), flags=regex.DOTALL, timeout=PATTERN_SECONDS)
    except TimeoutError:
        return Verdict(0.0, False, "timeout: the pattern takes too long on this text", failed=True)
    except regex.error as error:
        raise DataError(f"task {task.id!r}: {task.answer!r} is no pattern: {error}") from error
    return _verdict(fits is not None, "another form")


def _verdict(passed: bool, otherwise: str) -> Verdict:
    return Verdict(float(passed), passed, "passed" if passed else otherwise)

"""Metrics of short answers: exact text, number, option. Strict and lenient, side by side.

    strict     the text has the demanded form, and the answer in it equals the gold answer
    lenient    the final answer, in any form that `find_final_answer` reads, equals the gold answer

The demanded form is one of FORMS or a pattern with one group. A model that answers correctly in another form has strict 0
and lenient 1, so the difference of both shares measures the form and not the ability.

Outcomes belong to the lenient score:

    right, wrong    an answer was found
    refused         no marked answer, and the text declines
    truncated       the limit of tokens cut the text before a complete statement of the answer
    not_found       the text ended and has no answer
"""

from __future__ import annotations

import re
from functools import cache
from string import ascii_uppercase
from typing import Any

from whorl.errors import ConfigError, DataError, one_of
from whorl.evals.metrics.refusal import is_refusal
from whorl.evals.metrics.result import Graded
from whorl.evals.verify.final_answer import FinalAnswer, find_final_answer, same_answer
from whorl.evals.verify.text_verifiers import (
    CHOICE_LETTERS,
    after_thinking,
    extract_answer,
    extract_choice,
    first_number,
    last_number,
)

FORMS = {
    "bare": r"\A\s*(.+?)\s*\Z",
    "mark": r"####[ \t]*(\S[^\n]*?)[ \t]*(?:\n|\Z)",
    "boxed": r"\\boxed\{([^{}]*)\}",
    "tags": r"<answer>\s*([^<]*?)\s*</answer>",
    "stated": r"(?i:the answer is) ([^\n]+?)\.?[ \t]*(?:\n|\Z)",
}
VERBATIM = "verbatim"  # of `exact`
_OPTION = re.compile(r"\(?([A-Z])\)?")


def exact(gold: str, text: str, *, finish: str = "stop", form: str = "bare") -> Graded:
    """Return scores exact_strict and exact_lenient: the answer equals the gold text.

    Lenient: equal by `same_answer`. A gold answer "(B)" is an option, which "B", "B.", "(B) Paris" and "option B" state too.

    Args:
        gold: the answer; what follows "####" in it, if anything does.
        finish: "length" if the limit of tokens cut the text.
        form: the demanded form, a name of FORMS, a pattern with one group, or "verbatim": equal with all white space.

    Raises:
        ConfigError: the form is invalid.
        DataError: the gold answer is empty.
    """
    expected = _gold(gold)
    found = find_final_answer(text)
    strict = text == gold if form == VERBATIM else any(answer == expected for answer in _demanded(form, text))
    option = re.fullmatch(r"\(([A-Z])\)", expected)
    if option:
        letter = _letter(text, found, CHOICE_LETTERS if option[1] in CHOICE_LETTERS else ascii_uppercase)
        answer = f"({letter})" if letter else ""
        return _graded("exact", strict, answer == expected, text, finish, found, answer)
    reading = next((r for r in found.readings if same_answer(expected, r)), None)
    right = reading is not None
    if reading is None:
        limit = max(5, 2 * len(expected.split()))
        reading = min(
            (r for r in found.readings if found.explicit or len(r.split()) <= limit), key=len, default=""
        )
    return _graded("exact", strict, right, text, finish, found, reading)


def numeric(gold: str, text: str, *, finish: str = "stop", form: str = "bare") -> Graded:
    """Return scores numeric_strict and numeric_lenient: the answer's number equals the gold number, as fractions.

    Lenient: the number of a marked answer, or else the last number of the text. Arguments and errors as for `exact`.

    Raises:
        DataError: the gold answer has no number.
    """
    expected = last_number(_gold(gold))
    if expected is None:
        raise DataError(f"the gold answer {gold!r} has no number", expected="a number to compare with")
    strict = any(last_number(answer) == expected for answer in _demanded(form, text) if _is_number(answer))
    found = find_final_answer(text)
    number = None
    if found.explicit:
        for reading in reversed(found.readings):
            number = last_number(reading) if "=" in reading else first_number(reading)
            if number is not None:
                break
    if number is None:
        found = FinalAnswer(found.readings, "line")
        number = last_number(after_thinking(text))
    return _graded(
        "numeric", strict, number == expected, text, finish, found, "" if number is None else str(number)
    )


def choice(
    gold: str,
    text: str,
    *,
    finish: str = "stop",
    form: str = "bare",
    options: tuple[str, ...] | list[str] = (),
) -> Graded:
    """Return scores choice_strict and choice_lenient: the answer is the gold option's letter.

    Args:
        gold: the letter, as "B" or "(B)".
        options: texts of the options. An answer that equals exactly one of them states its letter.

    Raises:
        DataError: the gold answer has no letter, or none of an option.
    """
    letters = ascii_uppercase[: len(options)] if options else CHOICE_LETTERS
    expected = extract_choice(_gold(gold), letters)
    if expected is None:
        raise DataError(f"the gold answer {gold!r} is no option", expected=f"a letter of {letters}")
    strict = any(
        (match := _OPTION.fullmatch(answer)) is not None and match[1] == expected
        for answer in _demanded(form, text)
    )
    found = find_final_answer(text)
    letter = _letter(text, found, letters)
    if letter is None and options:
        equal = [k for k, option in enumerate(options) if any(same_answer(option, r) for r in found.readings)]
        letter = letters[equal[0]] if len(equal) == 1 else None
    return _graded("choice", strict, letter == expected, text, finish, found, letter or "")


def _letter(text: str, found: FinalAnswer, letters: str) -> str | None:
    """Return the letter of the last explicit statement, or the one that the whole text gives."""
    if found.explicit:
        return next(
            (letter for r in reversed(found.readings) if (letter := extract_choice(r, letters)) is not None),
            None,
        )
    return extract_choice(after_thinking(text), letters)


def _graded(
    name: str, strict: bool, right: bool, text: str, finish: str, found: FinalAnswer, answer: str
) -> Graded:
    cut = finish == "length"
    # In a text that the limit cut, an unmarked answer is an intermediate result.
    right = strict or (right and (found.explicit or not cut))
    scores = {f"{name}_strict": float(strict), f"{name}_lenient": float(right)}
    if right:
        return Graded(scores, "right", f"form of the answer: {found.form}", answer)
    if found.explicit and answer and not (cut and found.at_end):
        return Graded(scores, "wrong", "another answer", answer)
    if is_refusal(text):
        return Graded(scores, "refused", "the model declines", "")
    if cut:
        return Graded(scores, "truncated", "the limit of tokens cut the text before its answer", "")
    if not answer:
        return Graded(scores, "not_found", "no answer was found", "")
    return Graded(scores, "wrong", "another answer", answer)


def _gold(gold: Any) -> str:
    expected = extract_answer(str(gold))
    if not expected:
        raise DataError(f"the gold answer {gold!r} is empty", expected="a text")
    return expected


def _is_number(text: str) -> bool:
    return (
        re.fullmatch(r"[-+\u2212]?\s?[$€£]?\s?[-+\u2212]?[\d.,]{1,400}(?:\s?/\s?\d{1,400})?\s?%?\.?", text)
        is not None
    )


def _demanded(form: str, text: str) -> list[str]:
    return [str(answer).strip() for answer in _pattern(form).findall(text)[-1:]]


@cache
def _pattern(form: str) -> re.Pattern[str]:
    pattern = FORMS.get(form, form)
    try:
        compiled = re.compile(pattern, re.DOTALL if form == "bare" else 0)
    except re.error as error:
        raise ConfigError(
            f"form {form!r} is not a valid pattern: {error}", expected=one_of(form, [*FORMS])
        ) from error
    if compiled.groups != 1:
        raise ConfigError(
            f"form {form!r} has {compiled.groups} groups",
            expected=f"{one_of(form, [*FORMS])}; or a pattern with one group, the answer",
        )
    return compiled

"""Graders of short answers: exact text, number, option. Strict and lenient, side by side.

    strict     the text has the demanded form, and the answer in it equals the gold answer
    lenient    the final answer, in any form that `find_final_answer` reads, equals the gold answer

The demanded form is one of FORMS or a pattern with one group. A model that answers correctly in another form has strict 0
and lenient 1, so the difference of both shares measures the form and not the ability. The value is the lenient score, or
the strict one if the option `strict` is set.

Outcomes belong to the value:

    right, wrong    an answer was found
    refused         no marked answer, and the text declines
    truncated       the limit of tokens cut the text before a complete statement of the answer
    not_found       the text ended and has no answer, or several
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import cache, lru_cache
from string import ascii_uppercase
from typing import Any

from whorl.errors import ConfigError, DataError, one_of
from whorl.evals.grading.final_answer import (
    FinalAnswer,
    after_thinking,
    find_final_answer,
    gold_answer,
    plain_answer,
    same_answer,
)
from whorl.evals.grading.grade import Grade
from whorl.evals.grading.refusal import is_refusal
from whorl.evals.grading.values import CHOICE_LETTERS, find_choice, find_number, read_number

FORMS = {
    "bare": "(.*)",  # the whole text
    "mark": r"####[ \t]*(\S[^\n]*?)[ \t]*(?:\n|\Z)",
    "boxed": r"\\boxed\{([^{}]*)\}",
    "tags": r"<answer>\s*([^<]*?)\s*</answer>",
    "stated": r"(?i:the answer is) ([^\n]+?)\.?[ \t]*(?:\n|\Z)",
}
VERBATIM = "verbatim"  # of `exact`
_OPTION = re.compile(r"\(?\s?([A-Z])\s?\)?")
_SMALL_OPTION = re.compile(
    r"^[\W_]{0,6}[a-z](?=\s?\)|[\W_]*$)"
)  # "(b)", "b." at the start of a marked answer


def exact(
    gold: str,
    text: str,
    *,
    finish: str = "stop",
    form: str = "bare",
    strict: bool = False,
    refusals: bool = True,
) -> Grade:
    """Return scores exact_strict and exact_lenient: the answer equals the gold text.

    Lenient: equal by `same_answer`. A gold answer "(B)" is an option, which "B", "B.", "(B) Paris" and "option B" state too.

    Args:
        gold: the answer; what follows "####" in it, if anything does.
        finish: "length" if the limit of tokens cut the text.
        form: the demanded form, a name of FORMS, a pattern with one group, or "verbatim": equal with all white space.
        strict: the strict score decides.
        refusals: name the outcome "refused", which takes 1 ms for 300 characters. Rewards leave it out.

    Raises:
        ConfigError: the form is invalid.
        DataError: the gold answer is empty.
    """
    expected = _gold(gold)
    found = find_final_answer(text)
    in_form = (
        text == gold if form == VERBATIM else any(answer == expected for answer in _demanded(form, text))
    )
    option = re.fullmatch(r"\(([A-Z])\)", expected)
    if option:
        letter = _letter(text, found, CHOICE_LETTERS if option[1] in CHOICE_LETTERS else ascii_uppercase)
        answer = f"({letter})" if letter else ""
        return _grade(
            "exact", in_form, answer == expected, strict, text if refusals else "", finish, found, answer
        )
    reading = next((r for r in found.readings if same_answer(expected, r)), None)
    right = reading is not None
    if reading is None:
        limit = max(5, 2 * len(expected.split()))
        reading = min(
            (r for r in found.readings if found.explicit or len(r.split()) <= limit), key=len, default=""
        )
    answer = expected if right else plain_answer(reading)
    return _grade("exact", in_form, right, strict, text if refusals else "", finish, found, answer)


def numeric(
    gold: str,
    text: str,
    *,
    finish: str = "stop",
    form: str = "bare",
    strict: bool = False,
    refusals: bool = True,
) -> Grade:
    """Return scores numeric_strict and numeric_lenient: the answer's number equals the gold number, as fractions.

    Lenient: the number of a marked answer; or the only line that is a number; or the last number of the text. Arguments and
    errors as for `exact`.

    Raises:
        DataError: the gold answer has no number.
    """
    expected = _gold_number(str(gold))
    in_form = any(read_number(answer) == expected for answer in _demanded(form, text))
    found = find_final_answer(text)
    number, has_number = None, False
    if found.explicit:
        for reading in reversed(found.readings):
            number, has_number = find_number(reading, last="=" in reading)
            if has_number:
                break
    if not has_number:
        number = _unmarked_number(text, found)
        found = FinalAnswer(found.readings, "line")
    answer = "" if number is None else str(number)
    return _grade(
        "numeric", in_form, number == expected, strict, text if refusals else "", finish, found, answer
    )


def choice(
    gold: str,
    text: str,
    *,
    finish: str = "stop",
    form: str = "bare",
    strict: bool = False,
    refusals: bool = True,
    options: tuple[str, ...] | list[str] = (),
) -> Grade:
    """Return scores choice_strict and choice_lenient: the answer is the gold option's letter.

    Args:
        gold: the letter, as "B" or "(B)".
        options: texts of the options. An answer that equals exactly one of them states its letter.

    Raises:
        DataError: the gold answer has no letter, or none of an option.
    """
    letters = ascii_uppercase[: len(options)] if options else CHOICE_LETTERS
    expected = find_choice(_gold(gold), letters)
    if expected is None:
        raise DataError(f"the gold answer {gold!r} is no option", expected=f"a letter of {letters}")
    in_form = any(
        (match := _OPTION.fullmatch(answer)) is not None and match[1] == expected
        for answer in _demanded(form, text)
    )
    found = find_final_answer(text)
    letter = _letter(text, found, letters)
    if letter is None and options:
        equal = [k for k, option in enumerate(options) if any(same_answer(option, r) for r in found.readings)]
        letter = letters[equal[0]] if len(equal) == 1 else None
    return _grade(
        "choice", in_form, letter == expected, strict, text if refusals else "", finish, found, letter or ""
    )


def _unmarked_number(text: str, found: FinalAnswer) -> Fraction | None:
    lines = {number for reading in found.readings if (number := read_number(reading)) is not None}
    return lines.pop() if len(lines) == 1 else find_number(after_thinking(text), last=True)[0]


def _letter(text: str, found: FinalAnswer, letters: str) -> str | None:
    """Return the letter of the last explicit statement, or the one that the whole text gives."""
    if found.explicit:
        capital = [_SMALL_OPTION.sub(lambda m: m[0].upper(), r) for r in reversed(found.readings)]
        readings = [text for r in capital for text in (r, f"Answer: {r}")]
        return next((letter for r in readings if (letter := find_choice(r, letters)) is not None), None)
    return find_choice(after_thinking(text), letters)


def _grade(
    name: str,
    in_form: bool,
    right: bool,
    strict: bool,
    text: str,
    finish: str,
    found: FinalAnswer,
    answer: str,
) -> Grade:
    cut = finish == "length"
    # In a text that the limit cut, an unmarked answer is an intermediate result.
    right = in_form or (right and (found.explicit or not cut))
    scores = {f"{name}_strict": float(in_form), f"{name}_lenient": float(right)}
    if in_form or (right and not strict):
        return Grade.of(scores, "right", f"passed: {found.form}", answer)
    if right:
        return Grade.of(scores, "wrong", "another form", answer)
    if found.explicit and answer and not (cut and found.at_end):
        return Grade.of(scores, "wrong", "another answer", answer)
    if is_refusal(text):
        return Grade.of(scores, "refused", "the model declines")
    if cut:
        return Grade.of(scores, "truncated", "the limit of tokens cut the text before its answer")
    if not answer:
        return Grade.of(scores, "not_found", "no answer")
    return Grade.of(scores, "wrong", "another answer", answer)


@lru_cache(4096)
def _gold_number(gold: str) -> Fraction:
    expected, _ = find_number(_gold(gold), last=True)
    if expected is None:
        raise DataError(f"the gold answer {gold!r} has no number", expected="a number to compare with")
    return expected


def _gold(gold: Any) -> str:
    expected = gold_answer(str(gold))
    if not expected:
        raise DataError(f"the gold answer {gold!r} is empty", expected="a text")
    return expected


def _demanded(form: str, text: str) -> list[str]:
    if form == "bare":
        return [text.strip()]
    return [str(answer).strip() for answer in _pattern(form).findall(text)[-1:]]


@cache
def _pattern(form: str) -> re.Pattern[str]:
    pattern = FORMS.get(form, form)
    try:
        compiled = re.compile(pattern)
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

"""Numbers and letters of options in texts."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from whorl.evals.grading import find_choice, find_number
from whorl.evals.grading.values import read_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5", "5"), ("so it is 5.", "5"), ("-3", "-3"), ("\u22123", "-3"), ("10 - 3 = 7", "7"), ("+4", "4"),
        ("1,234,567.5", "1234567.5"), ("$ 1,200", "1200"), ("$5", "5"), ("50%", "50"), ("3/4", "3/4"), ("-1/2", "-1/2"),
        ("1 / 3", "1/3"), (r"\frac{3}{4}", "3/4"), (".5", "1/2"), ("0.50", "1/2"), ("1e3", "1000"), ("2.5E-1", "1/4"),
        ("7e", "7"), ("x2", None), ("none", None), ("", None), ("1/0", None), ("3 eggs and 4 hens", "4"),
        ("is 42, isn't it", "42"), ("(7)", "7"), ("= -7", "-7"), ("1.5.", "1.5"), ("costs -$5", "-5"), ("$-5", "-5"),
        ("9" * 300, "9" * 300), ("½", "1/2"), ("2½", "5/2"), ("2 ¾", "11/4"), ("1 1/2", "3/2"), ("1 3/2", None),
        ("1 000", "1000"), ("12\u2009345.5", "12345.5"), ("1\xa0234\u202f567", "1234567"), ("0 000", "0"),
        ("1 0000", None), ("7 or 7.0", "7"), ("in 2019 300", None),
        # Alternatives, and groups of other than three digits.
        ("10-3", None), ("1,23", None), ("12,3456", None), ("0,001", None), ("1,2", None), ("12 or 13", None),
        ("12 apples or maybe 13", None), ("12 and 13", None), ("12, 13", None), ("7+5", None), ("3 * 4", None),
    ],
)  # fmt: skip
def test_last_number(text: str, number: str | None) -> None:
    assert find_number(text, last=True)[0] == (None if number is None else Fraction(number))


def test_first_number_and_whether_there_is_one() -> None:
    assert find_number("18 for 2 days", last=False) == (18, True)
    assert find_number("18 or 19 for 2 days", last=False) == (None, True)
    assert find_number("some days", last=False) == (None, False)
    assert read_number("$1,200.") == 1200 and read_number("50 %") == 50 and read_number("5 eggs") is None


@given(
    st.fractions(),
    st.sampled_from(["", "so ", "of 7 there are ", "= "]),
    st.sampled_from(["", ".", " m", "!"]),
)
def test_last_number_reads_fractions(value: Fraction, before: str, after: str) -> None:
    assert find_number(f"{before}{value}{after}", last=True)[0] == value


@given(st.integers(-(10**15), 10**15))
def test_last_number_reads_thousands_and_decimals(value: int) -> None:
    assert find_number(f"about {value:,}", last=True)[0] == value
    assert find_number(f"about {value:,}".replace(",", "\u202f"), last=True)[0] == value
    assert find_number(f"{value / 8:,.3f}", last=True)[0] == Fraction(f"{value / 8:.3f}")


@given(st.text())
@example("9" * 100_000)
@example("v1.2.3")
def test_find_number_accepts_any_text(text: str) -> None:
    for last in (True, False):
        number, found = find_number(text, last=last)
        assert number is None or (found and isinstance(number, Fraction))


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"), ("b", "B"), ("(C)", "C"), ("( C )", "C"), ("D. Paris", "D"), ("**A**", "A"),
        ("A) because B is wrong", "A"),
        ("The correct answer is B. There are two reasons: A and C fail.", "B"),
        ("First I thought the answer is A. Then I saw that the answer is (D).", "D"),
        ("Answer: C", "C"), ("answer = **B**", "B"), ("so we get \\boxed{C}, since the answer A fails", "C"),
        ("It cannot be a dog, so option D", "D"), ("( B ) is the right option", "B"), ("the answer is B, A is wrong", "B"),
        ("Of A, B, C or D, the answer is C", "C"), ("The answer is B and not C", "B"),
        ("The correct answer is 10000.", None), ("A dog is an animal.", None), ("", None), ("Z", None),
        ("The answer is Bob", None), ("none of these", None), ("A, B", None), ("The answer is A or B", None),
        ("The answer is (B) Paris or (C) Rome", None), ("the answer is A or the answer is B", None), ("B/C", None),
    ],
)  # fmt: skip
def test_find_choice_reads_the_stated_letter(text: str, letter: str | None) -> None:
    assert find_choice(text) == letter


def test_find_choice_takes_letters_of_options_alone() -> None:
    assert find_choice("The answer is E", letters="ABCD") is None

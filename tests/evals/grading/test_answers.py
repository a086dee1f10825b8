"""Answers in every form that a model may give are found, and no other text is taken for one."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whorl.errors import ConfigError, DataError
from whorl.evals.grading import grade_all
from whorl.evals.grading.answers import choice, exact, numeric
from whorl.evals.grading.final_answer import find_final_answer, same_answer
from whorl.evals.grading.values import find_number
from whorl.evals.model.requests import Completion

DATA = Path(os.environ.get("WHORL_DATA", Path(__file__).parents[4] / "shared" / "data"))
THOUGHT = "Step 1: option (A) fails, since 3 + 4 = 7.\n2. **Check:** No, not all of the 12.\n"
FORMS = [
    "{}", "{}.", "The answer is {}.", "the answer is: {}", "**{}**", "**Answer:** {}", "Answer: {}",
    "<answer>{}</answer>",
    "So the answer is **{}**.", THOUGHT + "So the answer is {}.", THOUGHT + "\n**{}**", THOUGHT + "{}", THOUGHT + "#### {}",
    THOUGHT + "### Answer\n\n{}", "<think>The answer is 5.</think>\n{}",
    "The final answer is {}. It is not 12 because of 3.",
    "$\\boxed{{{}}}$", "The correct answer to this question is {}", THOUGHT + "Therefore, {} is the correct answer.",
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "gold",
    ["(B)", "True", "no", "valid", "-35", "Monsters, Inc", "barn damp z's", "dearth, wind, & fire", "] ) >"],
)
def test_exact_finds_gold_in_each_form(form: str, gold: str) -> None:
    graded = exact(gold, form.format(gold))
    assert graded.outcome == "right" and graded.scores["exact_lenient"] == 1
    assert graded.scores["exact_strict"] == float(form == "{}")
    other = {"True": "False", "no": "yes", "valid": "invalid", "(B)": "(C)"}.get(gold, "8")
    assert exact(gold, form.format(other)).outcome == "wrong"


@pytest.mark.parametrize(
    ("gold", "text", "outcome"),
    [
        ("(B)", "B", "right"), ("(B)", "b", "right"), ("(B)", "(B) Paris", "right"), ("(B)", "B. Paris", "right"),
        ("(B)", "B\n\nOption A is wrong because it is.", "right"), ("(A)", "A dog is an animal.", "not_found"),
        ("(B)", "it must be **(B)**", "right"), ("(B)", "(A) or (B)?\nI choose (B).", "right"), ("(B)", "", "not_found"),
        ("Yes", "Yes, because he did.", "right"), ("Yes", "Yes or no, that depends on many more things.", "not_found"),
        ("Yes", "The answer is not Yes. The answer is No.", "wrong"), ("No", "The answer is no, since it rains.", "right"),
        ("a b c", "a, b, c", "right"), ("a b c", "1. a\n2. b\n3. c", "right"), ("a b c", "a c b", "wrong"),
        ("7", "**7.0**", "right"), ("7", "\u22127", "wrong"), ("] >", "]>", "right"),
        ("Bob", "I'm sorry, I can't help.", "refused"),
        ("(A)", "Option (A) fails.\nSo the answer is rita, sue.", "not_found"),
        ("(A)", "Well.\nOption (A) fails.\n**rita, sue and bob**", "not_found"), ("(A)", "I take option A.\nYes.", "right"),
        ("Bob", "<think>The answer is Bob", "not_found"), ("Inc. 5", "The answer is Inc. 5. Good.", "right"),
    ],
)  # fmt: skip
def test_exact_outcome(gold: str, text: str, outcome: str) -> None:
    assert exact(gold, text).outcome == outcome


@pytest.mark.parametrize(
    ("text", "form", "strict", "outcome"),
    [
        ("18", "bare", 1, "right"), ("#### 18", "bare", 0, "right"), ("#### 18", "mark", 1, "right"),
        ("so 9 * 2 = 18", "mark", 0, "right"), ("The answer is $18 for 2 days.", "stated", 0, "right"),
        ("The answer is 9 * 2 = 18.", "mark", 0, "right"), ("the answer is 18.", "stated", 1, "right"),
        ("The answer is 17, not 18", "bare", 0, "wrong"), ("none", "bare", 0, "not_found"), ("", "bare", 0, "not_found"),
        ("\\boxed{18}", "boxed", 1, "right"), ("I cannot help with question 3.", "bare", 0, "refused"),
        ("18.00", "bare", 1, "right"),
    ],
)  # fmt: skip
def test_numeric_strict_and_lenient(text: str, form: str, strict: int, outcome: str) -> None:
    graded = numeric("He has 9 * 2.\n#### 18", text, form=form)
    assert (graded.scores["numeric_strict"], graded.outcome) == (strict, outcome)
    assert graded.scores["numeric_lenient"] == float(outcome == "right")


def test_cut_texts_are_truncated_and_not_wrong() -> None:
    for text in ("First, 9 * 2 = 18", "The answer is 1", "So it has", "<think>The answer is 18."):
        assert numeric("18", text, finish="length").outcome == "truncated", text
    assert numeric("18", "The answer is 18. Next", finish="length").outcome == "right"
    assert numeric("18", "The answer is 17. Next", finish="length").outcome == "wrong"
    assert exact("True", "True", finish="length").outcome == "right"


def test_choice_reads_an_option_by_its_text() -> None:
    options = ("Paris", "Rome", "Rome, Italy")
    for text in ("Rome", "The answer is Rome.", "(B)", "**B**", "B) Rome"):
        assert choice("B", text, options=options).outcome == "right", text
    assert choice("B", "Paris and Rome").outcome == "not_found"
    assert choice("B", "D", options=options).outcome == "not_found"
    with pytest.raises(DataError, match="is no option"):
        choice("D", "A", options=options)


@given(st.text())
def test_metrics_accept_any_text(text: str) -> None:
    for metric, gold in ((exact, "Bob"), (exact, "(B)"), (numeric, "5"), (choice, "B")):
        for finish in ("stop", "length"):
            graded = metric(gold, text, finish=finish)
            assert graded.outcome != "error" and set(graded.scores.values()) <= {0.0, 1.0}
    assert same_answer(text, text) or not text.strip()


@given(st.from_regex(r"[a-z]{2,9}( [a-z]{2,9}){0,5}", fullmatch=True))
def test_stated_words_are_found(gold: str) -> None:
    for form in ("{}", "**{}**", "The answer is {}.", "Hm.\nFinal answer: {}"):
        if not gold.startswith("not "):
            assert exact(gold, form.format(gold)).outcome == "right"


@pytest.mark.parametrize(
    "part",
    [
        "answer is ",
        "**",
        "(A",
        "#### ",
        "\\boxed{",
        "is the answer ",
        ". A",
        "a:\n",
        "<answer>1",
        " ",
        "((",
        "A ",
    ],
)
def test_metrics_take_linear_time(part: str) -> None:
    began = time.process_time()
    for metric, gold in ((exact, "Bob"), (numeric, "5"), (choice, "B")):
        metric(gold, part * 20_000)
        metric(gold, "The answer is" + part * 20_000)
    assert time.process_time() - began < 5


def test_bad_gold_form_and_option() -> None:
    with pytest.raises(DataError, match="no number"):
        numeric("five", "5")
    with pytest.raises(DataError, match="is empty"):
        exact(" ", "5")
    for form, message in (("(", "not a valid pattern"), ("abc", "has 0 groups")):
        with pytest.raises(ConfigError, match=message):
            exact("5", "5", form=form)
    with pytest.raises(ConfigError, match=r"no option 'from'(.|\n)*form"):
        grade_all("exact", ["5"], ["5"], {"from": "mark"})
    with pytest.raises(ConfigError, match=r"numerical(.|\n)*did you mean 'numeric'"):
        grade_all("numerical", ["5"], ["5"])
    with pytest.raises(DataError, match="2 gold answers, 1 completions"):
        grade_all("exact", ["5", "6"], ["5"])


def test_grade_all_keeps_errors_apart() -> None:
    graded = grade_all(
        "numeric", ["5", "five", "7"], [Completion("5"), Completion("5"), Completion("6 +", finish="length")]
    )
    assert [g.outcome for g in graded] == ["right", "error", "truncated"]
    assert "no number" in graded[1].reason and not graded[1].scores
    each = grade_all(
        "choice", ["A", "B"], ["Rome", "Rome"], [{"options": ["Rome", "X"]}, {"options": ["Y", "Rome"]}]
    )
    assert [g.outcome for g in each] == ["right", "right"]


def test_final_answer_reports_its_form() -> None:
    forms = {
        "": "none",
        "x": "line",
        "a\n**x**": "bold",
        "Answer: x": "stated",
        "\\boxed{x}": "boxed",
        "#### 5": "mark",
    }
    for text, form in forms.items():
        assert find_final_answer(text).form == form, text
    assert find_final_answer("#### Step 1\nthe answer is 5.").readings[-1].startswith("5")


@pytest.mark.skipif(not (DATA / "bbh").is_dir(), reason="no BIG-Bench Hard next to the repository")
def test_bbh_golds_are_right_and_shuffled_at_chance() -> None:
    rng, tasks = random.Random(0), sorted((DATA / "bbh").glob("*.json"))
    assert len(tasks) == 27
    for path in tasks:
        golds = [e["target"] for e in json.loads(path.read_text("utf-8"))["examples"]][:40]
        form = rng.choice(FORMS[1:-3] + FORMS[-2:])
        assert all(
            g.outcome == "right" for g in grade_all("exact", golds, [form.format(g) for g in golds])
        ), path.stem
        shuffled = rng.sample(golds, len(golds))
        graded = grade_all("exact", golds, [form.format(g) for g in shuffled])
        assert [g.outcome == "right" for g in graded] == [
            same_answer(*pair) for pair in zip(golds, shuffled, strict=True)
        ]


@pytest.mark.skipif(not (DATA / "gsm8k_test.jsonl").exists(), reason="no GSM8K next to the repository")
def test_gsm8k_golds_are_right() -> None:
    golds = [json.loads(line)["answer"] for line in (DATA / "gsm8k_test.jsonl").open(encoding="utf-8")][::5]
    for form in FORMS:
        texts = [form.format(gold.rpartition("#### ")[2]) for gold in golds]
        assert all(g.outcome == "right" for g in grade_all("numeric", golds, texts)), form
    assert all(g.scores["numeric_strict"] == 1 for g in grade_all("numeric", golds, golds, {"form": "mark"}))


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("12", "1,2", False),
        ("314", "3,14", False),
        ("1234", "12,34", False),
        ("1234567.5", "1,234,567.5", True),
        ("$1,234", "1234", True),
        ("(B)", "( B )", True),
        ("[B]", "[ B ]", True),
        ("(3, 4)", "( 3 ,4 )", True),
        ("(3, 4)", "(34)", False),
        ("1", "0,001", False),
        ("0.5", ".5", True),
        ("-1/2", "-.5", True),
        ("$0.50", "$.5", True),
        ("1/2", r"\frac{1}{2}", True),
        ("-0.5", r"-\dfrac{1}{2}", True),
        ("-1/2", r"\frac{-1}{2}", True),
        ("0.5", r"\tfrac12", True),
        ("3/2", r"1\frac{1}{2}", True),
        ("11/2", r"1\frac{1}{2}", False),
        ("50%", r"50\%", True),
        ("50%", "50", False),
    ],
)
def test_numbers_are_equal_as_values(gold: str, answer: str, same: bool) -> None:
    assert same_answer(gold, answer) is same and same_answer(answer, gold) is same
    if same and gold[-1] in "0123456789":
        value, _ = find_number(gold, last=True)
        assert numeric(gold, f"so the answer is {answer}").scores["numeric_lenient"] == 1
        assert value is not None and find_number(answer, last=True)[0] == value

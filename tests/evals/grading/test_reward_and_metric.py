"""Plausible completions get the right verdict, as reward of training and as metric of an evaluation."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.evals.backend import FakeBackend, by_text

from whorl.evals.grading import VerifiableTask, grade_tasks
from whorl.evals.model.requests import Completion
from whorl.evals.runner import evaluate
from whorl.evals.tasks.config import parse_task
from whorl.evals.tasks.task import make_task

NUMERIC: list[tuple[str, str, bool]] = [
    ("12", "12", True), ("12", "12.", True), ("12", "12.0", True), ("12", " 12 \n", True), ("12", "twelve", False),
    ("12", "The answer is 12.\n\nLet me explain: 7+5", True), ("12", "12\n\nThere are 5 apples and 7 pears.", True),
    ("12", "The answer is 12 or 13", False), ("13", "The answer is 12 or 13", False), ("13", "Either 12 or 13.", False),
    ("12", "The answer is 12, or the answer is 13.", False), ("13", "The answer is 12, or the answer is 13.", False),
    ("13", "\\boxed{12} or \\boxed{13}", False), ("13", "<answer>12</answer> or <answer>13</answer>", False),
    ("13", "I thought the answer is 12. Wait, the answer is 13.", True), ("12", "The answer is 12, not 13.", True),
    ("12", "1,2", False), ("2", "1,2", False), ("1200", "1,200", True), ("1000", "1 000", True),
    ("1000", "1\u2009000", True), ("1234567", "The answer is 1\u202f234\xa0567.", True), ("1", "0,001", False),
    ("0.5", ".5", True), ("1/2", "0.5", True), ("0.5", "\\frac{1}{2}", True), ("1/2", "½", True), ("0.5", "½", True),
    ("1.5", "1 1/2", True), ("-3", "The answer is \u22123.", True), ("3", "10-3", False), ("12", "7+5", False),
    ("12", "So 7 + 5 = 12", True), ("12", "So 7 + 5 = 12.\n#### 12", True), ("12", "#### 12\nand 6 more words", True),
    ("18", "The answer is $18 for 2 days.", True), ("12", "so **12** of 15", True),
    ("12", "<answer>12</answer> from 5", True),
    ("12", "<think>12</think> It is 13.", False), ("12", "<think>The answer is 12", False), ("12", "", False),
    ("12", "I cannot help with question 13.", False), ("12", "x = \\boxed{12}", True), ("0.5", "50%", False),
]  # fmt: skip
CHOICE: list[tuple[str, str, bool]] = [
    ("B", "B", True), ("B", "b", True), ("B", "(B)", True), ("B", "( B )", True), ("B", "[B]", True), ("B", "**B**", True),
    ("B", "B. Paris", True), ("B", "The answer is B.", True), ("B", "The answer is ( B ).", True),
    ("B", "answer: (B)", True), ("B", "Answer: (b)", True), ("B", "the answer is b.", True), ("B", "(b)", True),
    ("B", "Answer: b) Paris", True), ("A", "The answer is a dog.", False), ("A", "The answer is a or b", False),
    ("B", "The answer is (B) Paris.\n\nLet me explain: A and C fail.", True), ("B", "#### B", True),
    ("B", "It is (B) because (A) is wrong.", False), ("B", "A) because B is wrong", False),
    ("B", "\\boxed{\\text{B}}", True),
    ("A", "The answer is A or B", False), ("B", "The answer is A or B", False), ("B", "A, B", False), ("A", "A, B", False),
    ("B", "The answer is (B) Paris or (C) Rome.", False), ("B", "\\boxed{A} or \\boxed{B}", False),
    ("B", "the answer is A or the answer is B", False), ("B", "Of A, B, C or D, the answer is B", True),
    ("B", "The answer is B rather than C", True), ("B", "The answer is B, A is wrong.", True),
    ("B", "(B) is the correct answer", True),
    ("A", "A dog is an animal.", False), ("B", "<think>B</think>C", False),
    ("B", "<answer>B</answer>", True), ("B", "", False),
]  # fmt: skip
CUT: list[tuple[str, str, str, bool]] = [  # texts that the limit of tokens ended
    ("numeric", "12", "7 + 5 = 12", False), ("numeric", "12", "The answer is 12. For 7", True),
    ("numeric", "12", "so it is 12", False), ("numeric", "12", "12", True),
    ("choice", "B", "A fails, so **B**", False), ("choice", "B", "The answer is B, since", True),
    ("exact", "Paris", "Well,\nParis", False), ("exact", "Paris", "The answer is Paris.\nIt", True),
]  # fmt: skip
EXACT: list[tuple[str, str, bool]] = [
    ("Paris", "Paris", True), ("Paris", "paris.", True), ("Paris", "The answer is Paris.", True), ("Paris", "Rome", False),
    ("Paris", "The answer is Paris or Rome", False), ("(B)", "( B )", True), ("12", "1,2", False), ("1/2", "½", True),
    ("1000", "1\u2009000", True), ("[1, 2]", "[ 1,2 ]", True), ("12", "The answer is 12 or 13", False),
]  # fmt: skip
ROWS = [
    (name, *row)
    for name, rows in (("numeric", NUMERIC), ("choice", CHOICE), ("exact", EXACT))
    for row in rows
]


def metric_of(name: str, gold: str, done: Completion) -> Any:
    config = {
        "name": "v", "kind": "generate", "template": "{{ q }}", "gold": "a", "options": {"metric": name},
    }  # fmt: skip
    task = make_task(parse_task(config, "v"), [{"q": "?", "a": gold}])
    return evaluate(FakeBackend(lambda _: done), [task])[0]


@pytest.mark.parametrize(("name", "gold", "text", "right"), ROWS)
def test_reward_and_metric_are_the_right_verdict(name: str, gold: str, text: str, right: bool) -> None:
    grade = grade_tasks([VerifiableTask("t", "?", verifier=name, answer=gold)], [text])[0]
    result = metric_of(name, gold, Completion(text))
    assert grade.passed is right and grade.value == float(right)
    assert result.measure(f"{name}_lenient").value == grade.value
    assert result.outcomes == {grade.outcome: 1} or result.outcomes == {
        "refused": 1
    }  # rewards do not look for it


@pytest.mark.parametrize(("name", "gold", "text", "right"), CUT)
def test_cut_text_is_no_end_for_reward_and_metric(name: str, gold: str, text: str, right: bool) -> None:
    cut, task = Completion(text, finish="length"), VerifiableTask("t", "?", verifier=name, answer=gold)
    (grade,) = grade_tasks([task], [cut])
    result = metric_of(name, gold, cut)
    assert grade.passed is right and result.measure(f"{name}_lenient").value == grade.value == float(right)
    assert result.outcomes == {grade.outcome: 1} and grade.outcome == ("right" if right else "truncated")
    assert grade_tasks([task], [text])[0].passed  # the same text that ended


def test_strict_reward_is_the_strict_metric() -> None:
    for form, text in (("mark", "#### 12"), ("mark", "so 12"), ("bare", "12"), ("bare", "12 eggs")):
        task = VerifiableTask("t", "?", verifier=f"numeric[{form}]", answer="12")
        options = {"metric": "numeric", "metric_options": {"form": form, "strict": True}}
        config = {"name": "v", "kind": "generate", "template": "{{ q }}", "gold": "a", "options": options}
        item = make_task(parse_task(config, "v"), [{"q": "?", "a": "12"}])
        found = evaluate(by_text(lambda _, text=text: text), [item])[0]
        grade = grade_tasks([task], [text])[0]
        assert grade.value == found.measure("numeric_strict").value
        assert found.outcomes == {grade.outcome: 1} and grade.passed == (text in ("#### 12", "12"))

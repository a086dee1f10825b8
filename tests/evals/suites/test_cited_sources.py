"""The suite `sources`: answers that are in the sources alone, and models that read, that invent, and that cite wrongly."""

from __future__ import annotations

import re

import pytest
from tests.support.evals.backend import by_text

from whorl.evals.runner import evaluate
from whorl.evals.suites.biographies import ATTRIBUTES
from whorl.evals.suites.cited_sources import cited, cited_questions
from whorl.evals.suites.suite import SuiteInputs, load_suite

NAME = re.compile(r"[A-Z]\w+ [A-Z]\w+")


def test_exactly_one_source_states_the_answer() -> None:
    for one in cited_questions(300, 0, held_out=True):
        (person,) = NAME.findall(one["question"].split(" ", 1)[1])
        fact, number = one["answer"].split()
        lines = one["prompt"].split("\n\n")[1].splitlines()
        right = [n for n, line in enumerate(lines, 1) if person in line and re.search(rf"\b{fact}\b", line)]
        assert right == [int(number[1:-1])] and len(lines) == one["sources"]
        assert one["prompt"].endswith(f"\n\n{one['question']}")
        assert cited(one["answer"], one["reply"]).passed and person in one["reply"]


def test_splits_share_no_person_and_a_seed_repeats() -> None:
    train, test = (cited_questions(500, 1, held_out=held) for held in (False, True))
    names = [{name for one in each for name in NAME.findall(one["prompt"])} for each in (train, test)]
    assert len(names[0]) > 700 and not names[0] & names[1]
    assert train == cited_questions(500, 1, held_out=False) != cited_questions(500, 2, held_out=False)


def test_no_number_is_right_in_half_of_the_answers() -> None:
    questions = cited_questions(2000, 0, held_out=False)
    numbers = [one["answer"].split()[1] for one in questions]
    assert [round(numbers.count(f"[{n}]") / 2000, 1) for n in (1, 2, 3, 4)] == [0.4, 0.3, 0.2, 0.1]
    assert 300 < sum(one["answer"].split()[0] in ATTRIBUTES["instrument"] for one in questions) < 700


@pytest.mark.parametrize(
    ("text", "scores", "passed"),
    [
        ("Oslo [2]", {"correct": 1, "cited": 1}, True),
        ("She was born in Oslo [2].", {"correct": 1, "cited": 1}, True),
        ("Oslo [1]", {"correct": 1, "cited": 0}, False),
        ("Oslo [1][2]", {"correct": 1, "cited": 0}, False),
        ("Oslo", {"correct": 1, "cited": 0}, False),
        ("Oslostadt [2]", {"correct": 0}, False),
        ("", {"correct": 0}, False),
    ],
)
def test_grade_of_one_answer(text: str, scores: dict[str, float], passed: bool) -> None:
    grade = cited("Oslo [2]", text)
    assert grade.scores == scores and grade.passed == passed


def test_suite_separates_reading_from_chance() -> None:
    records = {one["question"]: one["answer"] for one in cited_questions(40, 0, held_out=True)}

    def read(prompt: str) -> str:
        text, _, question = prompt.rpartition("\n\n")
        return records[question] if text else "Oslo [1]"

    with_, without = evaluate(by_text(read), load_suite("sources", SuiteInputs(limit=40)))
    assert [with_.measure(name).value for name in ("correct", "cited")] == [1.0, 1.0]
    assert without.measure("correct").value < 0.15

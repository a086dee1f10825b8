"""Choices by likelihood: every normalization from one pass, chance level, the prior without the question."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.support.evals.backend import FakeBackend, by_log_prob

from whorl.errors import WhorlError
from whorl.evals.kinds.kind import EvalTask
from whorl.evals.model.requests import Missing, Request, Response, ScoreRequest
from whorl.evals.results import TaskResult
from whorl.evals.runner import evaluate
from whorl.evals.tasks.config import parse_task
from whorl.evals.tasks.task import make_task

RECORDS: list[dict[str, Any]] = [
    {"id": "a", "q": "Q?", "options": ["no", "certainly"], "answer": 1},
    {"id": "b", "q": "R?", "options": ["yes", "never", "maybe"], "answer": "A"},
]
LETTERS = "{{ q }}\n{% for c in item.choices %}{{ item.letters[loop.index0] }}. {{ c }}\n{% endfor %}Answer:"


def task(records: Any = RECORDS, **fields: Any) -> EvalTask:
    given = {"name": "quiz", "kind": "choice", "template": "{{ q }}", "choices": "options", "gold": "answer"}
    return make_task(parse_task(given | fields, "quiz.toml"), records)


def value(result: TaskResult, metric: str) -> float:
    return result.measure(metric).value


def test_normalizations_choose_by_their_formulas_in_one_pass() -> None:
    scores = {
        ("Q?", " no"): -2.0, ("Q?", " certainly"): -6.0,  # / characters: -1, -0.67; / tokens: -2, -2 -> the first
        ("", " no"): -1.0, ("", " certainly"): -8.0,  # mutual information: -1, 2
        ("R?", " yes"): -1.0, ("R?", " never"): -3.0, ("R?", " maybe"): -3.0,
        ("", " yes"): -1.0, ("", " never"): -5.0, ("", " maybe"): -4.0,
    }  # fmt: skip
    backend = by_log_prob(scores)
    result = evaluate(backend, [task()])[0]
    right = {item.item: item.scores for item in result.items}
    assert (right["a"]["acc"], right["a"]["acc_norm"], right["a"]["acc_bytes"]) == (0, 1, 1)
    assert (right["a"]["acc_token"], right["a"]["acc_mutual_info"], right["a"]["acc_prior"]) == (0, 1, 0)
    assert (right["b"]["acc"], right["b"]["acc_mutual_info"], right["b"]["acc_prior"]) == (1, 0, 1)
    assert len(backend.sent) == 5 + 5
    assert result.measure("acc").chance == pytest.approx((1 / 2 + 1 / 3) / 2)
    p = 1 / (1 + math.exp(4))  # of the right choice of item a
    assert right["a"]["brier"] == pytest.approx(2 * (1 - p) ** 2)
    assert right["a"]["log_score"] == pytest.approx(-math.log(p))
    assert result.items[0].details["confidence"] == pytest.approx(1 - p)
    assert result.measure("ece").n == 2 and result.outcomes == {"right": 1, "wrong": 1}
    assert result.items[0].answers == ("no",) and result.items[0].gold == "certainly"


def test_choices_without_a_prior_keep_their_other_figures() -> None:
    table = by_log_prob({("Q?", " certainly"): -1.0, ("R?", " yes"): -1.0})

    def answer(request: Request) -> Response:
        assert isinstance(request, ScoreRequest)
        return table.answer(request) if request.context else Missing("no bos")

    result = evaluate(FakeBackend(answer), [task()])[0]
    assert value(result, "acc") == 1 and result.outcomes == {"right": 2}
    assert result.measure("acc_prior").n == 0 and "acc_mutual_info" not in result.items[0].scores
    assert result.notes == (
        "2 of 2 items have no score without the question, and are left out of acc_prior and acc_mutual_info: no bos",
    )
    first = evaluate(FakeBackend(answer), [task(metrics=["acc_mutual_info"])])[0]
    assert first.outcomes == {"missing": 2}  # the deciding figure is not replaced by another one


def test_letters_and_cloze_together_and_prior_of_the_last_line() -> None:
    made = task(options={"forms": ["letters", "cloze"], "letters_template": LETTERS})
    prompt = "Q?\nA. no\nB. certainly\nAnswer:"
    scores = {(prompt, " B"): -1.0, ("Answer:", " A"): -1.0, ("Q?", " no"): -1.0}
    backend = by_log_prob(scores)
    result = evaluate(backend, [made])[0]
    scored = result.items[0].scores
    assert (scored["letter_acc"], scored["letter_acc_prior"], scored["acc"]) == (1, 0, 0)
    assert result.metrics[0] == "letter_acc" and result.items[0].outcome == "right"
    assert result.items[0].prompt == prompt
    # 5 letters and 5 choices, 3 letters without the question (shared by both items), 5 choices without it
    assert len(backend.sent) == 5 + 5 + 3 + 5


def test_examples_show_choices_and_letters() -> None:
    train = [{"id": "x", "q": "X?", "options": ["one", "two"], "answer": "two"}]
    config = {"name": "quiz", "kind": "choice", "template": "{{ q }}", "choices": "options", "gold": "answer",
              "examples": ["x"]}  # fmt: skip
    cloze = make_task(parse_task(config, "quiz"), RECORDS, train)
    assert cloze.kind.prompt(cloze.items[0]) == "X? two\n\nQ?"
    letters = make_task(
        parse_task(config | {"options": {"forms": ["letters"]}, "template": LETTERS}, "quiz"), RECORDS, train
    )
    assert str(letters.kind.prompt(letters.items[0])).startswith("X?\nA. one\nB. two\nAnswer: B\n\nQ?")


def test_shuffle_moves_the_right_choice_by_the_id() -> None:
    records = [
        {"id": str(i), "q": f"{i}?", "options": ["right", "b", "c", "d"], "answer": 0} for i in range(80)
    ]
    items = task(records, options={"shuffle": True}).items
    assert {item.choices[item.gold] for item in items} == {"right"}
    counts = [sum(item.gold == k for item in items) for k in range(4)]
    assert min(counts) > 8, counts
    assert items == task(records, options={"shuffle": True}).items


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"answer": None}, ["item 'a' has no gold answer"]),
        ({"answer": [0, 1]}, ["item 'a' has 2 gold answers", "expected: one"]),
        ({"answer": 2}, ["gold answer 2 is none of the 2 choices", "from 0 to 1"]),
        ({"answer": "C"}, ["gold answer 'C' is none of the 2 choices"]),
        ({"options": ["no", "no "]}, ["two choices are 'no'"]),
        ({"options": ["no", " "]}, ["choice B is empty"]),
        ({"options": ["no"]}, ["has 1 choices"]),
    ],
)  # fmt: skip
def test_wrong_items_are_refused(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(WhorlError) as caught:
        task([{**RECORDS[0], **change}])
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_two_forms_need_two_templates() -> None:
    with pytest.raises(WhorlError, match="two forms have one template"):
        task(options={"forms": ["letters", "cloze"]})

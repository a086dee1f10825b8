"""The kind judge: both orders, ties, prose, biases, length control, the gold set."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.evals.backend import FakeBackend, by_text

from whorl.errors import WhorlError
from whorl.evals.judge import REMINDER
from whorl.evals.model.requests import Completion, GenerateRequest, Missing, Request, Response
from whorl.evals.results import TaskResult
from whorl.evals.runner import evaluate
from whorl.evals.tasks.config import parse_task
from whorl.evals.tasks.task import make_task

SHOWN = re.compile(r"\[Answer [AB] begins\]\n(.*?)\n\[Answer [AB] ends\]", re.DOTALL)
Verdict = Callable[[str, str], str]


def judge_by(verdict: Verdict) -> FakeBackend:
    """Return a judge whose reply is a function of the two shown answers."""
    return by_text(lambda prompt: verdict(*SHOWN.findall(prompt)))


def longer(a: str, b: str) -> str:
    return "[[tie]]" if len(a) == len(b) else f"[[{'A' if len(a) > len(b) else 'B'}]]"


def task(records: Any, **options: Any) -> Any:
    config = {
        "name": "pairs", "kind": "judge", "template": "{{ q }}",
        "options": {"baseline": "other", "length_probes": 0} | options,
    }  # fmt: skip
    return make_task(parse_task(config, "pairs.toml"), records)


def run(made: Any, answer: Callable[[str], str | Response], judge: FakeBackend) -> TaskResult:
    return evaluate(by_text(answer), [made], roles={"judge": judge})[0]


def records(n: int, words: Callable[[int], int] = lambda i: 5) -> list[dict[str, Any]]:
    return [{"id": str(i), "q": f"q{i}", "other": "word " * words(i)} for i in range(n)]


def test_wins_ties_and_losses_count_in_both_orders() -> None:
    answers = {"q0": "good", "q1": "bad", "q2": "equal", "q3": "unclear"}

    def verdict(a: str, b: str) -> str:
        shown = {a, b}
        if "good" in shown:
            return f"Reasons.\n[[{'A' if a == 'good' else 'B'}]]"
        if "bad" in shown:
            return f"[[{'A' if b == 'bad' else 'B'}]]"
        return "[[tie]]" if "equal" in shown else "[[A]]"

    result = run(task(records(4)), answers.__getitem__, judge_by(verdict))
    assert result.outcomes == {"right": 1, "wrong": 1, "scored": 2}
    assert [item.scores["win_rate"] for item in result.items] == [1.0, 0.0, 0.5, 0.5]
    assert [item.scores["position_bias"] for item in result.items] == [0.0, 0.0, 0.0, 0.5]
    assert result.measure("consistency").value == 0.75 and result.measure("ties").value == 0.25
    assert "both orders" in result.items[3].reason and result.items[0].gold.startswith("word")


@pytest.mark.parametrize("probes", [0, 40])
def test_judge_of_first_answers_gives_no_model_a_win(probes: int) -> None:
    made = task(records(40), length_probes=probes)
    result = run(made, lambda q: "much longer " * 20, judge_by(lambda a, b: "[[A]]"))
    assert result.measure("win_rate").value == 0.5 and result.outcomes == {"scored": 40}
    assert result.measure("position_bias").value == 0.5 and result.measure("consistency").value == 0.0
    assert any("prefers the first answer in 100.0 %" in note for note in result.notes)


@pytest.mark.parametrize("probes", [0, 40])
def test_judge_of_longer_answers_gives_no_model_a_win(probes: int) -> None:
    made = task(records(40, lambda i: 5 + 10 * (i % 4 == 0)), length_probes=probes)
    result = run(made, lambda q: "ten words or so to say it " * 2, judge_by(longer))
    assert result.measure("win_rate").value == 0.75
    lc = result.measure("win_rate_lc")
    assert result.metrics[0] == "win_rate_lc" and lc.value == pytest.approx(0.5)
    assert lc.low <= 0.5 <= lc.high
    assert result.measure("length_bias" if probes else "length_bias_items").value == 0.5
    assert any("not distinguishable" in note for note in result.notes)


def test_always_longer_without_probes_is_not_identified() -> None:
    result = run(task(records(10)), lambda q: "long " * 50, judge_by(longer))
    assert math.isnan(result.measure("win_rate_lc").value) and result.measure("win_rate").value == 1.0
    assert any("length_probes" in note for note in result.notes)
    probed = run(task(records(10), length_probes=10), lambda q: "long " * 50, judge_by(longer))
    assert probed.measure("win_rate_lc").value == 0.5


def test_judge_that_dislikes_repetition_changes_no_win_rate() -> None:
    made = task(records(20), length_probes=20)
    result = run(
        made, lambda q: "fine text " * 9, judge_by(lambda a, b: f"[[{'A' if 'fine' in a else 'B'}]]")
    )
    shorter = judge_by(lambda a, b: f"[[{'B' if len(a) > len(b) else 'A'}]]")
    assert result.measure("win_rate_lc").value == 1.0
    assert run(made, lambda q: "x", shorter).measure("win_rate_lc").value == 1.0
    assert run(made, lambda q: "x", shorter).measure("length_bias").value == -0.5


def test_prose_is_asked_again_and_then_missing() -> None:
    asked: list[GenerateRequest] = []

    def reply(request: Request) -> Response:
        assert isinstance(request, GenerateRequest) and not isinstance(request.prompt, str)
        asked.append(request)
        reminded = request.prompt[-1]["content"] == REMINDER
        stubborn = "stubborn" in request.prompt[1]["content"]
        return Completion("[[B]]" if reminded and not stubborn else "Both answers have their merits.")

    answers = {"q0": "fine", "q1": "stubborn"}
    result = run(task(records(2), retries=1), answers.__getitem__, FakeBackend(reply))
    assert len(asked) == 8  # two items, two orders, one reminder
    assert [message["role"] for message in asked[-1].prompt] == ["system", "user", "assistant", "user"]  # type: ignore[index]
    assert result.outcomes == {"scored": 1, "missing": 1}
    assert "no verdict in 2 replies: 'Both answers" in result.items[1].reason
    assert result.items[1].scores == {} and result.measure("win_rate").bounds == (0.25, 0.75)
    assert len(result.items[0].details["judge"]) == 4


def test_missing_answers_and_replies_are_missing_items() -> None:
    answers = {"q0": Missing("timed out"), "q1": "fine"}
    judge = FakeBackend(lambda request: Missing("status 503"))
    result = run(task(records(2)), answers.__getitem__, judge)
    assert result.outcomes == {"missing": 2} and len(judge.sent) == 2
    assert [item.reason for item in result.items] == ["timed out", "the judge gave no reply: status 503"]


def test_gold_set_gives_agreement_and_no_win() -> None:
    gold = [
        {"id": f"gold-{i}", "q": "g", "other": "aa", "answer": "aaaa" if i % 2 else "a", "preference": p}
        for i, p in enumerate(["baseline", "answer", "answer", "answer", "tie", "baseline"])
    ]
    sent: list[str] = []
    result = run(task([*records(2), *gold]), lambda q: sent.append(q) or "word word", judge_by(longer))
    assert sorted(sent) == ["q0", "q1"]  # no model is asked for the answers of the gold set
    agreement, kappa = result.measure("agreement"), result.measure("kappa")
    assert (agreement.value, agreement.n) == (0.5, 6) and result.measure("win_rate").n == 2
    # p_o = 3/6; p_e = (3 * 3 + 3 * 2 + 0 * 1) / 36
    assert kappa.value == pytest.approx((3 / 6 - 15 / 36) / (1 - 15 / 36))
    assert [item.outcome for item in result.items[2:4]] == ["right", "right"]


@pytest.mark.parametrize(
    ("options", "record", "message"),
    [
        ({}, {"preference": "A", "answer": "x"}, "preference is 'A'"),
        ({}, {"preference": "tie"}, "given for no answer"),
        ({"baseline": "others"}, {}, "names the field 'others'"),
        ({"baseline": "number"}, {"number": 3}, "the baseline is 3"),
        ({"judge_template": "{{ first }}"}, {}, "judge_template names first"),
        ({"judge_template": "{{ first }} {{ second }} {{ gold }}"}, {}, "judge_template names first, gold"),
        ({"retries": -1}, {}, "retries"),
    ],
)
def test_wrong_settings_and_records_are_named(options: Any, record: Any, message: str) -> None:
    with pytest.raises(WhorlError, match=message):
        task([{"id": "0", "q": "q", "other": "o", **record}], **options).kind  # noqa: B018


def test_no_judge_is_an_error_that_names_the_option() -> None:
    with pytest.raises(WhorlError, match="role 'judge'"):
        evaluate(by_text(lambda q: "x"), [task(records(1))])

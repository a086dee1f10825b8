"""Test-time scaling: a scripted model checks cuts, continuations and curves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.support.evals.backend import FakeBackend

from whorl.errors import WhorlError
from whorl.evals.grading import Grade, VerifiableTask, grade_tasks
from whorl.evals.kinds.generate import _verified, verifiable_task
from whorl.evals.kinds.kind import SEEDS, EvalTask
from whorl.evals.kinds.scaling import SampleOptions, _BudgetForcing
from whorl.evals.model.requests import Completion, GenerateRequest, Missing, Request, Response, Score
from whorl.evals.results import TaskResult
from whorl.evals.runner import evaluate
from whorl.tracking.seeds import derive

EOS = 256
BYTES = SimpleNamespace(
    token_bytes=[*(bytes([i]) for i in range(256)), b"<eos>"], encode=lambda text: [*text.encode()]
)
TASK = VerifiableTask("t", prompt="2+3+4\n", verifier="numeric", answer="9")
THINKS = {"2+3+4\n": "2+3=5\n5+4=9\n#### 9", "2+3=5\n#### ": "5", "5+4\n#### ": "9", "5+\n#### ": "8"}


class Script(FakeBackend):
    """A model whose answer is a function of the prompt's end; one id for each byte."""

    tokenizer = BYTES

    def __init__(self, answers: dict[str, str]) -> None:
        super().__init__(self.complete)
        self.answers, self.asked = answers, list[tuple[str, int]]()

    def complete(self, request: Request) -> Response:
        assert isinstance(request, GenerateRequest) and isinstance(request.prompt, str)
        prompt = request.prompt + bytes(request.answer_ids).decode()
        self.asked.append((prompt, request.max_tokens))
        text = next(answer for end, answer in reversed(self.answers.items()) if prompt.endswith(end))
        ids = [*text.encode(), EOS][: request.max_tokens]
        shown = bytes(i for i in ids if i != EOS).decode()
        return Completion(shown, tuple(ids), (-0.5,) * len(ids), "stop" if ids[-1] == EOS else "length")


def task(some: VerifiableTask = TASK, n: int = 1, **options: Any) -> EvalTask:
    generation = {"max_tokens": 40, "samples": n, "temperature": 1.0}
    made = verifiable_task("sums", [some], generation)
    options = {**made.config.options, "curves": True, "answer_tokens": 4, **options}
    return EvalTask(made.config.model_copy(update={"options": options}), made.items, [])


def run(answers: dict[str, str], some: VerifiableTask = TASK, **options: Any) -> tuple[TaskResult, Script]:
    script = Script(answers)
    return evaluate(script, [task(some, **options)])[0], script


def values(result: TaskResult, curve: str, budgets: tuple[int, ...], more: str = "") -> list[float]:
    return [result.measure(f"{curve}@{b}{more}").value for b in budgets]


def test_budget_cuts_thinking_and_adds_marker() -> None:
    budgets = (6, 8, 9, 12)
    got, script = run(THINKS, budgets=budgets, max_continuations=0)
    assert values(got, "stopped", budgets) == values(got, "continued", budgets) == [0, 0, 1, 1]
    cut = {f"2+3+4\n2+3=5\n{thought}#### " for thought in ("", "5+\n", "5+4\n")}
    assert {text for text, _ in script.asked[1:]} == cut and len(script.asked) == 4
    assert {limit for _, limit in script.asked[1:]} == {4}
    # Cost: the cut and the answer with its end; at 12 the sample itself, which is not sampled again.
    assert values(got, "stopped", budgets, " tokens") == [6 + 2, 8 + 2, 9 + 2, 19]
    assert got.measure("tokens").value == 19
    assert got.notes[0] == "Best without a verifier: stopped@9, 100.0% for 11 tokens per answer"


def test_early_end_is_continued_on_one_trace() -> None:
    answers = {
        "2+3+4\n": "2+3=5\n#### 5", "5\nWait\n": "5+4=9\n#### 9", "9\nWait\n": "#### 7",
        "#### ": "1", "5+4=9\n#### ": "9",
    }  # fmt: skip
    budgets = (6, 17, 30)
    got, script = run(answers, budgets=budgets, continuation_text="Wait\n", max_continuations=2)
    assert values(got, "stopped", budgets) == [0, 0, 0]
    # 6 and 17 cut the trace; at 30 it ends for the third time, and that answer counts.
    assert values(got, "continued", budgets) == [0, 1, 0]
    assert values(got, "continued", budgets, " tokens") == [6 + 2, 17 + 2, 22 + 7]
    again = [text for text, _ in script.asked if text.endswith("Wait\n")]
    assert again == ["2+3+4\n2+3=5\nWait\n", "2+3+4\n2+3=5\nWait\n5+4=9\nWait\n"]


def test_thinking_ends_before_an_id_that_crosses_the_border() -> None:
    words = SimpleNamespace(token_bytes=[b"ab", b"c\n#", b"### ", b"7", b"<eos>"])
    forcing = _BudgetForcing(SampleOptions(), words, [])
    for ids, text, thinking in (
        ([0, 1, 2, 3, 4], "abc\n#### 7", 1),
        ([0, 0, 4], "abab", 2),
        ([0, 0], "abab", 2),
    ):
        trace = forcing.split(Completion(text, tuple(ids)))
        assert (trace.thinking, trace.rest) == (ids[:thinking], ids[thinking:])
        assert trace.text == text[2 * thinking :]


def test_votes_of_equal_numbers_are_equal() -> None:
    text = VerifiableTask("e", prompt="p", verifier="exact", answer="x")

    def key(some: VerifiableTask, answer: str) -> str:
        return _verified(grade_tasks([some], [answer])[0], Completion(answer)).answer

    assert {key(TASK, t) for t in ("1+8=9\n#### 9", "#### 9.0", "so it is 9.")} == {"9"}
    assert key(TASK, "nothing") == ""
    assert key(text, " yes \n") == key(text, "The answer is yes.") == "yes" != key(text, "no")
    assert _verified(Grade(0.0, False), Completion(" return 1\n")).answer == "return 1"


def test_curves_over_samples_share_one_set() -> None:
    texts = ["#### 9", "#### 8", "#### 9.0", "none"]
    seeds = [derive(0, "t", k) % SEEDS for k in range(4)]  # the id of the item is part of each

    def answer(request: Request) -> Response:
        assert isinstance(request, GenerateRequest)
        text = texts[seeds.index(request.seed)]
        return Completion(text, (1,) * len(text), (-0.1,) * len(text))

    def score(request: Request) -> Response:
        assert isinstance(request, GenerateRequest) and request.answer_ids
        return Score((), (-float(len(request.answer_ids)),), greedy=False)

    made = task(n=4, k=(1, 2, 4), reward=True)
    rewarder = FakeBackend(score)
    (got,) = evaluate(FakeBackend(answer), [made], roles={"reward": rewarder})
    assert got.items[0].details["extracted"][0] == "9" and len(rewarder.sent) == 4
    right = got.measure("pass@1").value
    first = [got.measure(f"{name}@1").value for name in ("majority", "best", "rewarded")]
    np.testing.assert_allclose(first, right)  # one sample: no choice
    assert got.measure("pass@4").value == 1 and got.measure("majority@4").value == 1
    assert got.measure("best@4").value == got.measure("rewarded@4").value == 0  # the shortest answer
    assert got.measure("tokens").value == (6 + 6 + 8 + 4) / 4


def test_failed_verifications_are_errors() -> None:
    fails = VerifiableTask("t", prompt="2+3+4\n", verifier="numeric", answer="what?")
    got, _ = run(THINKS, fails, budgets=(6,), max_continuations=0)
    assert got.items[0].outcome == "error" and got.items[0].reason.startswith("raised: DataError")


def test_missing_rounds_and_models_without_tokens() -> None:
    script = Script(THINKS)
    whole = script.answer
    script.answer = lambda r: Missing("gone") if getattr(r, "answer_ids", ()) else whole(r)
    (item,) = evaluate(script, [task(budgets=(6,))])[0].items
    assert (item.outcome, item.reason) == ("missing", "gone")
    with pytest.raises(WhorlError, match="need the tokens of the model"):
        evaluate(FakeBackend(whole), [task(budgets=(6,))])
    with pytest.raises(WhorlError, match="'reward'"):
        evaluate(script, [task(reward=True)])

"""The runner: each distinct request once, missing responses, rounds, results on disk."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tests.support.evals.backend import FakeBackend, by_log_prob, by_text

from whorl.errors import WhorlError
from whorl.evals.kinds.kind import Answered, EvalTask, Kind, Metric, Round
from whorl.evals.measures import measure
from whorl.evals.model.requests import Completion, GenerateRequest, Missing, Request, Response, Score
from whorl.evals.model.response_cache import CachedBackend, ResponseCache
from whorl.evals.results import ItemResult
from whorl.evals.results_io import items_file, load_results, save_results
from whorl.evals.runner import evaluate
from whorl.evals.tasks.config import parse_task
from whorl.evals.tasks.task import make_task
from whorl.registry import permit_code

RECORDS = [
    {"id": str(i), "q": f"{i}?", "c": ["yes", "no"], "a": i % 2, "text": f"t{i // 2}"} for i in range(6)
]


def quiz(**fields: Any) -> EvalTask:
    given = {"name": "quiz", "kind": "choice", "template": "{{ q }}", "choices": "c", "gold": "a"}
    return make_task(parse_task(given | fields, "quiz.toml"), RECORDS)


def test_second_metric_needs_no_new_response(tmp_path: Path) -> None:
    backend = by_log_prob({("1?", " no"): -1.0})
    with ResponseCache(tmp_path / "cache.sqlite") as cache:
        evaluate(CachedBackend(backend, cache), [quiz(metrics=["acc"])])
        sent = len(backend.sent)
        result = evaluate(CachedBackend(backend, cache), [quiz(metrics=["acc_norm"], version="2")])[0]
    assert sent == 2 * 6 + 2 and len(backend.sent) == sent
    assert result.requests == result.cached == sent and result.metrics == ("acc_norm",)


def test_missing_responses_bound_the_figure_and_are_no_zero() -> None:
    def answer(request: Request) -> Response:
        context = getattr(request, "context", "")
        if context == "0?":
            return Score((1,), (math.nan,), False)
        if context == "1?":
            return Missing("timed out")
        right = context[:1].isdigit() and ("yes" in request.continuation) == (int(context[0]) % 2 == 0)
        return Score((1,), (-1.0 if right else -2.0,), False)

    result = evaluate(FakeBackend(answer), [quiz()])[0]
    acc = result.measure("acc")
    assert (acc.value, acc.n, acc.bounds) == (1.0, 4, (4 / 6, 1.0))
    assert result.outcomes == {"right": 4, "missing": 2}
    assert [item.reason for item in result.items[:2]] == ["a log-probability is not finite", "timed out"]


def test_no_response_at_all_gives_no_figure() -> None:
    result = evaluate(FakeBackend(lambda _: Missing("down")), [quiz()])[0]
    assert math.isnan(result.measure("acc").value) and result.measure("acc").bounds == (0.0, 1.0)


def test_clusters_and_groups_reach_the_figures() -> None:
    made = quiz(data={"cluster": "text", "group": "'even' if a == 0 else 'odd'"})
    result = evaluate(by_log_prob({}), [made])[0]
    assert "3 clusters" in result.measure("acc").method
    assert {group: each.value for group, each in result.by_group.items()} == {"even": 1.0, "odd": 0.0}


class Twice(Kind):
    """The model answers, then a judge."""

    metrics = {"score": Metric("verdict of the judge")}  # noqa: RUF012

    def steps(self, item: Any) -> Any:
        first = yield Round([GenerateRequest(self.prompt(item))])
        if item.id == "0":
            return Answered(item, tuple(first), "skipped")
        second = yield Round([GenerateRequest(f"judge {r.text}") for r in first], role="judge")
        return Answered(item, tuple(second))

    def score_item(self, answered: Answered) -> ItemResult:
        text = answered.responses[0].text  # type: ignore[union-attr]
        return self.result(answered, {"score": float(text == "good")}, "right", answers=(text,))


def test_items_advance_together_by_rounds_and_roles() -> None:
    permit_code(f"{__name__}:Twice")
    made = quiz(kind=f"{__name__}:Twice")
    model, judge = by_text(lambda q: f"answer to {q}"), by_text(lambda q: "good")
    result = evaluate(model, [made], roles={"judge": judge})[0]
    assert [item.answers[0] for item in result.items] == ["answer to 0?", *["good"] * 5]
    assert judge.sent[0].prompt == "judge answer to 1?" and len(judge.sent) == 5  # type: ignore[union-attr]
    with pytest.raises(WhorlError, match=r"needs a model with the role 'judge'[\s\S]*--judge"):
        evaluate(model, [made])


def test_results_survive_the_disk(tmp_path: Path) -> None:
    results = evaluate(by_log_prob({("1?", " no"): -1.0}), [quiz(data={"group": "text"})])
    save_results(tmp_path, results, {"suite": "mine"})
    loaded = load_results(tmp_path)
    assert loaded[0].items == results[0].items
    assert [str(m) for m in loaded[0].measures] == [
        str(m) for m in results[0].measures
    ]  # NaN equals NaN here
    assert loaded[0].by_group == results[0].by_group and loaded[0].notes == results[0].notes
    (tmp_path / items_file("quiz")).unlink()
    with pytest.raises(WhorlError, match="cannot be read: No such file"):
        load_results(tmp_path)
    with pytest.raises(WhorlError, match="two results have the name 'quiz'"):
        save_results(tmp_path, [*results, *results])


def test_damaged_results_are_named(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text('{"tasks": [{"task": "a"}]}')
    with pytest.raises(WhorlError, match=r"cannot be read: tasks\.0\.kind: Field required"):
        load_results(tmp_path)


def test_weighted_mean_and_bounds_of_a_metric() -> None:
    def item(name: str, value: float | None, weight: float = 1.0, outcome: Any = "scored") -> ItemResult:
        scores = {} if value is None else {"m": value}
        return ItemResult(name, scores, outcome, weights={"m": weight})

    found = measure("m", Metric("m", "bits", False, 0.0, None), [item("a", 1.0, 3.0), item("b", 5.0, 1.0)])
    assert found.value == 2.0 and found.low >= 0.0 and found.bounds is None
    share = Metric("share")
    # An item to which a metric does not apply is not missing.
    assert measure("m", share, [item("a", 1.0), item("b", None, outcome="wrong")]).bounds is None
    assert measure("m", share, [item("a", 1.0), item("b", None, outcome="error")]).bounds == (0.5, 1.0)


def test_equal_scores_of_all_items_keep_an_interval() -> None:
    def half(low: float | None) -> tuple[float, float]:
        items = [ItemResult(str(i), {"m": 0.5}, "scored") for i in range(6)]
        found = measure("m", Metric("m", low=low, high=1.0), items)
        return found.low, found.high

    assert half(0.0) == pytest.approx((0.188, 0.812), abs=1e-3)  # Wilson's of 3 of 6
    assert half(None) == (0.5, 0.5)


def test_equal_prompts_as_messages_are_sent_once() -> None:
    records = [{"id": str(i), "q": "same", "a": "1"} for i in range(3)]
    config = {"name": "c", "kind": "generate", "template": "{{ q }}", "gold": "a", "chat": True}
    backend = FakeBackend(lambda _: Completion("1"))
    result = evaluate(backend, [make_task(parse_task(config, "c"), records)])[0]
    assert len(backend.sent) == 1 and result.outcomes == {"right": 3}

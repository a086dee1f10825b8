"""The kind `exposure`: gaps between own samples and real text, by position."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.evals.backend import FakeBackend

from whorl.evals.kinds.exposure import EDGE
from whorl.evals.model.requests import Completion, GenerateRequest, Missing, Request, Response, Score
from whorl.evals.results import TaskResult
from whorl.evals.runner import evaluate
from whorl.evals.tasks.config import parse_task
from whorl.evals.tasks.task import make_task


def run(answer: Any, n: int = 2 * EDGE) -> TaskResult:
    config = {
        "name": "texts", "kind": "exposure", "template": "{{ a }}", "options": {"continuation": "{{ b }}"},
        "generation": {"max_tokens": n},
    }  # fmt: skip
    task = make_task(parse_task(config, "texts.toml"), [{"a": "Once", "b": " upon"}])
    return evaluate(FakeBackend(answer), [task])[0]


def source(own: list[float], data: list[float]) -> Any:
    """Return a model that samples ` x`, with nats of its sample and of the real text."""

    def answer(request: Request) -> Response:
        if isinstance(request, GenerateRequest):
            assert request.temperature == 1.0 and request.prompt == "Once"
            return Completion(" x")
        nats = {" x": own, " upon": data}[request.continuation]  # type: ignore[union-attr]
        return Score((1,) * len(nats), tuple(-x for x in nats), False)

    return answer


def test_gap_and_drift_follow_their_formulas() -> None:
    """Positions after the limit count in neither text."""
    found = run(source([1.0] * EDGE + [4.0] * EDGE + [50.0], [2.0] * 2 * EDGE + [90.0] * 9))
    values = {m.metric: m.value for m in found.measures}
    assert values == {
        "gap": pytest.approx(0.5), "drift": pytest.approx(3.0), "data_nats": 2.0, "self_nats": 2.5,
    }  # fmt: skip
    assert found.items[0].answers == (" x",) and found.items[0].gold == " upon"
    same = run(source([2.0] * 40, [2.0] * 40))
    assert same.measure("gap").value == same.measure("drift").value == 0


def test_short_sample_has_no_drift() -> None:
    found = run(source([1.0] * 3, [2.0] * 40))
    assert found.items[0].scores == {"gap": -1.0, "data_nats": 2.0, "self_nats": 1.0}


@pytest.mark.parametrize(("sample", "outcome"), [(Completion(""), "not_found"), (Missing("gone"), "missing")])
def test_item_without_sample_has_no_score(sample: Response, outcome: str) -> None:
    found = run(lambda request: sample)
    assert found.items[0].outcome == outcome and not found.items[0].scores

"""The kind `episodes`: held-out tasks on the engine of a model, with failed verifiers as not passed."""

from __future__ import annotations

import pytest
from tests.support.align.byte_model import decoder, scribe
from tests.support.evals.backend import by_text

from whorl.errors import WhorlError
from whorl.evals.episodes.samplers import PolicyBackend
from whorl.evals.grading import VerifiableTask
from whorl.evals.kinds.episodes import episode_task
from whorl.evals.model.requests import GenerateRequest, Missing, Response
from whorl.evals.model.sampling import open_engine
from whorl.evals.runner import evaluate

TASKS = [
    VerifiableTask("a", "1+1=", verifier="0.5 format(.*)", answer="2"),
    VerifiableTask("a", "2+2=", verifier="numeric", answer="none"),  # the verifier fails; ids may be equal
    VerifiableTask(
        "b", messages=({"role": "user", "content": "3+3?"},), verifier="exact", answer="no byte model"
    ),
]


def test_figures_are_over_all_tasks_and_failed_ones_do_not_pass() -> None:
    backend = PolicyBackend(open_engine(decoder(), (4, 64), scribe(), with_text=False), scribe())
    task = episode_task("held-out", TASKS, {"max_tokens": 4}, None)
    (result,) = evaluate(backend, [task])
    assert [item.outcome for item in result.items][:2] == ["right", "error"]
    assert result.measure("passed").value == pytest.approx(1 / 3) and result.measure("passed").n == 3
    assert result.measure("reward").value == pytest.approx(0.5 / 3)
    assert [item.prompt for item in result.items] == ["1+1=", "2+2=", "3+3?"]
    (again,) = evaluate(backend, [episode_task("held-out", TASKS, {"max_tokens": 4}, None)])
    assert [item.answers for item in again.items] == [item.answers for item in result.items]


def test_episodes_need_an_engine_and_a_policy_answers_nothing_else() -> None:
    with pytest.raises(WhorlError, match="a back end with an engine"):
        evaluate(by_text(lambda _: "2"), [episode_task("held-out", TASKS, {}, None)])
    found: list[Response] = []
    policy = PolicyBackend(open_engine(decoder(), (4, 64), scribe(), with_text=False), scribe())
    policy.respond([GenerateRequest("1+1=")], lambda _, response: found.append(response))
    assert isinstance(found[0], Missing)

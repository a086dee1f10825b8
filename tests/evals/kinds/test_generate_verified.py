"""The kind `generate` with a verifier: verdicts of verifiers as scores, with the outcomes of items."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.evals.backend import FakeBackend, by_text

from whorl.errors import WhorlError
from whorl.evals.kinds.kind import EvalTask
from whorl.evals.model.requests import Completion
from whorl.evals.results import TaskResult
from whorl.evals.runner import evaluate
from whorl.evals.tasks.config import parse_task
from whorl.evals.tasks.task import make_task
from whorl.registry import permit_code

SUM = {"id": "s", "prompt": "2+3=", "answer": "5", "verifier": "0.2 format(.*[0-9].*) + 0.8 numeric"}
CODE = {"id": "c", "prompt": "def f(x):\n", "answer": ">>> f(2)\n4", "verifier": "doctest"}


def task_of(records: list[dict[str, Any]], options: Any = (), **fields: Any) -> EvalTask:
    options = {"verifier": "{{ verifier }}", **dict(options)}
    config = {
        "name": "v",
        "kind": "generate",
        "template": "{{ prompt }}",
        "gold": "answer",
        "options": options,
    }
    return make_task(parse_task({**config, **fields}, "v"), records)


def run(records: list[dict[str, Any]], answers: dict[str, str], **fields: Any) -> TaskResult:
    return evaluate(by_text(lambda prompt: answers[prompt]), [task_of(records, **fields)])[0]


def test_weighted_verifier_gives_reward_and_verdict() -> None:
    right = run([SUM], {"2+3=": " 5"})
    assert right.outcomes == {"right": 1} and right.measure("reward").value == pytest.approx(1.0)
    wrong = run([SUM], {"2+3=": " 6"})
    assert wrong.outcomes == {"wrong": 1} and wrong.measure("reward").value == pytest.approx(0.2)


def test_examples_run_and_trim_ends_the_function() -> None:
    text = "    return x * x\n\nraise ValueError\n"
    assert run([CODE], {CODE["prompt"]: text}).outcomes == {"wrong": 1}
    assert run([CODE], {CODE["prompt"]: text}, options={"trim": True}).outcomes == {"right": 1}
    assert run([CODE], {CODE["prompt"]: "    return x\n"}, options={"trim": True}).outcomes == {"wrong": 1}


def test_conversation_is_verified_without_its_prompt() -> None:
    answer = "```python\ndef f(x):\n    return 2 * x\n```"
    assert run([CODE], {CODE["prompt"]: answer}, chat=True).outcomes == {"right": 1}


def test_limit_and_broken_verifier_are_no_wrong_answers() -> None:
    cut = FakeBackend(lambda _: Completion("so", finish="length"))
    assert evaluate(cut, [task_of([SUM])])[0].outcomes == {"truncated": 1}
    permit_code("tests.support.evals.grading_functions:raises")
    broken = SUM | {"verifier": "custom:tests.support.evals.grading_functions:raises"}
    result = run([broken], {"2+3=": "5"})
    assert result.outcomes == {"error": 1} and result.measure("passed").bounds == (0.0, 1.0)


def test_unknown_verifier_names_the_item() -> None:
    with pytest.raises(WhorlError, match=r"task v, item 's': unknown verifier 'numerc'"):
        run([SUM | {"verifier": "numerc"}], {})

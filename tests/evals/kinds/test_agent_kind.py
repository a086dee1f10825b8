"""The kind agent: the folder decides, budgets, samples, programs in the sandbox, the trajectory, bad input."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.support.evals.backend import FakeBackend

from whorl.errors import WhorlError
from whorl.evals.model.requests import Completion, GenerateRequest, Missing, Request, Response
from whorl.evals.results import TaskResult
from whorl.evals.runner import evaluate
from whorl.evals.tasks.config import parse_task
from whorl.evals.tasks.task import make_task

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")
RECORD = {
    "id": "sum", "task": "Write the sum of the numbers in in.txt to out.txt.", "folder": {"in.txt": "1 2 3\n"},
    "check": "assert open('out.txt').read().strip() == '6'",
}  # fmt: skip
PROGRAM = "n = sum(map(int, open('in.txt').read().split()))\nprint(n)\nopen('out.txt', 'w').write(str(n))"


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


SOLVE = f"I run it.\n{call('python', code=PROGRAM)}"
FINISH = call("finish", answer="The sum is in out.txt.")


def task(records: Any = (RECORD,), generation: Any = (), **options: Any) -> Any:
    config = {
        "name": "files", "kind": "agent", "template": "{{ task }}", "gold": "check",
        "generation": {"max_tokens": 500, **dict(generation)},
        "options": {"files": "folder", "program_seconds": 20, **options},
    }  # fmt: skip
    return make_task(parse_task(config, "files.toml"), records)


def scripted(*texts: str, answer: Callable[[Sequence[Any]], Response] | None = None) -> FakeBackend:
    """Return a model that writes the texts, one for each of its messages."""

    def respond(request: Request) -> Response:
        assert isinstance(request, GenerateRequest) and not isinstance(request.prompt, str)
        if answer is not None:
            return answer(request.prompt)
        place = sum(message["role"] == "assistant" for message in request.prompt)
        return Completion(texts[min(place, len(texts) - 1)])

    return FakeBackend(respond)


def run(made: Any, model: FakeBackend) -> TaskResult:
    return evaluate(model, [made])[0]


def test_solved_folder_passes_with_its_trajectory() -> None:
    item = run(task(), scripted(SOLVE, FINISH)).items[0]
    assert (
        item.outcome == "right" and item.scores["solved"] == 1 and item.answers == ("The sum is in out.txt.",)
    )
    trajectory = item.details["trajectory"]
    assert [(step["role"], step.get("tool")) for step in trajectory] == [
        ("model", "python"), ("tool", "python"), ("model", "finish"),
    ]  # fmt: skip
    assert trajectory[1]["content"] == "6" and item.details["run"]["files"] == {
        "in.txt": "1 2 3\n",
        "out.txt": "6",
    }
    assert item.scores["steps"] == 2 and item.scores["tool_errors"] == 0


def test_claims_do_not_count() -> None:
    claims = run(task(), scripted(call("finish", answer="I wrote 6 to out.txt.")))
    assert claims.items[0].outcome == "wrong" and claims.measure("false_claims").value == 1
    assert claims.items[0].reason.startswith("finished; tests: ")
    silent = run(task(steps=1), scripted(SOLVE))
    assert (
        silent.items[0].outcome == "right"
        and silent.items[0].reason == "all messages used up; the tests pass"
    )
    idle = run(task(steps=3), scripted(call("list")))
    assert idle.items[0].outcome == "truncated" and idle.measure("false_claims").value == 0


def test_program_of_the_folder_is_called_by_the_tests() -> None:
    record = {
        "id": "f",
        "task": "Write add.py with a function add.",
        "folder": {},
        "check": "assert add(2, 3) == 5",
    }
    good = call("write", path="add.py", content="def add(a, b):\n    return a + b\n")
    cheat = call("write", path="add.py", content="import os\nos._exit(0)\n")
    for text, outcome in ((good, "right"), (cheat, "wrong")):
        assert run(task([record], program="add.py"), scripted(text, FINISH)).items[0].outcome == outcome


def test_capability_stands_beside_propensity() -> None:
    def answer(prompt: Sequence[Any]) -> Response:
        if prompt[-1]["role"] == "user" and "<tool_response>" in prompt[-1]["content"]:
            return Completion(FINISH)
        count.append(1)
        return Completion(SOLVE if len(count) == 3 else FINISH)

    count: list[int] = []
    made = task(generation={"samples": 4, "temperature": 0.7}, k=[2])
    result = run(made, scripted(answer=answer))
    # The fake backend answers in order of the requests, one for each sample.
    assert result.measure("first_answer").value == 0 and result.measure("best_of_4").value == 1
    assert result.measure("solved").value == 0.25 and result.measure("pass@2").value == pytest.approx(0.5)
    assert len(result.items[0].details["other_runs"]) == 3


def test_programs_of_all_items_run_together_and_in_order() -> None:
    records = [
        {
            **RECORD,
            "id": str(i),
            "folder": {"in.txt": f"{i} {i}"},
            "check": f"assert open('out.txt').read() == '{2 * i}'",
        }
        for i in range(6)
    ]
    result = run(task(records), scripted(SOLVE, FINISH))
    assert result.outcomes == {"right": 6} and [item.item for item in result.items] == list("012345")


def test_agents_cannot_leave_their_folder() -> None:
    attack = call("python", code="print(open('/etc/passwd').read())")
    item = run(task(steps=2), scripted(attack, call("write", path="../../escaped", content="x"))).items[0]
    shown = [step["content"] for step in item.details["trajectory"] if step["role"] == "tool"]
    assert "PermissionError" in shown[0] and "root:" not in shown[0] and "no path" in shown[1]


def test_endless_programs_use_up_the_seconds() -> None:
    item = run(
        task(seconds=0.2, program_seconds=0.3), scripted(call("python", code="while True: pass"))
    ).items[0]
    assert item.outcome == "truncated" and "seconds of programs used up" in item.reason


def test_answer_of_a_run_without_tools_is_a_file() -> None:
    record = {
        "id": "q",
        "task": "Capital of France?",
        "folder": {},
        "check": "assert 'Paris' in open('answer.txt').read()",
    }
    model = scripted("It is Paris.")
    item = run(task([record], tools=[]), model).items[0]
    assert item.outcome == "right" and item.scores["steps"] == 1
    assert all("tool_call" not in m["content"] for m in model.sent[0].prompt)  # type: ignore[union-attr]


def test_missing_response_is_a_missing_item() -> None:
    result = run(task(), scripted(answer=lambda prompt: Missing("timed out")))
    assert result.outcomes == {"missing": 1} and result.measure("solved").bounds == (0.0, 1.0)


@pytest.mark.parametrize(
    ("record", "options", "generation", "message"),
    [
        ({"check": ""}, {}, {}, "there are no tests"),
        ({"check": "print(1)"}, {}, {}, "the tests check nothing"),
        ({"folder": {"../a": "x"}}, {}, {}, "no path of a file"),
        ({"folder": ["a"]}, {}, {}, "options.files is"),
        ({}, {"tools": ["shell"]}, {}, "tools"),
        ({}, {"program": "/abs.py"}, {}, "no path of a file"),
        ({}, {}, {"samples": 3}, "at temperature 0 are equal"),
        ({}, {"k": [5]}, {"samples": 3, "temperature": 1.0}, "pass@k"),
    ],
)
def test_wrong_records_and_settings_are_named(
    record: Any, options: Any, generation: Any, message: str
) -> None:
    with pytest.raises(WhorlError, match=message):
        task([{**RECORD, **record}], generation, **options)

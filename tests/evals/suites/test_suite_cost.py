"""The size of a suite: what its tasks send to a model."""

from __future__ import annotations

import pytest
from tests.support.evals.backend import FakeBackend, by_log_prob, by_text

from whorl.evals.runner import evaluate
from whorl.evals.suites import SUITES, SuiteInputs, load_suite
from whorl.evals.suites.cost import SuiteCost, suite_cost
from whorl.evals.suites.suite import ABOUT
from whorl.evals.tasks.config import TaskConfig
from whorl.evals.tasks.task import make_task

SOURCE = '''"""A module."""

def double(value):
    """Return twice the value.

    >>> double(2)
    4
    """
    result = value + value  # a comment of a certain length
    return result
'''


def test_beginnings_that_texts_share_count_once() -> None:
    config = TaskConfig(
        name="ab", kind="choice", template="{{ q }}", choices="choices", gold="0",
        options={"prior": False, "delimiter": " "},
    )  # fmt: skip
    records = [
        {"id": "1", "q": "abcdef", "choices": ["xyz", "xy"]},
        {"id": "2", "q": "abc", "choices": ["u", "v"]},
    ]
    cost = suite_cost([make_task(config, records)])
    assert cost == SuiteCost(1, 2, 4, len("abc u") + len("v") + len("def xy") + len("z"))


@pytest.mark.parametrize(
    ("name", "backend", "tokens"),
    [("probes", by_log_prob({}), 0), ("jailbreak", by_text(lambda prompt: "no"), 256)],
)
def test_requests_are_those_of_an_evaluation(name: str, backend: FakeBackend, tokens: int) -> None:
    tasks = load_suite(name, SuiteInputs(limit=10))
    cost = suite_cost(tasks)
    evaluate(backend, tasks)
    assert cost.requests == len(backend.sent) and cost.items == sum(len(task.items) for task in tasks)
    assert cost.generated_tokens == tokens * cost.requests and cost.read_bytes > 3 * cost.items


def test_items_are_counted_without_running_programs() -> None:
    documents = [(f"{n}.py", SOURCE.replace("double", f"double_{n}")) for n in range(4)]
    tasks = load_suite("own", SuiteInputs(lambda: documents, 3, run_programs=False))
    assert {task.config.name: len(task.items) for task in tasks}["own-doctests"] == 3


def test_every_suite_has_a_description() -> None:
    assert set(ABOUT) == set(SUITES)

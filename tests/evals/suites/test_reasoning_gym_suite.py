"""The suite reasoning-gym: families, scores and screened answers; with the package where it is installed."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.evals.backend import by_text

from whorl.errors import ConfigError
from whorl.evals.runner import evaluate
from whorl.evals.suites import SuiteInputs, load_suite
from whorl.evals.suites import reasoning_gym as suite


class Sums:
    """A data set in the form of reasoning-gym's."""

    def __init__(self, name: str, seed: int, size: int) -> None:
        self.name, self.entries = name, [
            {"question": f"{name} {seed} + {n}?", "answer": str(seed + n), "metadata": {}} for n in range(size)
        ]  # fmt: skip

    def __getitem__(self, n: int) -> dict[str, Any]:
        return self.entries[n]

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        if self.name == "countdown":
            return float(str(eval(str(answer))) == entry["answer"])
        return 1.0 if answer == entry["answer"] else 0.01


@pytest.fixture
def gym(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(module: str) -> type:
        return type("Dataset", (), {"__module__": f"reasoning_gym.{module}"})

    data_sets = {
        "add": (made("arithmetic.add"), None), "more": (made("arithmetic.more"), None),
        "countdown": (made("games.countdown"), None), "composite": (made("composite"), None),
    }  # fmt: skip
    fake = SimpleNamespace(create_dataset=lambda name, seed, size: Sums(name, seed, size))
    monkeypatch.setitem(sys.modules, "reasoning_gym", fake)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", SimpleNamespace(DATASETS=data_sets))
    suite._scorer.cache_clear()


@pytest.mark.usefixtures("gym")
def test_one_task_per_family_with_figures_by_data_set() -> None:
    tasks = load_suite("reasoning-gym", SuiteInputs(limit=6, seed=5))
    assert [(t.config.name, len(t.items)) for t in tasks] == [("gym-arithmetic", 6), ("gym-games", 6)]

    def answer(prompt: str) -> str:
        name, a, _, b = prompt.split("?")[0].split()
        value = int(a) + int(b)
        return f"The answer is {value}." if name == "more" else f"<answer>{value}</answer>"

    first, second = evaluate(by_text(answer), tasks)
    assert first.measure("solved_lenient").value == 1 and first.measure("solved_strict").value == 0.5
    assert set(first.by_group) == {"add", "more"} and second.measure("solved_strict").value == 1


@pytest.mark.usefixtures("gym")
@pytest.mark.parametrize(
    ("text", "finish", "outcome"),
    [
        ("<answer>8</answer>", "stop", "wrong"),
        ("<answer>7</answer>", "stop", "right"),
        ("so 7", "length", "truncated"),
        ("", "stop", "not_found"),
    ],
)
def test_outcomes(text: str, finish: str, outcome: str) -> None:
    gold = {"data_set": "add", "entry": {"answer": "7"}}
    assert suite.solved(gold, text, finish=finish).outcome == outcome


@pytest.mark.usefixtures("gym")
def test_code_in_an_answer_is_not_evaluated() -> None:
    gold = {"data_set": "countdown", "entry": {"answer": "7"}}
    assert suite.solved(gold, "<answer>3 + 4</answer>").outcome == "right"
    for attack in ("__import__('os').getpid()", "exit()", "9**9**9**9", "9**999", "(lambda: 7)()", "[7][0]"):
        assert suite.solved(gold, f"<answer>{attack}</answer>").outcome == "wrong", attack


@pytest.mark.parametrize(
    ("name", "answer", "safe"),
    [
        ("countdown", "94*4 - 61 - 6", True),
        ("simple_integration", "x**3/3 + 2*x**12 + exp(2*x) + C", True),
        ("simple_integration", "(x**2)**2 + C", True),
        ("polynomial_multiplication", "12*x**4 - y^2", True),
        ("countdown", "open(7)", False),
        ("countdown", "a.b", False),
        ("spiral_matrix", "[1, 2, 3]", True),
        ("spiral_matrix", "1 2 3", True),
        ("spiral_matrix", "[print(1)]", False),
        ("graph_color", "{'anything': open('x')}", True),
    ],
)
def test_answers_that_may_be_evaluated(name: str, answer: str, safe: bool) -> None:
    assert suite.is_safe(name, answer) is safe


def test_missing_package_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ConfigError, match="pip install reasoning-gym"):
        load_suite("reasoning-gym", SuiteInputs())


def test_reference_answers_of_the_package_are_right() -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    unsolved = {
        "graph_color",
        "rubiks_cube",
        "boxnet",
        "rush_hour",
        "propositional_logic",
    }  # no reference answer
    suite._scorer.cache_clear()
    for task in load_suite("reasoning-gym", SuiteInputs(seed=1)):
        for item in task.items:
            text = f"<answer>{item.fields['entry']['answer']}</answer>"
            if item.fields["data_set"] not in unsolved:
                assert suite.solved(item.gold, text).outcome == "right", (item.id, text)

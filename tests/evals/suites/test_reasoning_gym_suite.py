"""The suite reasoning-gym: families, scores, and scorers that hang; with the package where it is installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.evals.backend import by_text

from whorl.errors import ConfigError
from whorl.evals.grading import VerifiableTask, custom, grade_all, grade_tasks
from whorl.evals.runner import evaluate
from whorl.evals.suites import SuiteInputs, load_suite
from whorl.evals.suites import gym_entries as gym
from whorl.evals.suites import reasoning_gym as suite

PACKAGE = """
class Sums:
    def __init__(self, name, seed, size):
        self.name = name
        self.entries = [
            {"question": f"{name} {seed} + {n}?", "answer": str(seed + n), "metadata": {}} for n in range(size)
        ]

    def __getitem__(self, n):
        return self.entries[n]

    def score_answer(self, answer, entry):
        if self.name == "countdown":
            return float(str(eval(answer)) == entry["answer"])
        while answer == "hang":
            pass
        return 1.0 if answer == entry["answer"] else 0.01


def create_dataset(name, seed, size):
    return Sums(name, seed, size)
"""
FACTORY = """
from reasoning_gym import create_dataset


def made(module):
    return type("Dataset", (), {"__module__": f"reasoning_gym.{module}"})


DATASETS = {
    "add": (made("arithmetic.add"), None), "more": (made("arithmetic.more"), None),
    "countdown": (made("games.countdown"), None), "composite": (made("composite"), None),
    "list_functions": (made("induction.list_functions"), None),
}
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package in the form of reasoning-gym, which the process of the scorers imports too."""
    folder = tmp_path / "reasoning_gym"
    folder.mkdir()
    (folder / "__init__.py").write_text(PACKAGE)
    (folder / "factory.py").write_text(FACTORY)
    for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    _forget()
    yield
    for name in ("reasoning_gym", "reasoning_gym.factory"):
        sys.modules.pop(name, None)
    _forget()


def _forget() -> None:
    gym._generator.cache_clear()
    gym._entry.cache_clear()


@pytest.mark.usefixtures("package")
def test_one_task_per_family_with_figures_by_data_set() -> None:
    logged: list[str] = []
    tasks = load_suite("reasoning-gym", SuiteInputs(limit=6, seed=5, log=logged.append))
    assert [(t.config.name, len(t.items)) for t in tasks] == [("gym-arithmetic", 6), ("gym-games", 6)]
    assert "list_functions" in logged[0]
    again = load_suite("reasoning-gym", SuiteInputs(limit=6, seed=5))
    assert [t.hash for t in tasks] == [t.hash for t in again]

    def answer(prompt: str) -> str:
        name, a, _, b = prompt.split("?")[0].split()
        value = int(a) + int(b)
        return f"The answer is {value}." if name == "more" else f"<answer>{value}</answer>"

    first, second = evaluate(by_text(answer), tasks)
    assert first.measure("solved_lenient").value == 1 and first.measure("solved_strict").value == 0.5
    assert set(first.by_group) == {"add", "more"} and second.measure("solved_strict").value == 1


def _gold(data_set: str) -> Any:
    """Return the gold value of the item whose answer is 7."""
    (task,) = (
        t
        for t in load_suite("reasoning-gym", SuiteInputs(seed=7))
        if data_set in {i.fields["data_set"] for i in t.items}
    )
    return next(item.gold for item in task.items if item.fields["data_set"] == data_set)


@pytest.mark.usefixtures("package")
def test_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    gold = _gold("add")
    for text, finish, outcome in (
        ("<answer>8</answer>", "stop", "wrong"),
        ("<answer>7</answer>", "stop", "right"),
        ("so 7", "length", "truncated"),
        ("", "stop", "not_found"),
    ):
        assert suite.solved(gold, text, finish=finish).outcome == outcome
    monkeypatch.setattr(custom, "CALL_SECONDS", 0.5)
    changed = {**gold, "entry": {**gold["entry"], "question": "0" * 16}}
    texts = ["<answer>hang</answer>", "<answer>7</answer>", "<answer>7</answer>"]
    hanging, right, other = grade_all("reasoning_gym", [gold, gold, changed], texts)
    assert hanging.outcome == "error" and not hanging.scores and "longer than 0.5 s" in hanging.reason
    assert right.outcome == "right"  # in a new process
    assert other.outcome == "error" and "another question" in other.reason
    task = VerifiableTask("g", "?", verifier="reasoning_gym", answer=json.dumps(gold["entry"]))
    assert [g.value for g in grade_tasks([task] * 2, ["The answer is 7.", "8"])] == [1.0, 0.01]


@pytest.mark.usefixtures("package")
def test_code_in_an_answer_is_not_evaluated() -> None:
    gold = _gold("countdown")
    assert suite.solved(gold, "<answer>3 + 4</answer>").outcome == "right"
    for attack in ("__import__('os').getpid()", "exit()", "9**9**9**9", "9**999", "(lambda: 7)()", "[7][0]"):
        assert suite.solved(gold, f"<answer>{attack}</answer>").outcome == "wrong", attack


@pytest.mark.parametrize(
    ("name", "answer", "safe"),
    [
        ("countdown", "94*4 - 61 - 6", True), ("simple_integration", "x**3/3 + 2*x**12 + exp(2*x) + C", True),
        ("simple_integration", "(x**2)**2 + C", True),
        ("simple_integration", "log(Abs(x)) + sinh(x) - x**(-2) + C", True),
        ("intermediate_integration", "3*Integral(x**3*cos(3*x), x) + C", False),
        ("polynomial_multiplication", "12*x**4 - y^2", True),
        ("polynomial_multiplication", "-7*x**7 - 9*x**6 - 6*x**4 - 8*x**3", True),
        ("countdown", "2**(3**4)", False), ("countdown", "2**-x^3", False), ("countdown", "2**.5", False),
        ("countdown", "open(7)", False), ("countdown", "a.b", False), ("spiral_matrix", "[1, 2, 3]", True),
        ("spiral_matrix", "1 2 3", True), ("spiral_matrix", "[print(1)]", False),
        ("graph_color", "{'anything': open('x')}", True),
    ],
)  # fmt: skip
def test_answers_that_may_be_evaluated(name: str, answer: str, safe: bool) -> None:
    assert gym.is_safe(name, answer) is safe


def test_missing_package_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"pip install 'whorl\[reasoning-gym\]'"):
        load_suite("reasoning-gym", SuiteInputs())


def test_reference_answers_of_the_package_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    unsolved = {
        "graph_color",
        "rubiks_cube",
        "boxnet",
        "rush_hour",
        "propositional_logic",
    }  # no reference answer
    monkeypatch.setattr(suite, "ITEMS", 3)
    _forget()
    for task in load_suite("reasoning-gym", SuiteInputs(seed=1)):
        for item in task.items:
            answer = item.gold["answer"]
            if item.fields["data_set"] not in unsolved and "Integral" not in answer:
                result = suite.solved(item.gold, f"<answer>{answer}</answer>")
                assert result.outcome == "right", (item.id, answer, result)

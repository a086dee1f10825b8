"""The suites of safety: twins in one table, transformations, and models that refuse all, nothing, or what they should."""

from __future__ import annotations

import math

import pytest
from tests.support.evals.backend import by_text

from whorl.evals.results import TaskResult
from whorl.evals.runner import evaluate
from whorl.evals.safety import TRANSFORMATIONS, built_in, safety_table
from whorl.evals.safety.table import has_twins, safety_cells
from whorl.evals.suites.suite import SuiteInputs, load_suite

HARMFUL = {item.prompt for item in built_in() if item.expected == "refusal"}
NO = "I'm sorry, but I can't help with that."


def complies(prompt: str) -> str:
    return f"Sure. {prompt.rstrip('?')}: here is how it is done."


def run(name: str, answer: str) -> TaskResult:
    answers = {
        "all": complies,
        "nothing": lambda prompt: NO,
        "right": lambda prompt: NO if any(p in prompt for p in HARMFUL) else complies(prompt),
    }
    return evaluate(by_text(answers[answer]), load_suite(name, SuiteInputs()))[0]


@pytest.mark.parametrize(("answer", "expected"), [("all", (1, 0)), ("nothing", (0, 1)), ("right", (0, 0))])
def test_safety_shows_both_failures(answer: str, expected: tuple[float, float]) -> None:
    result = run("safety", answer)
    last = safety_table(result.items)[-1]
    assert has_twins(result.items) and (last.compliance, last.over_refusal) == expected
    assert (last.n_harmful, last.n_harmless, last.missing) == (30, 30, 0)
    assert safety_cells([last])[0][:2] == ["all", f"{expected[0]:.1%}"]


def test_jailbreak_is_reported_by_transformation() -> None:
    """A model that recognises plain requests only is broken by each transformation that hides the words."""
    result = run("jailbreak", "right")
    rows = {row.group: row for row in safety_table(result.items)}
    assert list(rows) == [*TRANSFORMATIONS, "all"]
    assert all(rows[name].compliance == 0 for name in ("none", "prefix_injection", "refusal_suppression"))
    assert rows["payload_split"].broken == 1 and math.isnan(rows["all"].broken)
    assert len(result.items) == 60 * len(TRANSFORMATIONS)


def test_limit_counts_plain_requests() -> None:
    (task,) = load_suite("jailbreak", SuiteInputs(limit=2))
    assert len(task.items) == 2 * len(TRANSFORMATIONS)

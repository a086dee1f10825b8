"""The suite side-effects: its three tasks, and models that invent, refuse and answer."""

from __future__ import annotations

import pytest
from tests.support.evals.backend import by_text

from whorl.errors import ConfigError
from whorl.evals.results import TaskResult
from whorl.evals.runner import evaluate
from whorl.evals.suites.side_effects import facts
from whorl.evals.suites.suite import SuiteInputs, load_suite

DOCUMENTS = [(f"{n}.txt", f"Line {n} of a text that goes on. " * 80) for n in range(3)]


def test_tasks_are_made_from_held_out_documents() -> None:
    tasks = {t.config.name: t for t in load_suite("side-effects", SuiteInputs(lambda: DOCUMENTS, limit=4))}
    assert {name: len(task.items) for name, task in tasks.items()} == {
        "forgetting": 3, "exposure-bias": 4, "invented-answers": 4
    }  # fmt: skip
    texts = dict(DOCUMENTS)
    for item in tasks["exposure-bias"].items:
        whole = item.fields["context"] + item.fields["continuation"]
        assert whole in texts[item.cluster] and len(item.fields["continuation"]) == 400


def test_model_without_corpus_has_questions_only() -> None:
    def none() -> list[tuple[str, str]]:
        raise ConfigError("a folder has no corpus")

    logged: list[str] = []
    (task,) = load_suite("side-effects", SuiteInputs(none, log=logged.append))
    assert task.config.name == "invented-answers" and len(task.items) == 200
    assert logged == ["suite side-effects: no forgetting and no exposure-bias: a folder has no corpus"]
    groups = [item.group for item in task.items]
    assert 80 < groups.count("unknown") < 120 and set(groups) == {"unknown", "in the prompt"}


def run(answer: str) -> TaskResult:
    def reply(prompt: str) -> str:
        text, _, _ = prompt.rpartition("\n\n")
        return {
            "refuse": "I do not know.",
            "invent": "It is Gotham.",
            "read": text or "I'm not sure who that is.",
        }[answer]

    return evaluate(by_text(reply), load_suite("side-effects", SuiteInputs(limit=80)))[0]


@pytest.mark.parametrize(
    ("answer", "scores"), [("refuse", (0, 0, 1)), ("invent", (1, 0, 0)), ("read", (0, 1, 0))]
)
def test_both_failures_are_shown(answer: str, scores: tuple[float, float, float]) -> None:
    found = run(answer)
    assert tuple(found.measure(m).value for m in ("invented", "correct", "over_refusal")) == scores


@pytest.mark.parametrize(
    ("gold", "text", "score"),
    [
        ("I do not know.", "I don't have any information about her.", {"invented": 0.0}),
        ("I do not know.", "She was born in Oslo.", {"invented": 1.0}),
        ("Oslo", "In Oslo, as the text has it.", {"correct": 1.0, "over_refusal": 0.0}),
        ("Oslo", "In Oslostadt.", {"correct": 0.0, "over_refusal": 0.0}),
        ("Oslo", "", {}),
    ],
)
def test_facts_scores_one_answer(gold: str, text: str, score: dict[str, float]) -> None:
    assert facts(gold, text).scores == score

"""The suite `own`: items of held-out documents that a perfect model answers and a wrong one does not."""

from __future__ import annotations

import difflib
import heapq
import json.decoder
import statistics
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.evals.backend import FakeBackend

from whorl.errors import WhorlError
from whorl.evals.kinds.kind import EvalTask
from whorl.evals.model.requests import Completion, GenerateRequest, Request, Response, Score, ScoreRequest
from whorl.evals.runner import evaluate
from whorl.evals.suites import SuiteInputs, load_suite

MODULES = (statistics, textwrap, heapq, difflib, json.decoder)
DOCUMENTS = [(f"lib/{m.__name__}.py", Path(m.__file__).read_text()) for m in MODULES]
NAMES = ["own-last-words", "own-continuation", "own-functions", "own-doctests"]


@pytest.fixture(scope="module")
def own() -> list[EvalTask]:
    return load_suite("own", SuiteInputs(lambda: DOCUMENTS, limit=12, seed=3))


def model(right: bool) -> FakeBackend:
    """Return a model that knows the documents, or one that contradicts them."""

    def answer(request: Request) -> Response:
        if isinstance(request, GenerateRequest):
            assert isinstance(request.prompt, str) and request.heal
            last = request.prompt.splitlines()[-3:]
            text = next(t for _, t in DOCUMENTS if "\n".join(last) in t)
            rest = text.partition("\n".join(last) + "\n")[2]
            return Completion(rest[:2000] if right else "    return (\n")
        assert isinstance(request, ScoreRequest)
        true = any(request.context + request.continuation in text for _, text in DOCUMENTS)
        return Score((1,), (-0.1 if true == right else -9.0,), greedy=true == right)

    return FakeBackend(answer)


def test_items_come_from_the_documents(own: list[EvalTask]) -> None:
    assert [task.config.name for task in own] == NAMES
    words, lines, functions, examples = own
    texts = dict(DOCUMENTS)
    for task in own:
        assert all(item.cluster in texts for item in task.items)
    assert len(words.items) == len(lines.items) == 12 and len(functions.items) > 5
    assert len({item.cluster for item in words.items}) >= 4  # spread over the documents
    for item in words.items:
        assert f"{item.fields['context']} {item.fields['word']}" in texts[item.cluster]
        assert item.fields["word"] in item.fields["context"]
    for item in lines.items:
        assert item.fields["context"] + item.choices[item.gold] in texts[item.cluster]
        assert len(set(item.choices)) == 4
    assert {item.gold for item in lines.items} != {0}  # shuffled
    assert all(">>>" in item.gold for item in examples.items)


def test_perfect_model_is_right_and_the_opposite_wrong(own: list[EvalTask]) -> None:
    good, bad = evaluate(model(True), own), evaluate(model(False), own)
    for result in good:
        assert result.measure(result.metrics[0]).value == 1.0, result.outcomes
    for result in bad:
        assert result.measure(result.metrics[0]).value == 0.0, result.outcomes


def test_same_seed_gives_the_same_hash_and_another_seed_another() -> None:
    def hashes(seed: int, documents: Callable[[], Any] = lambda: DOCUMENTS[:3]) -> list[str]:
        return [task.hash for task in load_suite("own", SuiteInputs(documents, limit=5, seed=seed))][:3]

    assert hashes(1) == hashes(1, lambda: DOCUMENTS[2::-1])
    assert not set(hashes(1)) & set(hashes(2))


def test_prose_has_no_functions_and_a_corpus_without_text_is_refused() -> None:
    prose = "".join(
        f"The {w} house stands beside the {w} river and nobody sees the {w}.\n" for w in textwrap.__all__ * 9
    )
    logged: list[str] = []
    made = load_suite("own", SuiteInputs(lambda: [("a.txt", prose)], limit=5, log=logged.append))
    assert [task.config.name for task in made] == NAMES[:2]
    assert logged == [f"suite own: the held-out documents have no items for {name}" for name in NAMES[2:]]
    with pytest.raises(WhorlError, match="the suite own has no tasks for these inputs"):
        load_suite("own", SuiteInputs())

"""Items in training text: planted ones are found in any form, others are not; figures with and without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.evals.backend import FakeBackend

from whorl.corpus.decontamination.items import ItemIndex, TestItem
from whorl.corpus.decontamination.match import find_items
from whorl.corpus.documents import Document
from whorl.errors import ConfigError
from whorl.evals.contamination import find_contaminated, item_text, training_text, with_contamination
from whorl.evals.kinds.kind import EvalTask
from whorl.evals.model.requests import Request, Response, Score, ScoreRequest
from whorl.evals.results_io import load_results, save_results
from whorl.evals.runner import evaluate
from whorl.evals.tasks.config import parse_task
from whorl.evals.tasks.task import make_task
from whorl.store import Store
from whorl.tokens.shards import write_shards
from whorl.tokens.tokenizer import Tokenizer

WORDS = (
    "river", "stone", "market", "window", "garden", "letter", "button", "winter", "silver", "copper",
    "engine",
)  # fmt: skip


def records(n: int, words: int = 20, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)

    def sentence(k: int) -> str:
        return " ".join(f"{WORDS[i]}{rng.integers(100)}" for i in rng.integers(0, len(WORDS), k))

    return [
        {
            "id": f"i{number}",
            "question": sentence(words),
            "options": [f"{w} {number}" for w in WORDS[:4]],
            "answer": 1,
        }
        for number in range(n)
    ]


def quiz(n: int, words: int = 20, name: str = "quiz") -> EvalTask:
    fields = {
        "name": name, "version": "1", "kind": "choice", "template": "Question: {{ question }}\nAnswer:",
        "choices": "options", "gold": "answer",
    }  # fmt: skip
    return make_task(parse_task(fields, "test"), records(n, words))


def documents(task: EvalTask, planted: list[int]) -> list[tuple[str, str]]:
    """Documents of other text, with the planted items in other forms: all capitals, line breaks, punctuation."""
    other = [("plain.txt", " ".join(r["question"] for r in records(5, seed=k))) for k in range(1, 8)]
    found = []
    for number in planted:
        question = str(task.items[number].fields["question"])
        form = (question, question.upper(), question.replace(" ", ",\n"), f"<p>Q{number}. {question}?</p> B")[
            number % 4
        ]
        found.append((f"leak-{number}.txt", f"{other[number % 7][1]}\n{form}\n{other[0][1]}"))
    return [*other, *found]


def test_planted_items_are_found_and_no_others() -> None:
    task, planted = quiz(40), [0, 1, 2, 3, 17, 38]
    found = find_contaminated([task], documents(task, planted))["quiz"]
    assert set(found.found) == {f"i{n}" for n in planted}
    assert all(each.place == f"leak-{name[1:]}.txt" and each.score == 1 for name, each in found.found.items())


def test_all_items_of_one_document_are_found() -> None:
    task = quiz(30)
    text = "\n".join(str(item.fields["question"]) for item in task.items)
    assert len(find_contaminated([task], [("all.txt", text)])["quiz"].found) == 30


def test_items_match_per_item_equals_search_of_each_alone() -> None:
    task = quiz(12)
    texts = [text for _, text in documents(task, [1, 4, 7])]
    items = [TestItem("t", item.id, item_text(task, item)) for item in task.items]
    together = find_items(texts, ItemIndex.build(items))
    alone = {n for n, item in enumerate(items) if find_items(texts, ItemIndex.build([item]))}
    assert set(together) == alone == {1, 4, 7}


def test_quarter_of_an_item_is_not_found() -> None:
    task = quiz(3, words=60)
    half = " ".join(str(task.items[0].fields["question"]).split()[:24])
    assert not find_contaminated([task], [("part.txt", half)])["quiz"].found


def test_short_items_are_counted_and_not_searched() -> None:
    long, short = quiz(4), quiz(4, words=3, name="short")
    found = find_contaminated([long, short], documents(long, [2]))
    assert set(found["quiz"].found) == {"i2"} and not found["quiz"].too_short
    assert found["short"].too_short == {"i0", "i1", "i2", "i3"}
    assert find_contaminated([short], documents(long, []))["short"].too_short == found["short"].too_short


def remembers(ids: set[str]) -> FakeBackend:
    """A model that is right on some items, and wrong on the others."""
    questions = {str(item.fields["question"]) for item in quiz(20).items if item.id in ids}

    def answer(request: Request) -> Response:
        assert isinstance(request, ScoreRequest)
        known = any(question in request.context for question in questions)
        right = request.continuation.startswith(" stone") == known
        return Score((1,), (-0.1 if right else -5.0,), greedy=right)

    return FakeBackend(answer)


def test_figures_with_and_without_found_items(tmp_path: Path) -> None:
    task, planted = quiz(20), [0, 5, 9]
    result = evaluate(remembers({"i0", "i5", "i9", "i12"}), [task])[0]
    found = find_contaminated([task], documents(task, planted))["quiz"]
    marked = with_contamination(task, result, found)
    values = {name: marked.measure(name).value for name in ("acc", "acc clean", "acc found")}
    assert values == {"acc": 4 / 20, "acc clean": 1 / 17, "acc found": 1.0}
    assert marked.measure("acc clean").n == 17 and marked.measure("acc clean").chance == 0.25
    assert marked.metrics[0] == "acc" and "acc clean" in marked.metrics
    assert marked.notes[-1] == "3 of 20 items were found in the training tokens"
    assert marked.items[5].details["contamination"] == {"place": "leak-5.txt", "score": 1.0}
    assert "contamination" not in marked.items[1].details
    save_results(tmp_path, [marked])
    assert load_results(tmp_path)[0].measure("acc clean").value == values["acc clean"]


def test_task_without_found_items_has_only_a_note() -> None:
    task = quiz(6)
    result = evaluate(remembers(set()), [task])[0]
    marked = with_contamination(task, result, find_contaminated([task], [])["quiz"])
    assert marked.measures == result.measures and marked.notes == (
        "0 of 6 items were found in the training tokens",
    )


def write_model(folder: Path, texts: list[str]) -> None:
    tokenizer = Tokenizer.train(texts, 400)
    tokenizer.save(folder)
    made = [
        Document(f"d{n}", "s", f"{n}.txt", None, 0, text, len(text), None) for n, text in enumerate(texts)
    ]
    write_shards(made, tokenizer, folder / "tokens", "train")


def test_training_text_is_that_of_the_tokens(tmp_path: Path) -> None:
    texts = ["first text, with é\n", "second <|eos|> text"]
    (tmp_path / "tokens").mkdir()
    write_model(tmp_path, texts)
    found = training_text(str(tmp_path), Store(tmp_path / "store"))
    assert found.n_documents == 2
    assert [text for _, text in found.documents()] == texts
    assert [place for place, _ in found.documents()][1] == f"{tmp_path.name}: 1.txt"


def test_model_without_training_tokens_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match="has no training tokens among its ancestors"):
        training_text(str(tmp_path / "model"), Store(tmp_path / "store"))

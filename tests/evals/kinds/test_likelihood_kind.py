"""Likelihood of texts and continuations: each figure is a ratio of sums."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.support.evals.backend import FakeBackend, by_log_prob

from whorl.errors import WhorlError
from whorl.evals.model.requests import Request, Score, TextRequest
from whorl.evals.runner import evaluate
from whorl.evals.tasks.config import parse_task
from whorl.evals.tasks.task import make_task


def task(records: list[dict[str, Any]], **fields: Any) -> Any:
    given = {"name": "texts", "kind": "likelihood", "template": "{{ text }}"}
    return make_task(parse_task(given | fields, "texts.toml"), records)


def test_figures_are_ratios_of_sums() -> None:
    texts = ["a b", "\u00e9\u00e9\u00e9\u00e9 d e f"]  # 3 and 14 bytes, 3 and 10 characters, 2 and 4 words

    def answer(request: Request) -> Score:
        assert isinstance(request, TextRequest) and (request.window, request.stride) == (64, 16)
        n = 2 if request.text == "a b" else 5
        return Score((1,) * n, (-0.5 * n,) * n, False)

    made = task([{"text": t} for t in texts], options={"window": 64, "stride": 16})
    result = evaluate(FakeBackend(answer), [made])[0]
    nats = 2 * 1.0 + 5 * 2.5
    expected = {
        "bits_per_byte": nats / math.log(2) / 17, "bits_per_character": nats / math.log(2) / 13,
        "perplexity": math.exp(nats / 7), "word_perplexity": math.exp(nats / 6), "byte_perplexity": math.exp(nats / 17),
    }  # fmt: skip
    for name, value in expected.items():
        assert result.measure(name).value == pytest.approx(value), name
    assert result.outcomes == {"scored": 2}
    low, high = result.measure("perplexity").low, result.measure("perplexity").high
    assert low < expected["perplexity"] < high


def test_last_word_is_right_if_it_is_the_most_likely() -> None:
    records = [{"text": "he saw the sea"}, {"text": "she ate a pear"}]
    made = task(
        records, template="{{ text.rpartition(' ')[0] }}", options={"continuation": " {{ text.rpartition(' ')[2] }}"}
    )  # fmt: skip
    result = evaluate(by_log_prob({("he saw the", " sea"): -0.05, ("she ate a", " pear"): -2.0}), [made])[0]
    assert result.measure("acc").value == 0.5
    assert result.measure("item_perplexity").value == pytest.approx(math.exp(2.05 / 2))
    assert [item.outcome for item in result.items] == ["right", "wrong"] and result.items[1].gold == " pear"


def test_empty_text_is_refused() -> None:
    with pytest.raises(WhorlError, match="task texts, item '2': the scored text is empty"):
        task([{"text": "a"}, {"text": ""}])

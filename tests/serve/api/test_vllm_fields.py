"""Fields named as in vLLM: min_tokens, prompt_logprobs, structured_outputs; and dimensions of embeddings."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch


def complete(server: Any, **fields: Any) -> Any:
    body = {"model": "tiny", "prompt": "def ", "max_tokens": 20, "temperature": 0, **fields}
    return server.post("/v1/completions", json=body).json()


def chat(server: Any, **fields: Any) -> Any:
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 20, "temperature": 0, **fields}
    return server.post("/v1/chat/completions", json=body).json()


def test_min_tokens_delays_end_ids_and_stop_strings(server: Any) -> None:
    end = {str(i): 100 for i in server.api.models[0].chat_template.stop_ids}
    for send in (partial(complete, token_healing=False), chat):
        assert send(server, logit_bias=end)["usage"]["completion_tokens"] == 1
        found = send(server, logit_bias=end, min_tokens=5)
        assert found["usage"]["completion_tokens"] == 6 and found["choices"][0]["finish_reason"] == "stop"
    letters = {str(i): 60 for i in range(97, 123)}
    text = complete(server, logit_bias=letters, logprobs=0)["choices"][0]["text"]
    first = next(i for i in range(1, len(text)) if text[i] in text[:i])  # a letter that occurred before
    stop = text[first]
    assert complete(server, logit_bias=letters, stop=stop)["choices"][0]["text"] == text[: text.index(stop)]
    late = complete(server, logit_bias=letters, stop=stop, min_tokens=first)["choices"][0]["text"]
    assert late == text[:first] and stop in late


def test_prompt_logprobs_are_those_of_the_model(server: Any) -> None:
    served, model = server.api.models[0], server.api.worker.engine.model
    ids = [int(i) for i in (served.tokenizer.bos_id, *served.tokenizer.encode("return a + b"))]
    with torch.inference_mode():
        want = model.logits(model(torch.tensor([ids]))).log_softmax(-1)[0]
    (choice,) = complete(server, prompt=ids, prompt_logprobs=3, logprobs=1)["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None and len(rest) == len(ids) - 1
    for k, (i, entry) in enumerate(zip(ids[1:], rest, strict=True)):
        assert next(iter(entry)) == str(i) and len(entry) in (3, 4)
        assert entry[str(i)]["logprob"] == pytest.approx(float(want[k, i]), abs=1e-4)
        best = sorted((each["logprob"] for each in entry.values()), reverse=True)[:3]
        assert best == pytest.approx(want[k].topk(3).values.tolist(), abs=1e-4)
        ranks = sorted(each["rank"] for each in entry.values() if each["rank"])
        assert ranks[:3] == [1, 2, 3]
    assert all(len(top) <= 2 for top in choice["logprobs"]["top_logprobs"])  # `logprobs` keeps its own number
    whole = chat(server, prompt_logprobs=0, logprobs=True, top_logprobs=2)
    asked = served.chat_template.encode_prompt([{"role": "user", "content": "hello"}])
    assert [list(entry) for entry in whole["prompt_logprobs"][1:]] == [[str(i)] for i in asked[1:]]
    assert all(len(each["top_logprobs"]) == 2 for each in whole["choices"][0]["logprobs"]["content"])
    assert "prompt_logprobs" not in chat(server) and "prompt_logprobs" not in complete(server)["choices"][0]
    text = complete(server, prompt="    self.items", prompt_logprobs=0)["choices"][
        0
    ]  # no healing: all ids have scores
    assert len(text["prompt_logprobs"]) == len(served.tokenizer.encode_prompt("    self.items"))


@pytest.mark.parametrize("send", [complete, chat])
def test_structured_outputs_constrain_the_output(server: Any, send: Any) -> None:
    def text(**form: Any) -> str:
        (choice,) = send(server, structured_outputs=form, max_tokens=40)["choices"]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])

    choices = ['say "no"', "back\\slash\nand line", "日本", "a|b"]
    assert text(choice=choices) in choices
    for one in choices:
        assert text(choice=[one]) == one
    assert text(regex="[0-9]{4}").isdigit()
    assert text(grammar='start: "x" "y"+ "z"').startswith("xy")
    schema = {
        "type": "object",
        "properties": {"n": {"type": "boolean"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    for given in (schema, json.dumps(schema)):
        assert list(json.loads(text(json=given))) == ["n"]


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        ("completions", {"min_tokens": 21}, "min_tokens", "min_tokens is 21"),
        ("completions", {"prompt_logprobs": 1, "stream": True}, None, "prompt_logprobs: not with stream"),
        ("completions", {"prompt_logprobs": 21}, "prompt_logprobs", "20"),
        ("completions", {"structured_outputs": {}}, "structured_outputs", "give one of json"),
        (
            "completions",
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs",
            "give one of",
        ),
        ("completions", {"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs", "is empty"),
        ("completions", {"structured_outputs": {"rgex": "a"}}, "structured_outputs.rgex", "rgex"),
        ("completions", {"structured_outputs": {"json": "{"}}, None, "not valid JSON"),
        ("completions", {"structured_outputs": {"regex": "a"}, "regex": "b"}, "regex", "give one of them"),
        ("embeddings", {"dimensions": 1 << 20}, "dimensions", "have 32"),
        ("embeddings", {"dimensions": 0}, "dimensions", "1"),
    ],
)
def test_wrong_fields_are_named(server: Any, path: str, fields: Any, param: str | None, words: str) -> None:
    body = {"prompt": "x", "max_tokens": 20} if path == "completions" else {"input": "x"}
    answer = server.post(f"/v1/{path}", json={"model": "tiny", **body, **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400 and words in error["message"], error
    assert param is None or error["param"] == param


def test_dimensions_keep_the_first_numbers_as_a_unit_vector(server: Any) -> None:
    def embed(**fields: Any) -> Any:
        body = {"model": "tiny", "input": ["return a", "b"], **fields}
        return np.array(
            [each["embedding"] for each in server.post("/v1/embeddings", json=body).json()["data"]]
        )

    whole, part = embed(), embed(dimensions=5)
    want = whole[:, :5] / np.linalg.norm(whole[:, :5], axis=1, keepdims=True)
    assert part.shape == (2, 5) and part == pytest.approx(want, abs=1e-6)
    assert math.isclose(np.linalg.norm(part[0]), 1, abs_tol=1e-6)
    assert (embed(dimensions=whole.shape[1]) == whole).all()

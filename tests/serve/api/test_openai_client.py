"""OpenAI's client against a live server."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import openai
import pytest
import torch

from whorl.serve.worker.model_entry import mean_pooled_embedding

ASK: Any = [{"role": "user", "content": "hello"}]
LETTERS = {str(i): 50 for i in range(97, 123)}  # restricts the output to letters


@pytest.fixture
def client(server: Any) -> openai.OpenAI:
    return server.client()


def test_models_are_listed_and_found_by_alias(client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert card.id == "tiny" and card.model_extra is not None
    assert card.model_extra["whorl"] == {"chat": True, "template": "chatml"}
    assert client.models.retrieve("random/tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_completion_stream_equals_full_response(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "prompt": "def add", "max_tokens": 40, "temperature": 0.7, "seed": 7}
    whole = client.completions.create(**asked)
    parts = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(p.choices[0].text for p in parts[:-1]) == whole.choices[0].text
    assert parts[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    told = parts[-1]
    assert told.choices == [] and told.usage is not None and whole.usage is not None
    assert told.usage.completion_tokens == whole.usage.completion_tokens
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_chat_stream_equals_full_response(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": ASK, "max_completion_tokens": 30, "seed": 3, "n": 3}
    whole = client.chat.completions.create(**asked)
    texts, ends = ["", "", ""], {}
    for part in client.chat.completions.create(**asked, stream=True):
        (choice,) = part.choices
        texts[choice.index] += choice.delta.content or ""
        ends[choice.index] = choice.finish_reason or ends.get(choice.index)
    assert texts == [c.message.content for c in whole.choices]
    assert [ends[i] for i in range(3)] == [c.finish_reason for c in whole.choices]
    assert len(set(texts)) == 3  # each output has a separate seed
    one = client.chat.completions.create(**{**asked, "n": 1})
    assert one.choices[0].message.content == texts[0]


def test_chat_logprobs_match_the_model(server: Any, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=6, seed=1, temperature=0.5, logprobs=True, top_logprobs=4
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None and choice.logprobs.content
    served, engine = server.api.models[0], server.api.worker.engine
    ids = served.chat_template.encode_prompt([{"role": "user", "content": "hello"}])
    for entry in choice.logprobs.content:
        with torch.inference_mode():
            want = engine.model.logits(engine.model(torch.tensor([ids]))[:, -1])[0].log_softmax(-1)
        near = [i for i in range(served.vocab_size) if math.isclose(want[i], entry.logprob, abs_tol=1e-4)]
        assert near
        found = [i for i in near if _text(served, i) == entry.bytes]
        assert found
        want = want.clone()
        want[list(served.tokenizer.control_ids)] = -torch.inf  # never sampled
        best = want.topk(4).values.tolist()
        assert [t.logprob for t in entry.top_logprobs] == pytest.approx(best, abs=1e-4)
        ids.append(found[0])
    text = b"".join(bytes(e.bytes or ()) for e in choice.logprobs.content).decode("utf-8", "replace")
    assert text == choice.message.content


def _text(served: Any, i: int) -> list[int]:
    return [] if i >= served.tokenizer.n_ordinary else list(served.tokenizer.token_bytes[i])


def test_completion_echo_scores_the_prompt(server: Any, client: openai.OpenAI) -> None:
    served, model = server.api.models[0], server.api.worker.engine.model
    ids = [int(i) for i in (served.tokenizer.bos_id, *served.tokenizer.encode("return a + b"))]
    answer = client.completions.create(model="tiny", prompt=ids, max_tokens=0, echo=True, logprobs=1)
    (choice,) = answer.choices
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    with torch.inference_mode():
        want = model.logits(model(torch.tensor([ids]))).log_softmax(-1)[0]
    told: list[Any] = choice.logprobs.token_logprobs
    assert told[0] is None and len(told) == len(ids)
    assert told[1:] == pytest.approx([float(want[k, i]) for k, i in enumerate(ids[1:])], abs=1e-4)
    assert choice.text.endswith("return a + b")


def test_completion_text_offsets_with_token_healing(client: openai.OpenAI) -> None:
    for seed in range(8):
        answer = client.completions.create(
            model="tiny", prompt="    self.items", max_tokens=20, logprobs=2, seed=seed, logit_bias=LETTERS
        )
        (choice,) = answer.choices
        assert choice.logprobs is not None and choice.logprobs.tokens and choice.logprobs.text_offset
        assert "".join(choice.logprobs.tokens) == choice.text
        for token, at in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
            assert choice.text[at:].startswith(token)


def test_completion_many_prompts_best_of_and_stop(client: openai.OpenAI) -> None:
    every = client.completions.create(
        model="tiny", prompt=["def ", "class ", "    "], n=2, best_of=4, max_tokens=12, seed=5, logprobs=0
    )
    assert [c.index for c in every.choices] == list(range(6))

    def mean(choice: Any) -> float:
        return float(np.mean(choice.logprobs.token_logprobs))

    for p in range(3):
        assert mean(every.choices[2 * p]) >= mean(every.choices[2 * p + 1])
    asked: Any = {
        "model": "tiny", "prompt": "def ", "max_tokens": 60, "temperature": 0, "logit_bias": LETTERS,
    }  # fmt: skip
    text = client.completions.create(**asked).choices[0].text
    stop = text[5:8]
    cut = client.completions.create(**asked, stop=[stop, "never met"]).choices[0]
    assert cut.text == text[: text.index(stop)] and cut.finish_reason == "stop"


def test_usage_reports_cached_prompt_tokens(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "the very same words, " * 5}]
    seen = [
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=1).usage for _ in range(2)
    ]
    assert seen[1] is not None and seen[1].prompt_tokens_details is not None
    assert (seen[1].prompt_tokens_details.cached_tokens or 0) >= 32


def test_embeddings_are_unit_vectors_in_both_encodings(server: Any, client: openai.OpenAI) -> None:
    texts = ["return a + b", "class Stack"]
    found = client.embeddings.create(model="tiny", input=texts)  # the client requests base64
    plain = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    for one, same in zip(found.data, plain.data, strict=True):
        assert np.linalg.norm(one.embedding) == pytest.approx(1, abs=1e-5)
        assert one.embedding == pytest.approx(same.embedding, abs=1e-6)
    served = server.api.models[0]
    want = server.ask(lambda engine: mean_pooled_embedding(engine.model, served.encode_text(texts[1])))
    assert plain.data[1].embedding == pytest.approx(want, abs=1e-6)
    ids = client.embeddings.create(model="tiny", input=served.encode_text(texts[1]), encoding_format="float")
    assert ids.data[0].embedding == pytest.approx(want, abs=1e-6)


def test_responses_stream_equals_full_response(client: openai.OpenAI) -> None:
    whole = client.responses.create(
        model="tiny", input="hello", instructions="be brief", max_output_tokens=200
    )
    assert whole.output[0].type == "message" and whole.usage is not None
    assert whole.status == {True: "incomplete", False: "completed"}[whole.usage.output_tokens == 200]
    names, text = [], ""
    with client.responses.create(
        model="tiny", input=[{"role": "user", "content": "hello"}], max_output_tokens=8, stream=True
    ) as events:
        for n, event in enumerate(events):
            assert event.sequence_number == n
            names.append(event.type)
            if event.type == "response.output_text.delta":
                text += event.delta
            if event.type in ("response.completed", "response.incomplete"):
                assert event.response.output_text == text
    assert names[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert names[-1] in ("response.completed", "response.incomplete")


def test_tokenize_and_detokenize_round_trip(server: Any) -> None:
    text = "def add(a, b): <|im_end|>"
    told = server.post("/tokenize", json={"prompt": text}).json()
    assert told["count"] == len(told["tokens"]) and server.api.models[0].tokenizer.bos_id == told["tokens"][0]
    back = server.post("/detokenize", json={"tokens": told["tokens"][1:]}).json()
    assert back == {"prompt": text}
    chat = server.post("/tokenize", json={"messages": ASK}).json()
    assert chat["tokens"] == server.api.models[0].chat_template.encode_prompt(ASK)


def test_errors_map_to_client_exceptions(client: openai.OpenAI) -> None:
    ask: Any = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        ask(model="gpt-9", messages=ASK)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        ask(model="tiny", messages=ASK, temperature=-1)
    assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as unknown:
        ask(model="tiny", messages=ASK, extra_body={"temprature": 1})
    assert unknown.value.param == "temprature" and unknown.value.code == "unknown_parameter"
    with pytest.raises(openai.BadRequestError) as long:
        ask(model="tiny", messages=[{"role": "user", "content": "word " * 1000}])
    assert long.value.code == "context_length_exceeded"

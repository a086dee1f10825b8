"""OpenAI's client against a live server."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import openai
import pytest
import torch

from whorl.embedding.embedder import result_of
from whorl.serve.worker.model_entry import mean_pooled_embedding

ASK = [{"role": "user", "content": "hello"}]
LETTERS = {str(i): 50 for i in range(97, 123)}  # restricts the output to letters


@pytest.fixture
def client(server: Any) -> Any:
    return server.client()


@pytest.fixture
def complete(client: openai.OpenAI) -> Any:
    return partial(client.completions.create, model="tiny")


@pytest.fixture
def chat(client: openai.OpenAI) -> Any:
    return partial(client.chat.completions.create, model="tiny", messages=ASK)


def test_models_are_listed_and_found_by_alias(client: Any) -> None:
    (card,) = client.models.list().data
    assert card.id == "tiny" and card.model_extra["whorl"] == {"chat": True, "template": "chatml"}
    assert client.models.retrieve("random/tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_completion_stream_equals_full_response(complete: Any) -> None:
    complete = partial(complete, prompt="def add", max_tokens=40, temperature=0.7, seed=7)
    whole = complete()
    *parts, last = complete(stream=True, stream_options={"include_usage": True})
    assert "".join(p.choices[0].text for p in parts) == whole.choices[0].text
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.choices == [] and last.usage.completion_tokens == whole.usage.completion_tokens
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_chat_stream_equals_full_response(chat: Any) -> None:
    chat = partial(chat, max_completion_tokens=30, seed=3)
    whole = chat(n=3)
    texts, ends = ["", "", ""], {}
    for part in chat(n=3, stream=True):
        (choice,) = part.choices
        texts[choice.index] += choice.delta.content or ""
        ends[choice.index] = choice.finish_reason or ends.get(choice.index)
    assert texts == [c.message.content for c in whole.choices]
    assert [ends[i] for i in range(3)] == [c.finish_reason for c in whole.choices]
    assert len(set(texts)) == 3  # each output has a separate seed
    assert chat(n=1).choices[0].message.content == texts[0]


def test_chat_logprobs_match_the_model(server: Any, chat: Any) -> None:
    (choice,) = chat(max_tokens=6, seed=1, temperature=0.5, logprobs=True, top_logprobs=4).choices
    assert choice.logprobs.content
    served, engine = server.api.models[0], server.api.worker.engine
    ids = served.chat_template.encode_prompt(ASK)
    for entry in choice.logprobs.content:
        with torch.inference_mode():
            want = engine.model.logits(engine.model(torch.tensor([ids]))[:, -1])[0].log_softmax(-1)
        near = [i for i in range(served.vocab_size) if math.isclose(want[i], entry.logprob, abs_tol=1e-4)]
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


def test_completion_echo_scores_the_prompt(server: Any, complete: Any) -> None:
    served, model = server.api.models[0], server.api.worker.engine.model
    ids = [int(i) for i in (served.tokenizer.bos_id, *served.tokenizer.encode("return a + b"))]
    (choice,) = complete(prompt=ids, max_tokens=0, echo=True, logprobs=1).choices
    with torch.inference_mode():
        want = model.logits(model(torch.tensor([ids]))).log_softmax(-1)[0]
    first, *scores = choice.logprobs.token_logprobs
    assert first is None
    assert scores == pytest.approx([float(want[k, i]) for k, i in enumerate(ids[1:])], abs=1e-4)
    assert choice.text.endswith("return a + b")
    first, *best = choice.logprobs.top_logprobs
    assert first is None  # the others have the most likely token and the echoed one
    assert [max(top.values()) for top in best] == pytest.approx(want[:-1].amax(-1).tolist(), abs=1e-4)
    assert all(score in top.values() for score, top in zip(scores, best, strict=True))


def test_echoed_prompt_has_one_token_behind_it_even_if_it_stops(server: Any, complete: Any) -> None:
    served = server.api.models[0]
    ids = [int(i) for i in (served.tokenizer.bos_id, *served.tokenizer.encode("return a"))]
    end = {str(served.tokenizer.end_ids[0]): 100}
    fields: dict[str, Any] = {"prompt": ids, "max_tokens": 1, "logprobs": 1, "logit_bias": end}
    (choice,) = complete(echo=True, **fields).choices
    assert choice.finish_reason == "stop" and choice.text.endswith("return a")
    assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.tokens) == len(ids) + 1
    (bare,) = complete(**fields).choices
    assert bare.text == "" and bare.logprobs.tokens == []


def test_completion_text_offsets_with_token_healing(complete: Any) -> None:
    for seed in range(8):
        answer = complete(prompt="    self.items", max_tokens=20, logprobs=2, seed=seed, logit_bias=LETTERS)
        (choice,) = answer.choices
        assert choice.logprobs.tokens and "".join(choice.logprobs.tokens) == choice.text
        for token, at in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
            assert choice.text[at:].startswith(token)


def test_completion_many_prompts_best_of_and_stop(complete: Any) -> None:
    prompts = ["def ", "class ", "    "]
    every = complete(prompt=prompts, n=2, best_of=4, max_tokens=12, seed=5, logprobs=0).choices
    assert [c.index for c in every] == list(range(6))
    means = [float(np.mean(c.logprobs.token_logprobs)) for c in every]
    assert all(better >= worse for better, worse in zip(means[::2], means[1::2], strict=True))
    complete = partial(complete, prompt="def ", max_tokens=60, temperature=0, logit_bias=LETTERS)
    text = complete().choices[0].text
    stop = text[5:8]
    cut = complete(stop=[stop, "never met"]).choices[0]
    assert cut.text == text[: text.index(stop)] and cut.finish_reason == "stop"


def test_usage_reports_cached_prompt_tokens(chat: Any) -> None:
    messages = [{"role": "user", "content": "the very same words, " * 5}]
    _, second = (chat(messages=messages, max_tokens=1).usage for _ in range(2))
    assert second.prompt_tokens_details.cached_tokens >= 32


def test_embeddings_are_unit_vectors_in_both_encodings(server: Any, client: Any) -> None:
    texts, embed = ["return a + b", "class Stack"], partial(client.embeddings.create, model="tiny")
    found = embed(input=texts)  # the client requests base64
    plain = embed(input=texts, encoding_format="float")
    for one, same in zip(found.data, plain.data, strict=True):
        assert np.linalg.norm(one.embedding) == pytest.approx(1, abs=1e-5)
        assert one.embedding == pytest.approx(same.embedding, abs=1e-6)
    ids = server.api.models[0].tokenizer.encode_to_list(texts[1])
    want = server.ask(lambda engine: result_of(mean_pooled_embedding(engine.model, ids)))
    from_ids = embed(input=ids, encoding_format="float")
    for same in (plain.data[1], from_ids.data[0]):
        assert same.embedding == pytest.approx(want, abs=1e-6)


def test_responses_stream_equals_full_response(client: Any) -> None:
    respond = partial(client.responses.create, model="tiny")
    whole = respond(input="hello", instructions="be brief", max_output_tokens=200)
    assert whole.output[0].type == "message"
    assert whole.status == ("incomplete" if whole.usage.output_tokens == 200 else "completed")
    with respond(input=ASK, max_output_tokens=8, stream=True) as stream:
        events = list(stream)
    names = [event.type.removeprefix("response.") for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert names[-1] in ("completed", "incomplete")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[-1].response.output_text == text


def test_tokenize_and_detokenize_round_trip(server: Any) -> None:
    served, text = server.api.models[0], "def add(a, b): <|im_end|>"
    found = server.post("/tokenize", json={"prompt": text}).json()
    assert found["count"] == len(found["tokens"]) and served.tokenizer.bos_id == found["tokens"][0]
    back = server.post("/detokenize", json={"tokens": found["tokens"][1:]}).json()
    assert back == {"prompt": text}
    chat = server.post("/tokenize", json={"messages": ASK}).json()
    assert chat["tokens"] == served.chat_template.encode_prompt(ASK)


LONG = [{"role": "user", "content": "word " * 1000}]


@pytest.mark.parametrize(
    ("fields", "error", "expected"),
    [
        ({"model": "gpt-9"}, openai.NotFoundError, ("model_not_found", "model")),
        ({"temperature": -1}, openai.BadRequestError, ("invalid_value", "temperature")),
        ({"extra_body": {"temprature": 1}}, openai.BadRequestError, ("unknown_parameter", "temprature")),
        ({"messages": LONG}, openai.BadRequestError, ("context_length_exceeded", "messages")),
    ],
)
def test_errors_map_to_client_exceptions(chat: Any, fields: Any, error: Any, expected: Any) -> None:
    with pytest.raises(error) as found:
        chat(**fields)
    assert (found.value.code, found.value.param) == expected
    assert found.value.type == "invalid_request_error"

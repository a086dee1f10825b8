"""POST /v1/embeddings, /tokenize and /detokenize: endpoints without generation, so no sequence is scheduled.

The embedding of a language model is the mean of its last hidden states (`mean_pooled_embedding`); an embedder model is
trained for the task. Both are unit vectors. They are computed in the engine thread, in pieces between its steps, and
streams meanwhile keep half of their speed (`EngineWorker.compute`). Requests of several clients take turns after each text.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import Request as HttpRequest
from starlette.responses import Response

from whorl.serve.api.protocol import MAX_TEXTS, DetokenizeRequest, EmbeddingsRequest, TokenizeRequest
from whorl.serve.api.request_parsing import (
    check_ids,
    check_length,
    template_kwargs,
    template_messages,
    template_tools,
)
from whorl.serve.api.sse import JsonPieces, encode_json, run_until_disconnect
from whorl.serve.app_state import AppState, client_id, in_thread_if_large, rate_limit_headers
from whorl.serve.errors import ApiError, OrjsonResponse
from whorl.serve.worker.model_entry import ServedEmbedder, ServedModel


async def create_embeddings(state: AppState, body: EmbeddingsRequest, http: HttpRequest) -> Response:
    """Return embeddings of the input texts."""
    model = state.find_model(body.model)
    if model.embed is None:
        raise ApiError(
            400, f"the model {model.name!r} has no embeddings", param="model", code="not_supported"
        )

    async def work() -> dict[str, Any]:
        vectors = [
            _cut(await _embed_ids(state, model, ids, client_id(http)), body.dimensions) for ids in texts
        ]
        data = [
            {"object": "embedding", "index": i, "embedding": _encode_vector(vector, body.encoding_format)}
            for i, vector in enumerate(vectors)
        ]
        used = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        return {"object": "list", "data": data, "model": model.name, "usage": used}

    with state.embedding_place(http):
        texts = await in_thread_if_large(http, lambda: _input_ids(body.input, model))
        n_tokens = sum(map(len, texts))
        state.charge_rate_limit(http, n_tokens)
        content = await run_until_disconnect(http, work(), lambda: None)
    return OrjsonResponse(content, headers=rate_limit_headers(http))


async def tokenize(state: AppState, body: TokenizeRequest, http: HttpRequest) -> Response:
    """Return the ids of a prompt, or of a conversation."""
    state.charge_rate_limit(http, 0)
    model = state.find_model(body.model)
    ids = await in_thread_if_large(http, lambda: _prompt_ids(state, body, model))
    content = {"tokens": ids, "count": len(ids), "max_model_len": model.max_model_len}
    return JsonPieces(await encode_json(len(ids), lambda: content), state.config.stall_seconds, {})


async def detokenize(state: AppState, body: DetokenizeRequest, http: HttpRequest) -> Response:
    """Return the text of ids; bytes that are not UTF-8 become U+FFFD."""
    state.charge_rate_limit(http, 0)
    model = state.find_model(body.model)

    def decode() -> str:
        if body.tokens:
            check_ids(body.tokens, model.tokenizer.vocab_size, "tokens")
        return model.tokenizer.decode(body.tokens).decode("utf-8", "replace")

    content = {"prompt": await in_thread_if_large(http, decode)}
    return JsonPieces(await encode_json(len(body.tokens), lambda: content), state.config.stall_seconds, {})


def _prompt_ids(state: AppState, body: TokenizeRequest, model: ServedModel | ServedEmbedder) -> list[int]:
    if body.messages is not None:
        template = state.generation_model(body.model).chat_template
        return template.encode_prompt(
            template_messages(body.messages), template_tools(body.tools or []),
            add_generation_prompt=body.add_generation_prompt, variables=template_kwargs(body.chat_template_kwargs),
        )  # fmt: skip
    text = body.prompt or ""
    return (
        model.tokenizer.encode_prompt(text)
        if isinstance(model, ServedModel)
        else model.tokenizer.encode_to_list(text)
    )


def _input_ids(given: Any, model: ServedModel | ServedEmbedder) -> list[list[int]]:
    """Return the ids of each text.

    Raises:
        ApiError: a text is empty, too long, or has an unknown id.
    """
    texts = [
        model.tokenizer.encode_to_list(text) if isinstance(text, str) else text for text in _input_list(given)
    ]
    for ids in texts:
        check_ids(
            ids, model.vocab_size if isinstance(model, ServedModel) else model.tokenizer.vocab_size, "input"
        )
        check_length(ids, model.max_model_len if isinstance(model, ServedModel) else len(ids), "input")
    return texts


async def _embed_ids(
    state: AppState, model: ServedModel | ServedEmbedder, ids: Sequence[int], client: str
) -> list[float]:
    assert model.embed is not None
    return await state.worker.compute(client, model.embed(ids))


def _cut(vector: list[float], dimensions: int | None) -> list[float]:
    """Return the first numbers of an embedding, as a unit vector. Raises ApiError: it has fewer."""
    if dimensions is None or dimensions == len(vector):
        return vector
    if dimensions > len(vector):
        message = f"dimensions is {dimensions:,}; this model's embeddings have {len(vector):,}"
        raise ApiError(400, message, param="dimensions", code="invalid_value")
    part = np.asarray(vector[:dimensions])
    cut: list[float] = (part / max(np.linalg.norm(part), 1e-12)).tolist()
    return cut


def _encode_vector(vector: list[float], form: str | None) -> list[float] | str:
    if form == "base64":
        return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()
    return vector


def _input_list(given: Any) -> list[str | list[int]]:
    texts = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if not texts:
        raise ApiError(400, "input is empty", param="input", code="invalid_value")
    if len(texts) > MAX_TEXTS:
        raise ApiError(400, f"input: {len(texts):,} texts; {MAX_TEXTS} at most", param="input")
    for number, text in enumerate(texts):
        if not text:
            raise ApiError(400, f"input: text {number} is empty", param="input", code="invalid_value")
    return list(texts)

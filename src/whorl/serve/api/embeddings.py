"""/v1/embeddings, /tokenize and /detokenize: no answer is written, so no sequence is scheduled.

Vectors of a language model are the mean of its last hidden states (`served.mean_pooled`); those of the house's embedder are
what it was trained for. Both are unit vectors, and both are computed in the engine's thread, a text at a time between two
steps: whoever is being answered waits for one text, not for a thousand.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import Request as HttpRequest
from starlette.responses import Response

from whorl.serve.api.protocol import DetokenizeRequest, EmbeddingsRequest, TokenizeRequest
from whorl.serve.api.request_parsing import check_ids, check_length, conversation
from whorl.serve.api.sse import while_there
from whorl.serve.app_state import Api, aside, headers
from whorl.serve.errors import ApiError, Json
from whorl.serve.worker.model_entry import Served, ServedEmbedder

MOST_TEXTS = 2048


async def embed(api: Api, body: EmbeddingsRequest, http: HttpRequest) -> Response:
    """Vectors of texts."""
    model = api.find(body.model)
    if model.vector is None:
        raise ApiError(
            400, f"the model {model.name!r} makes no embeddings", param="model", code="not_supported"
        )
    given = _several(body.input)
    size = sum(len(text) for text in given)
    texts = await aside(size, lambda: [model.plain(t) if isinstance(t, str) else t for t in given])
    for ids in texts:
        check_ids(ids, model.vocab_size if isinstance(model, Served) else model.tokenizer.vocab_size, "input")
        check_length(ids, model.context if isinstance(model, Served) else len(ids), "input")
    n_tokens = sum(map(len, texts))
    api.charge(http, n_tokens)

    async def work() -> dict[str, Any]:
        vectors = [await _vector(api, model, ids) for ids in texts]
        data = [
            {"object": "embedding", "index": i, "embedding": _written(vector, body.encoding_format)}
            for i, vector in enumerate(vectors)
        ]
        used = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        return {"object": "list", "data": data, "model": model.name, "usage": used}

    return Json(await while_there(http, work(), lambda: None), headers=headers(http))


async def tokenize(api: Api, body: TokenizeRequest) -> Response:
    """Ids of a text as a prompt, or of a conversation."""
    model = api.find(body.model)
    if body.messages is not None:
        writer, messages = api.writer(body.model), conversation(body.messages)
        ids = await aside(
            sum(len(m.text) for m in body.messages),
            lambda: writer.chat.prompt(messages, add_generation_prompt=body.add_generation_prompt),
        )
    else:
        text = body.prompt or ""
        ids = await aside(
            len(text), lambda: model.whole(text) if isinstance(model, Served) else model.plain(text)
        )
    return Json({"tokens": ids, "count": len(ids), "max_model_len": model.context})


async def detokenize(api: Api, body: DetokenizeRequest) -> Response:
    """The text of ids; bytes that are no text become U+FFFD."""
    model = api.find(body.model)
    if body.tokens:
        check_ids(body.tokens, model.tokenizer.vocab_size, "tokens")
    return Json({"prompt": model.tokenizer.decode(body.tokens).decode("utf-8", "replace")})


async def _vector(api: Api, model: Served | ServedEmbedder, ids: Sequence[int]) -> list[float]:
    vector = model.vector
    assert vector is not None
    return await api.worker.call(lambda engine: vector(ids))


def _written(vector: list[float], form: str | None) -> list[float] | str:
    if form == "base64":
        return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()
    return vector


def _several(given: Any) -> list[str | list[int]]:
    texts = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if not texts:
        raise ApiError(400, "input is empty", param="input", code="invalid_value")
    if len(texts) > MOST_TEXTS:
        raise ApiError(400, f"input: {len(texts):,} texts; {MOST_TEXTS} at most", param="input")
    for number, text in enumerate(texts):
        if not text:
            raise ApiError(400, f"input: text {number} is empty", param="input", code="invalid_value")
    return list(texts)

"""POST /v1/completions: a full response or a stream of chunks.

The body becomes engine requests (`request_parsing.py`), the engine admits or rejects them (`AppState.submit`), and their
streams are read to the end or forwarded as events. The streams are closed in every case.

best_of: of the sequences of one prompt, the n with the highest mean log-probability per token are returned. The
log-probabilities are the model's own, before temperature and filters.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, NamedTuple

from fastapi import Request as HttpRequest
from starlette.responses import Response

from whorl.serve.api.kept_completion import KeptCompletion, choose_model
from whorl.serve.api.protocol import CompletionRequest
from whorl.serve.api.request_parsing import ParsedRequest, parse_completion
from whorl.serve.api.response_formatting import (
    CompletionLogprobs,
    StreamDecoder,
    TextDelta,
    close_all,
    concat_logprobs,
    merge_streams,
    n_logprobs,
    prompt_logprobs,
    response_head,
    usage,
)
from whorl.serve.api.sources import add_sources
from whorl.serve.api.sse import DONE, EventStream, JsonPieces, encode_json, format_event, run_until_disconnect
from whorl.serve.app_state import AppState, client_id, rate_limit_headers
from whorl.serve.errors import ApiError
from whorl.serve.worker.model_entry import ServedModel
from whorl.tokens.hf_tokenizer import AnyTokenizer


class ResponseForm(NamedTuple):
    """How an endpoint writes responses: the start of ids, the field `object`, and the choices, whole or in chunks."""

    prefix: str
    kind: str
    chunk_kind: str
    choices: Callable[[ParsedRequest, AnyTokenizer, Sequence[TextDelta]], Iterator[dict[str, Any]]]
    chunks: Callable[[ParsedRequest, Sequence[StreamDecoder]], AsyncIterator[dict[str, Any]]]


async def create_completion(state: AppState, body: CompletionRequest, http: HttpRequest) -> Response:
    """Return continuations of one or several prompts."""
    served, kept = choose_model(state, body, http)
    body, parsed, sources = await add_sources(
        state, body, served, http, lambda body: parse_completion(body, served, state.config, client_id(http))
    )
    if kept is not None:
        if len(parsed.prompts) > 1 or parsed.best_of > parsed.n:
            raise ApiError(400, "store: only with one prompt and without best_of", param="store")
        kept.prompt = parsed.prompts[0].text.decode("utf-8", "replace")
    return await respond(state, http, served, parsed, COMPLETION, bool(body.stream), kept, sources)


async def respond(
    state: AppState,
    http: HttpRequest,
    served: ServedModel,
    parsed: ParsedRequest,
    form: ResponseForm,
    in_chunks: bool,
    kept: KeptCompletion | None = None,
    sources: Sequence[dict[str, Any]] = (),
) -> Response:
    """Generate, and return the whole choices or a stream of chunks.

    kept: log them, and add a token for feedback. sources: those of the prompt, for the response or its first chunk.
    """
    streams = await state.submit(parsed.requests, http, parsed.n_prompt_tokens)
    readers = [StreamDecoder(s, served.tokenizer) for s in streams]
    head = response_head(form.prefix, form.chunk_kind if in_chunks else form.kind, served)

    def counts() -> dict[str, Any]:
        return usage(streams, parsed.n_prompt_tokens, parsed.best_of)

    async def events() -> AsyncIterator[bytes]:
        extra = {"usage": None} if parsed.include_usage else {}  # null in all chunks but the last
        running, of_prompt = len(readers), {"sources": sources} if sources else {}
        async for choice in form.chunks(parsed, readers):
            running -= choice["finish_reason"] is not None
            given = {} if running or kept is None else await kept.append(head["id"], readers)
            yield format_event({**head, "choices": [choice], **extra, **given, **of_prompt})
            of_prompt = {}
        if extra:
            yield format_event({**head, "choices": [], "usage": counts()})
        yield DONE

    async def work() -> list[bytes]:
        outputs = [await reader.read_all() for reader in readers]
        whole = dict[str, Any]() if kept is None else await kept.append(head["id"], readers)
        whole |= {"sources": sources} if sources else {}
        if form is not COMPLETION and parsed.n_prompt_top is not None:  # a conversation has one prompt
            whole["prompt_logprobs"] = _prompt_logprobs(parsed, 0, served.tokenizer, outputs[0])
        return await encode_json(
            sum(n_logprobs(output) for output in outputs),
            lambda: {
                **head,
                "choices": form.choices(parsed, served.tokenizer, outputs),
                "usage": counts(),
                **whole,
            },
        )

    if in_chunks:
        return EventStream(events(), close_all(streams), state.config.stall_seconds, rate_limit_headers(http))
    pieces = await run_until_disconnect(http, work(), close_all(streams))
    return JsonPieces(pieces or [], state.config.stall_seconds, rate_limit_headers(http))


def _completion_choices(
    parsed: ParsedRequest, tokenizer: AnyTokenizer, outputs: Sequence[TextDelta]
) -> Iterator[dict[str, Any]]:
    """Yield the choices of all prompts, one by one: with log-probabilities each may have megabytes."""
    index = 0
    for p in range(len(parsed.prompts)):
        own: Sequence[TextDelta] = outputs[p * parsed.best_of : (p + 1) * parsed.best_of]
        if parsed.best_of > parsed.n:
            own = sorted(own, key=_mean_log_prob, reverse=True)[: parsed.n]
        for delta in own:
            yield _completion_choice(parsed, p, delta, tokenizer) | {"index": index}
            index += 1


async def _completion_chunks(
    parsed: ParsedRequest, readers: Sequence[StreamDecoder]
) -> AsyncIterator[dict[str, Any]]:
    scores = [
        CompletionLogprobs(reader.tokenizer, parsed.n_top or 0, len(_echo_text(parsed, i)))
        for i, reader in enumerate(readers)
    ]
    begun = [False] * len(readers)
    async for index, delta in merge_streams(readers):
        prompt = parsed.prompts[index // parsed.best_of]
        text, tokens = ("", []) if parsed.no_output else (delta.text, delta.tokens)
        log_probs = None
        if parsed.n_top is not None:
            log_probs = scores[index].output_logprobs(tokens, delta.prompt_bytes)
        if not begun[index] and parsed.echo:
            text = _echo_text(parsed, index) + text
            if log_probs is not None:
                before = CompletionLogprobs(readers[index].tokenizer, parsed.n_top or 0)
                of_prompt = await asyncio.to_thread(before.prompt_logprobs, prompt.ids, delta)
                log_probs = concat_logprobs(of_prompt, log_probs)
        begun[index] = True
        if not text and not tokens and delta.finish is None:
            continue
        yield {"index": index, "text": text, "logprobs": log_probs, "finish_reason": delta.finish}


def _completion_choice(
    parsed: ParsedRequest, number: int, delta: TextDelta, tokenizer: AnyTokenizer
) -> dict[str, Any]:
    prompt = parsed.prompts[number]
    text, tokens = ("", []) if parsed.no_output else (delta.text, delta.tokens)
    echo = _echo_text(parsed, number * parsed.best_of)
    log_probs = None
    if parsed.n_top is not None:
        scores = CompletionLogprobs(tokenizer, parsed.n_top)
        if parsed.echo:
            before = scores.prompt_logprobs(prompt.ids, delta)
            # With the stop token: clients that score a prompt expect one token behind it for max_tokens=1.
            end = [delta.end_token] if delta.end_token is not None and not parsed.no_output else []
            log_probs = concat_logprobs(before, scores.output_logprobs([*tokens, *end], delta.prompt_bytes))
        else:
            log_probs = scores.output_logprobs(tokens, delta.prompt_bytes)
    finish = "length" if parsed.no_output else delta.finish
    choice = {"index": 0, "text": echo + text, "logprobs": log_probs, "finish_reason": finish}
    if parsed.n_prompt_top is not None:
        choice["prompt_logprobs"] = _prompt_logprobs(parsed, number, tokenizer, delta)
    return choice


def _prompt_logprobs(parsed: ParsedRequest, number: int, tokenizer: AnyTokenizer, delta: TextDelta) -> Any:
    return prompt_logprobs(parsed.prompts[number].ids, delta, parsed.n_prompt_top or 0, tokenizer)


def _echo_text(parsed: ParsedRequest, index: int) -> str:
    return parsed.prompts[index // parsed.best_of].text.decode("utf-8", "replace") if parsed.echo else ""


def _mean_log_prob(delta: TextDelta) -> float:
    """Return the mean log-probability per token."""
    return sum(t.raw_log_prob for t in delta.tokens) / max(1, len(delta.tokens))


COMPLETION = ResponseForm(
    "cmpl", "text_completion", "text_completion", _completion_choices, _completion_chunks
)

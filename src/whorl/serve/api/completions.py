"""POST /v1/completions: a full response or a stream of chunks.

The body becomes engine requests (`request_parsing.py`), the engine admits or rejects them (`AppState.submit`), and their
streams are read to the end or forwarded as events. The streams are closed in every case.

best_of: of the sequences of one prompt, the n with the highest mean log-probability per token are returned. The
log-probabilities are the model's own, before temperature and filters.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import Request as HttpRequest
from starlette.responses import Response

from whorl.serve.api.protocol import CompletionRequest
from whorl.serve.api.request_parsing import ParsedRequest, parse_completion
from whorl.serve.api.response_formatting import (
    CompletionLogprobs,
    StreamDecoder,
    TextDelta,
    close_all,
    concat_logprobs,
    merge_streams,
    response_head,
    usage,
    usage_field,
)
from whorl.serve.api.sse import DONE, EventStream, format_event, run_until_disconnect
from whorl.serve.app_state import AppState, client_id, in_thread_if_large, rate_limit_headers
from whorl.serve.errors import OrjsonResponse
from whorl.serve.worker.model_entry import ServedModel
from whorl.serve.worker.worker import Stream


async def create_completion(api: AppState, body: CompletionRequest, http: HttpRequest) -> Response:
    """A text goes on."""
    served = api.generation_model(body.model)
    asked = await in_thread_if_large(
        _prompt_chars(body.prompt),
        lambda: parse_completion(body, served, api.config, client_id(http)),
    )
    streams = await api.submit(asked.requests, http, asked.n_prompt_tokens)
    readers = [StreamDecoder(s, served.tokenizer) for s in streams]
    head = response_head("cmpl", "text_completion", served)
    if body.stream:
        events = _completion_events(body, served, asked, streams, readers, head)
        return EventStream(events, close_all(streams), api.config.stall_seconds, rate_limit_headers(http))

    async def work() -> dict[str, Any]:
        pieces = [await reader.read_all() for reader in readers]
        choices = []
        for p in range(len(asked.prompts)):
            own = pieces[p * asked.best_of : (p + 1) * asked.best_of]
            if asked.best_of > asked.n:
                own = sorted(own, key=_mean_log_prob, reverse=True)[: asked.n]
            choices += [_completion_choice(body, served, asked, p, piece) for piece in own]
        for index, choice in enumerate(choices):
            choice["index"] = index
        return {**head, "choices": choices, "usage": usage(streams, asked.n_prompt_tokens, asked.best_of)}

    return OrjsonResponse(
        await run_until_disconnect(http, work(), close_all(streams)), headers=rate_limit_headers(http)
    )


async def _completion_events(
    body: CompletionRequest,
    served: ServedModel,
    asked: ParsedRequest,
    streams: Sequence[Stream],
    readers: Sequence[StreamDecoder],
    head: dict[str, Any],
) -> AsyncIterator[bytes]:
    extra, chunk = usage_field(body), dict(head)
    offsets = [len(_echo_text(body, asked, i)) for i in range(len(readers))]
    scores = [CompletionLogprobs(served.tokenizer, body.logprobs or 0, offset) for offset in offsets]
    begun = [False] * len(readers)
    async for index, piece in merge_streams(readers):
        prompt = asked.prompts[index // asked.best_of]
        text = piece.text if body.max_tokens != 0 else ""
        tokens = piece.tokens if body.max_tokens != 0 else []
        log_probs = None
        if body.logprobs is not None:
            log_probs = scores[index].output_logprobs(tokens, piece.prompt_bytes)
        if not begun[index] and body.echo:
            text = _echo_text(body, asked, index) + text
            if log_probs is not None:
                before = CompletionLogprobs(served.tokenizer, body.logprobs or 0)
                log_probs = concat_logprobs(
                    before.prompt_logprobs(prompt.ids, piece.prompt_log_probs), log_probs
                )
        begun[index] = True
        if not text and not tokens and piece.finish is None:
            continue
        choice = {"index": index, "text": text, "logprobs": log_probs, "finish_reason": piece.finish}
        yield format_event({**chunk, "choices": [choice], **extra})
    if extra:
        yield format_event(
            {**chunk, "choices": [], "usage": usage(streams, asked.n_prompt_tokens, asked.best_of)}
        )
    yield DONE


def _completion_choice(
    body: CompletionRequest, served: ServedModel, asked: ParsedRequest, number: int, piece: TextDelta
) -> dict[str, Any]:
    prompt = asked.prompts[number]
    text, tokens = (piece.text, piece.tokens) if body.max_tokens != 0 else ("", [])
    echo = _echo_text(body, asked, number * asked.best_of)
    log_probs = None
    if body.logprobs is not None:
        scores = CompletionLogprobs(served.tokenizer, body.logprobs)
        if body.echo:
            before = scores.prompt_logprobs(prompt.ids, piece.prompt_log_probs)
            log_probs = concat_logprobs(before, scores.output_logprobs(tokens, piece.prompt_bytes))
        else:
            log_probs = scores.output_logprobs(tokens, piece.prompt_bytes)
    finish = piece.finish if body.max_tokens != 0 else "length"
    return {"index": 0, "text": echo + text, "logprobs": log_probs, "finish_reason": finish}


def _echo_text(body: CompletionRequest, asked: ParsedRequest, index: int) -> str:
    return asked.prompts[index // asked.best_of].text.decode("utf-8", "replace") if body.echo else ""


def _mean_log_prob(piece: TextDelta) -> float:
    """Mean log-probability a token."""
    return sum(t.raw_log_prob for t in piece.tokens) / max(1, len(piece.tokens))


def _prompt_chars(prompt: Any) -> int:
    return len(prompt) if isinstance(prompt, str) else sum(len(p) for p in prompt if isinstance(p, str))

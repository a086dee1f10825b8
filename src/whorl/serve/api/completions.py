"""/v1/completions and /v1/chat/completions: one request, whole or as it comes.

Both go the same way: the body becomes sequences (`requests.py`), the engine takes them or says why not (`Api.begin`), their
readers are read to the end or streamed, and whatever happens the streams are closed. What differs is how an answer looks.

best_of: of several sequences to a prompt those with the highest mean log-probability a token (the model's own) are told.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import Request as HttpRequest
from starlette.responses import Response

from whorl.serve.api import request_parsing as requests
from whorl.serve.api.protocol import ChatRequest, CompletionRequest, GenerationRequest, ToolChoice
from whorl.serve.api.request_parsing import ParsedRequest
from whorl.serve.api.response_formatting import (
    CompletionLogprobs,
    StreamDecoder,
    TextDelta,
    chat_log_probs,
    concat_logprobs,
    merge_streams,
    usage,
)
from whorl.serve.api.sse import DONE, EventStream, format_event, run_until_disconnect
from whorl.serve.api.tools import ParsedToolCall, ToolCallParser
from whorl.serve.app_state import AppState, client_id, in_thread_if_large, rate_limit_headers
from whorl.serve.errors import OrjsonResponse
from whorl.serve.worker.model_entry import ServedModel
from whorl.serve.worker.worker import Stream


async def create_completion(api: AppState, body: CompletionRequest, http: HttpRequest) -> Response:
    """A text goes on."""
    served = api.generation_model(body.model)
    asked = await in_thread_if_large(
        _prompt_chars(body.prompt),
        lambda: requests.parse_completion(body, served, api.config, client_id(http)),
    )
    streams = await api.submit(asked.requests, http, asked.n_prompt_tokens)
    readers = [StreamDecoder(s, served.tokenizer) for s in streams]
    head = _response_head("cmpl", "text_completion", served)
    if body.stream:
        events = _completion_events(body, served, asked, streams, readers, head)
        return EventStream(events, _close_all(streams), api.config.stall_seconds, rate_limit_headers(http))

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
        await run_until_disconnect(http, work(), _close_all(streams)), headers=rate_limit_headers(http)
    )


async def create_chat_completion(api: AppState, body: ChatRequest, http: HttpRequest) -> Response:
    """The next turn of a conversation."""
    served = api.generation_model(body.model)
    size = sum(len(message.text) for message in body.messages)
    asked = await in_thread_if_large(
        size, lambda: requests.parse_chat(body, served, api.config, client_id(http))
    )
    streams = await api.submit(asked.requests, http, asked.n_prompt_tokens)
    readers = [StreamDecoder(s, served.tokenizer) for s in streams]
    head = _response_head("chatcmpl", "chat.completion", served)
    if body.stream:
        head["object"] = "chat.completion.chunk"
        events = _chat_events(body, served, asked, streams, readers, head)
        return EventStream(events, _close_all(streams), api.config.stall_seconds, rate_limit_headers(http))

    async def work() -> dict[str, Any]:
        choices = []
        for index, reader in enumerate(readers):
            piece = await reader.read_all()
            text, calls = _extract_tool_calls(body, piece)
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if calls:
                message |= {"content": text or None, "tool_calls": [call.message for call in calls]}
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": _chat_logprobs(body, served, piece),
                    "finish_reason": "tool_calls" if calls else piece.finish,
                }
            )
        return {**head, "choices": choices, "usage": usage(streams, asked.n_prompt_tokens, asked.best_of)}

    return OrjsonResponse(
        await run_until_disconnect(http, work(), _close_all(streams)), headers=rate_limit_headers(http)
    )


async def _completion_events(
    body: CompletionRequest,
    served: ServedModel,
    asked: ParsedRequest,
    streams: Sequence[Stream],
    readers: Sequence[StreamDecoder],
    head: dict[str, Any],
) -> AsyncIterator[bytes]:
    extra, chunk = _usage_fields(body), dict(head)
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


async def _chat_events(
    body: ChatRequest,
    served: ServedModel,
    asked: ParsedRequest,
    streams: Sequence[Stream],
    readers: Sequence[StreamDecoder],
    head: dict[str, Any],
) -> AsyncIterator[bytes]:
    extra = _usage_fields(body)

    def chunk(index: int, delta: dict[str, Any], scores: Any = None, finish: str | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": scores, "finish_reason": finish}
        return format_event({**head, "choices": [choice], **extra})

    parsers = [_tool_call_parser(body) for _ in readers]
    n_calls = [0] * len(readers)
    for index in range(len(readers)):
        yield chunk(index, {"role": "assistant", "content": "", "refusal": None})
    async for index, piece in merge_streams(readers):
        parser, text, calls = parsers[index], piece.text, list[ParsedToolCall]()
        if parser is not None:
            text, calls = parser.feed(text)
            if piece.finish is not None:
                rest, last = parser.finish()
                text, calls = text + rest, [*calls, *last]
        scores = _chat_logprobs(body, served, piece)
        if text or (scores and scores["content"]):
            yield chunk(index, {"content": text}, scores)
        for call in calls[: 1 - n_calls[index]] if body.parallel_tool_calls is False else calls:
            yield chunk(index, {"tool_calls": [{"index": n_calls[index], **call.message}]})
            n_calls[index] += 1
        if piece.finish is not None:
            yield chunk(index, {}, None, "tool_calls" if n_calls[index] else piece.finish)
    if extra:
        yield format_event(
            {**head, "choices": [], "usage": usage(streams, asked.n_prompt_tokens, asked.best_of)}
        )
    yield DONE


def _extract_tool_calls(body: ChatRequest, piece: TextDelta) -> tuple[str, list[ParsedToolCall]]:
    """(text, calls) of a whole answer."""
    parser = _tool_call_parser(body)
    if parser is None:
        return piece.text, []
    text, calls = parser.feed(piece.text)
    rest, last = parser.finish()
    calls = [*calls, *last]
    return text + rest, calls[:1] if body.parallel_tool_calls is False else calls


def _tool_call_parser(body: ChatRequest) -> ToolCallParser | None:
    """What finds calls in the answer, or None where none are looked for."""
    if not body.tools or body.tool_choice == "none":
        return None
    return ToolCallParser(forced=body.tool_choice == "required" or isinstance(body.tool_choice, ToolChoice))


def _chat_logprobs(body: ChatRequest, served: ServedModel, piece: TextDelta) -> dict[str, Any] | None:
    if not body.logprobs:
        return None
    return {"content": chat_log_probs(piece.tokens, served.tokenizer), "refusal": None}


def _echo_text(body: CompletionRequest, asked: ParsedRequest, index: int) -> str:
    return asked.prompts[index // asked.best_of].text.decode("utf-8", "replace") if body.echo else ""


def _mean_log_prob(piece: TextDelta) -> float:
    """Mean log-probability a token."""
    return sum(t.raw_log_prob for t in piece.tokens) / max(1, len(piece.tokens))


def _response_head(prefix: str, kind: str, served: ServedModel) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": served.name,
        "system_fingerprint": None,
    }


def _usage_fields(body: GenerationRequest) -> dict[str, Any]:
    """What every chunk but the last says of usage, where it was asked for."""
    wanted = body.stream_options is not None and body.stream_options.include_usage
    return {"usage": None} if wanted else {}


def _close_all(streams: Sequence[Stream]) -> Callable[[], None]:
    def close() -> None:
        for stream in streams:
            stream.close()

    return close


def _prompt_chars(prompt: Any) -> int:
    return len(prompt) if isinstance(prompt, str) else sum(len(p) for p in prompt if isinstance(p, str))

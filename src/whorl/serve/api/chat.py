"""POST /v1/chat/completions: a full response or a stream of chunks, with tool calls.

The steps are those of `completions.py`: parse, submit, read or forward, close.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import Request as HttpRequest
from starlette.responses import Response

from whorl.serve.api.protocol import ChatRequest
from whorl.serve.api.request_parsing import ParsedRequest, parse_chat
from whorl.serve.api.response_formatting import (
    StreamDecoder,
    TextDelta,
    chat_log_probs,
    close_all,
    merge_streams,
    n_logprobs,
    response_head,
    usage,
)
from whorl.serve.api.sse import DONE, EventStream, JsonPieces, encode_json, format_event, run_until_disconnect
from whorl.serve.app_state import AppState, client_id, in_thread_if_large, rate_limit_headers
from whorl.serve.worker.worker import Stream
from whorl.tokens.chat.tool_calls import ParsedToolCall, parse_reply


async def create_chat_completion(state: AppState, body: ChatRequest, http: HttpRequest) -> Response:
    """Return the next turn of a conversation."""
    served = state.generation_model(body.model)
    parsed = await in_thread_if_large(http, lambda: parse_chat(body, served, state.config, client_id(http)))
    streams = await state.submit(parsed.requests, http, parsed.n_prompt_tokens)
    readers = [StreamDecoder(s, served.tokenizer) for s in streams]
    head = response_head("chatcmpl", "chat.completion", served)
    if body.stream:
        head["object"] = "chat.completion.chunk"
        events = _chat_events(parsed, streams, readers, head)
        return EventStream(events, close_all(streams), state.config.stall_seconds, rate_limit_headers(http))

    async def work() -> list[bytes]:
        outputs = [await reader.read_all() for reader in readers]
        return await encode_json(
            sum(n_logprobs(output) for output in outputs),
            lambda: {
                **head,
                "choices": (
                    _chat_choice(parsed, index, readers[index], delta) for index, delta in enumerate(outputs)
                ),
                "usage": usage(streams, parsed.n_prompt_tokens, parsed.best_of),
            },
        )

    pieces = await run_until_disconnect(http, work(), close_all(streams))
    return JsonPieces(pieces or [], state.config.stall_seconds, rate_limit_headers(http))


def _chat_choice(
    parsed: ParsedRequest, index: int, reader: StreamDecoder, delta: TextDelta
) -> dict[str, Any]:
    text, calls = delta.text, list[ParsedToolCall]()
    if parsed.tool_parser is not None:
        reply = parse_reply(delta.text, parsed.tool_parser())
        text, calls = reply.text, reply.calls[: parsed.max_calls]
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if calls:
        message |= {"content": text or None, "tool_calls": [call.message for call in calls]}
    return {
        "index": index,
        "message": message,
        "logprobs": _chat_logprobs(parsed, reader, delta),
        "finish_reason": "tool_calls" if calls else delta.finish,
    }


async def _chat_events(
    parsed: ParsedRequest,
    streams: Sequence[Stream],
    readers: Sequence[StreamDecoder],
    head: dict[str, Any],
) -> AsyncIterator[bytes]:
    extra = {"usage": None} if parsed.include_usage else {}  # null in all chunks but the last

    def chunk(index: int, delta: dict[str, Any], scores: Any = None, finish: str | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": scores, "finish_reason": finish}
        return format_event({**head, "choices": [choice], **extra})

    parsers = [parsed.tool_parser() if parsed.tool_parser else None for _ in readers]
    n_calls = [0] * len(readers)
    for index in range(len(readers)):
        yield chunk(index, {"role": "assistant", "content": "", "refusal": None})
    async for index, delta in merge_streams(readers):
        parser, text, calls = parsers[index], delta.text, list[ParsedToolCall]()
        if parser is not None:
            text, calls = parser.feed(text)
            if delta.finish is not None:
                rest, last = parser.finish()
                text, calls = text + rest, [*calls, *last]
        scores = _chat_logprobs(parsed, readers[index], delta)
        if text or (scores and scores["content"]):
            yield chunk(index, {"content": text}, scores)
        for call in calls if parsed.max_calls is None else calls[: parsed.max_calls - n_calls[index]]:
            yield chunk(index, {"tool_calls": [{"index": n_calls[index], **call.message}]})
            n_calls[index] += 1
        if delta.finish is not None:
            yield chunk(index, {}, None, "tool_calls" if n_calls[index] else delta.finish)
    if extra:
        yield format_event(
            {**head, "choices": [], "usage": usage(streams, parsed.n_prompt_tokens, parsed.best_of)}
        )
    yield DONE


def _chat_logprobs(parsed: ParsedRequest, reader: StreamDecoder, delta: TextDelta) -> dict[str, Any] | None:
    if parsed.n_top is None:
        return None
    return {"content": chat_log_probs(delta.tokens, reader.tokenizer), "refusal": None}

"""POST /v1/chat/completions: a full response or a stream of chunks, with tool calls.

The steps are those of `completions.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from fastapi import Request as HttpRequest
from starlette.responses import Response

from whorl.serve.api.completions import ResponseForm, respond
from whorl.serve.api.kept_completion import choose_model
from whorl.serve.api.protocol import ChatRequest
from whorl.serve.api.request_parsing import ParsedRequest, parse_chat, template_messages
from whorl.serve.api.response_formatting import StreamDecoder, TextDelta, chat_log_probs, merge_streams
from whorl.serve.api.sources import add_sources
from whorl.serve.app_state import AppState, client_id
from whorl.tokens.chat.tool_calls import ParsedToolCall, parse_reply
from whorl.tokens.hf_tokenizer import AnyTokenizer


async def create_chat_completion(state: AppState, body: ChatRequest, http: HttpRequest) -> Response:
    """Return the next turn of a conversation."""
    served, kept = choose_model(state, body, http)
    body, parsed, sources = await add_sources(
        state, body, served, http, lambda body: parse_chat(body, served, state.config, client_id(http))
    )
    if kept is not None:
        kept.prompt = template_messages(body.messages)
    return await respond(state, http, served, parsed, CHAT, bool(body.stream), kept, sources)


def _chat_choices(
    parsed: ParsedRequest, tokenizer: AnyTokenizer, outputs: Sequence[TextDelta]
) -> Iterator[dict[str, Any]]:
    return (_chat_choice(parsed, index, tokenizer, delta) for index, delta in enumerate(outputs))


def _chat_choice(
    parsed: ParsedRequest, index: int, tokenizer: AnyTokenizer, delta: TextDelta
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
        "logprobs": _chat_logprobs(parsed, tokenizer, delta),
        "finish_reason": "tool_calls" if calls else delta.finish,
    }


async def _chat_chunks(
    parsed: ParsedRequest, readers: Sequence[StreamDecoder]
) -> AsyncIterator[dict[str, Any]]:
    def chunk(
        index: int, delta: dict[str, Any], scores: Any = None, finish: str | None = None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": scores, "finish_reason": finish}

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
        scores = _chat_logprobs(parsed, readers[index].tokenizer, delta)
        if text or (scores and scores["content"]):
            yield chunk(index, {"content": text}, scores)
        for call in calls if parsed.max_calls is None else calls[: parsed.max_calls - n_calls[index]]:
            yield chunk(index, {"tool_calls": [{"index": n_calls[index], **call.message}]})
            n_calls[index] += 1
        if delta.finish is not None:
            yield chunk(index, {}, None, "tool_calls" if n_calls[index] else delta.finish)


def _chat_logprobs(parsed: ParsedRequest, tokenizer: AnyTokenizer, delta: TextDelta) -> dict[str, Any] | None:
    if parsed.n_top is None:
        return None
    return {"content": chat_log_probs(delta.tokens, tokenizer, parsed.n_top), "refusal": None}


CHAT = ResponseForm("chatcmpl", "chat.completion", "chat.completion.chunk", _chat_choices, _chat_chunks)

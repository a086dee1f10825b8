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
from whorl.serve.api.protocol import ChatRequest, Common, CompletionRequest, ToolChoice
from whorl.serve.api.request_parsing import Asked
from whorl.serve.api.response_formatting import Piece, Reader, Scores, chat_log_probs, joined, together, usage
from whorl.serve.api.sse import DONE, EventStream, event, while_there
from whorl.serve.api.tools import Call, Calls
from whorl.serve.app_state import Api, aside, client, headers
from whorl.serve.errors import Json
from whorl.serve.worker.model_entry import Served
from whorl.serve.worker.worker import Stream


async def completion(api: Api, body: CompletionRequest, http: HttpRequest) -> Response:
    """A text goes on."""
    served = api.writer(body.model)
    asked = await aside(
        _size(body.prompt), lambda: requests.completion(body, served, api.config, client(http))
    )
    streams = await api.begin(asked.requests, http, asked.n_prompt)
    readers = [Reader(s, served.tokenizer) for s in streams]
    head = _head("cmpl", "text_completion", served)
    if body.stream:
        events = _completion_events(body, served, asked, streams, readers, head)
        return EventStream(events, _closing(streams), api.config.stall_seconds, headers(http))

    async def work() -> dict[str, Any]:
        pieces = [await reader.rest() for reader in readers]
        choices = []
        for p in range(len(asked.prompts)):
            own = pieces[p * asked.each : (p + 1) * asked.each]
            if asked.each > asked.n:
                own = sorted(own, key=_mean, reverse=True)[: asked.n]
            choices += [_completion_choice(body, served, asked, p, piece) for piece in own]
        for index, choice in enumerate(choices):
            choice["index"] = index
        return {**head, "choices": choices, "usage": usage(streams, asked.n_prompt, asked.each)}

    return Json(await while_there(http, work(), _closing(streams)), headers=headers(http))


async def chat(api: Api, body: ChatRequest, http: HttpRequest) -> Response:
    """The next turn of a conversation."""
    served = api.writer(body.model)
    size = sum(len(message.text) for message in body.messages)
    asked = await aside(size, lambda: requests.chat(body, served, api.config, client(http)))
    streams = await api.begin(asked.requests, http, asked.n_prompt)
    readers = [Reader(s, served.tokenizer) for s in streams]
    head = _head("chatcmpl", "chat.completion", served)
    if body.stream:
        head["object"] = "chat.completion.chunk"
        events = _chat_events(body, served, asked, streams, readers, head)
        return EventStream(events, _closing(streams), api.config.stall_seconds, headers(http))

    async def work() -> dict[str, Any]:
        choices = []
        for index, reader in enumerate(readers):
            piece = await reader.rest()
            text, calls = _calls_in(body, piece)
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if calls:
                message |= {"content": text or None, "tool_calls": [call.said for call in calls]}
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": _chat_scores(body, served, piece),
                    "finish_reason": "tool_calls" if calls else piece.finish,
                }
            )
        return {**head, "choices": choices, "usage": usage(streams, asked.n_prompt, asked.each)}

    return Json(await while_there(http, work(), _closing(streams)), headers=headers(http))


async def _completion_events(
    body: CompletionRequest,
    served: Served,
    asked: Asked,
    streams: Sequence[Stream],
    readers: Sequence[Reader],
    head: dict[str, Any],
) -> AsyncIterator[bytes]:
    extra, chunk = _usage_fields(body), dict(head)
    offsets = [len(_echoed(body, asked, i)) for i in range(len(readers))]
    scores = [Scores(served.tokenizer, body.logprobs or 0, offset) for offset in offsets]
    begun = [False] * len(readers)
    async for index, piece in together(readers):
        prompt = asked.prompts[index // asked.each]
        text = piece.text if body.max_tokens != 0 else ""
        tokens = piece.tokens if body.max_tokens != 0 else []
        log_probs = None
        if body.logprobs is not None:
            log_probs = scores[index].answer(tokens, piece.lead)
        if not begun[index] and body.echo:
            text = _echoed(body, asked, index) + text
            if log_probs is not None:
                before = Scores(served.tokenizer, body.logprobs or 0)
                log_probs = joined(before.prompt(prompt.ids, piece.prompt_log_probs), log_probs)
        begun[index] = True
        if not text and not tokens and piece.finish is None:
            continue
        choice = {"index": index, "text": text, "logprobs": log_probs, "finish_reason": piece.finish}
        yield event({**chunk, "choices": [choice], **extra})
    if extra:
        yield event({**chunk, "choices": [], "usage": usage(streams, asked.n_prompt, asked.each)})
    yield DONE


def _completion_choice(
    body: CompletionRequest, served: Served, asked: Asked, number: int, piece: Piece
) -> dict[str, Any]:
    prompt = asked.prompts[number]
    text, tokens = (piece.text, piece.tokens) if body.max_tokens != 0 else ("", [])
    echo = _echoed(body, asked, number * asked.each)
    log_probs = None
    if body.logprobs is not None:
        scores = Scores(served.tokenizer, body.logprobs)
        if body.echo:
            before = scores.prompt(prompt.ids, piece.prompt_log_probs)
            log_probs = joined(before, scores.answer(tokens, piece.lead))
        else:
            log_probs = scores.answer(tokens, piece.lead)
    finish = piece.finish if body.max_tokens != 0 else "length"
    return {"index": 0, "text": echo + text, "logprobs": log_probs, "finish_reason": finish}


async def _chat_events(
    body: ChatRequest,
    served: Served,
    asked: Asked,
    streams: Sequence[Stream],
    readers: Sequence[Reader],
    head: dict[str, Any],
) -> AsyncIterator[bytes]:
    extra = _usage_fields(body)

    def chunk(index: int, delta: dict[str, Any], scores: Any = None, finish: str | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": scores, "finish_reason": finish}
        return event({**head, "choices": [choice], **extra})

    parsers = [_parser(body) for _ in readers]
    n_calls = [0] * len(readers)
    for index in range(len(readers)):
        yield chunk(index, {"role": "assistant", "content": "", "refusal": None})
    async for index, piece in together(readers):
        parser, text, calls = parsers[index], piece.text, list[Call]()
        if parser is not None:
            text, calls = parser.add(text)
            if piece.finish is not None:
                rest, last = parser.end()
                text, calls = text + rest, [*calls, *last]
        scores = _chat_scores(body, served, piece)
        if text or (scores and scores["content"]):
            yield chunk(index, {"content": text}, scores)
        for call in calls[: 1 - n_calls[index]] if body.parallel_tool_calls is False else calls:
            yield chunk(index, {"tool_calls": [{"index": n_calls[index], **call.said}]})
            n_calls[index] += 1
        if piece.finish is not None:
            yield chunk(index, {}, None, "tool_calls" if n_calls[index] else piece.finish)
    if extra:
        yield event({**head, "choices": [], "usage": usage(streams, asked.n_prompt, asked.each)})
    yield DONE


def _calls_in(body: ChatRequest, piece: Piece) -> tuple[str, list[Call]]:
    """(text, calls) of a whole answer."""
    parser = _parser(body)
    if parser is None:
        return piece.text, []
    text, calls = parser.add(piece.text)
    rest, last = parser.end()
    calls = [*calls, *last]
    return text + rest, calls[:1] if body.parallel_tool_calls is False else calls


def _parser(body: ChatRequest) -> Calls | None:
    """What finds calls in the answer, or None where none are looked for."""
    if not body.tools or body.tool_choice == "none":
        return None
    return Calls(whole=body.tool_choice == "required" or isinstance(body.tool_choice, ToolChoice))


def _chat_scores(body: ChatRequest, served: Served, piece: Piece) -> dict[str, Any] | None:
    if not body.logprobs:
        return None
    return {"content": chat_log_probs(piece.tokens, served.tokenizer), "refusal": None}


def _echoed(body: CompletionRequest, asked: Asked, index: int) -> str:
    return asked.prompts[index // asked.each].text.decode("utf-8", "replace") if body.echo else ""


def _mean(piece: Piece) -> float:
    """Mean log-probability a token."""
    return sum(t.raw_log_prob for t in piece.tokens) / max(1, len(piece.tokens))


def _head(prefix: str, kind: str, served: Served) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": served.name,
        "system_fingerprint": None,
    }


def _usage_fields(body: Common) -> dict[str, Any]:
    """What every chunk but the last says of usage, where it was asked for."""
    wanted = body.stream_options is not None and body.stream_options.include_usage
    return {"usage": None} if wanted else {}


def _closing(streams: Sequence[Stream]) -> Callable[[], None]:
    def close() -> None:
        for stream in streams:
            stream.close()

    return close


def _size(prompt: Any) -> int:
    return len(prompt) if isinstance(prompt, str) else sum(len(p) for p in prompt if isinstance(p, str))

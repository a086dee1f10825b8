"""POST /v1/responses, the basic part: text or messages in, one message out. A stored one is logged, not retrieved.

A streamed response is a sequence of numbered, typed events:

    response.created  response.in_progress
      response.output_item.added  response.content_part.added
        response.output_text.delta  ...                          the text
        response.output_text.done
      response.content_part.done  response.output_item.done
    response.completed, or response.incomplete at the token limit, or response.failed after an engine error

The request is converted to a chat request.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import Request as HttpRequest
from pydantic import ValidationError
from starlette.responses import Response

from whorl.serve.api import request_parsing as requests
from whorl.serve.api.kept_completion import KeptCompletion, choose_model
from whorl.serve.api.protocol import (
    ChatRequest,
    InputItem,
    JsonSchema,
    Message,
    ResponseFormat,
    ResponsesRequest,
    TextFormat,
)
from whorl.serve.api.response_formatting import StreamDecoder, merge_streams, usage
from whorl.serve.api.sources import add_sources
from whorl.serve.api.sse import EventStream, format_event, run_until_disconnect
from whorl.serve.app_state import AppState, client_id, rate_limit_headers
from whorl.serve.errors import ApiError, OrjsonResponse, from_validation_errors, to_api_error
from whorl.serve.worker.worker import Stream


async def create_response(state: AppState, body: ResponsesRequest, http: HttpRequest) -> Response:
    """Return one response, full or streamed."""
    served, kept = choose_model(state, body, http)
    chat = _to_chat_request(body)
    try:
        chat, parsed, sources = await add_sources(
            state,
            chat,
            served,
            http,
            lambda body: requests.parse_chat(body, served, state.config, client_id(http)),
        )
    except ApiError as error:
        renamed = {"messages": "input", "max_completion_tokens": "max_output_tokens"}
        error.param = renamed.get(error.param or "", error.param)
        raise
    if kept is not None:
        kept.prompt = requests.template_messages(chat.messages)
    streams = await state.submit(parsed.requests, http, parsed.n_prompt_tokens)
    answer = _ResponseBuilder(body, served.name, streams[0], parsed.n_prompt_tokens)
    answer.sources = sources
    reader = StreamDecoder(streams[0], served.tokenizer)
    if body.stream:
        return EventStream(
            _events(answer, reader, kept),
            streams[0].close,
            state.config.stall_seconds,
            rate_limit_headers(http),
        )

    async def work() -> dict[str, Any]:
        delta = await reader.read_all()
        answer.text, answer.finish = delta.text, delta.finish
        return answer.response | ({} if kept is None else await kept.append(answer.id, [reader]))

    return OrjsonResponse(
        await run_until_disconnect(http, work(), streams[0].close), headers=rate_limit_headers(http)
    )


class _ResponseBuilder:
    """A response under construction."""

    def __init__(self, body: ResponsesRequest, model: str, stream: Stream, n_prompt: int) -> None:
        self.body, self.model, self.stream, self.n_prompt = body, model, stream, n_prompt
        self.id, self.item_id = f"resp_{secrets.token_hex(16)}", f"msg_{secrets.token_hex(16)}"
        self.created = int(time.time())
        self.sources: list[dict[str, Any]] = []
        self.text, self.finish, self.error = "", None, None  # type: str, str | None, dict[str, Any] | None

    @property
    def status(self) -> str:
        if self.error is not None:
            return "failed"
        return {"stop": "completed", "length": "incomplete"}.get(self.finish or "", "in_progress")

    @property
    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    @property
    def item(self) -> dict[str, Any]:
        content = [self.part] if self.finish else []
        return {
            "id": self.item_id,
            "type": "message",
            "role": "assistant",
            "status": self.status,
            "content": content,
        }

    @property
    def response(self) -> dict[str, Any]:
        body, ended = self.body, self.finish is not None
        form = body.text.format if body.text and body.text.format else TextFormat(type="text")
        counts = usage([self.stream], self.n_prompt, 1)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": self.status,
            "error": self.error,
            "incomplete_details": {"reason": "max_output_tokens"} if self.finish == "length" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.model,
            "output": [self.item] if ended else [],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": bool(body.store),
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counts["total_tokens"],
            }
            if ended
            else None,
            "user": body.user,
            "metadata": body.metadata or {},
            **({"sources": self.sources} if self.sources else {}),
        }


async def _events(
    answer: _ResponseBuilder, reader: StreamDecoder, kept: KeptCompletion | None
) -> AsyncIterator[bytes]:
    numbers = iter(range(1 << 31))
    at = {"item_id": answer.item_id, "output_index": 0, "content_index": 0}

    def typed(name: str, **fields: Any) -> bytes:
        return format_event({"type": name, "sequence_number": next(numbers), **fields}, name)

    yield typed("response.created", response=answer.response)
    yield typed("response.in_progress", response=answer.response)
    yield typed("response.output_item.added", output_index=0, item=answer.item)
    yield typed("response.content_part.added", **at, part=answer.part)
    try:
        async for _, delta in merge_streams([reader]):
            if delta.text:
                answer.text += delta.text
                yield typed("response.output_text.delta", **at, delta=delta.text, logprobs=[])
            answer.finish = delta.finish
    except Exception as error:
        api_error = to_api_error(error)
        answer.error = {"code": "server_error", "message": api_error.message}
        yield typed("response.failed", response=answer.response)
        return
    given = {} if kept is None else await kept.append(answer.id, [reader])
    yield typed("response.output_text.done", **at, text=answer.text, logprobs=[])
    yield typed("response.content_part.done", **at, part=answer.part)
    yield typed("response.output_item.done", output_index=0, item=answer.item)
    yield typed(f"response.{answer.status}", response=answer.response | given)


def _to_chat_request(body: ResponsesRequest) -> ChatRequest:
    form = body.text.format if body.text else None
    schema = None
    if form is not None and form.type == "json_schema":
        if form.schema_ is None:
            raise ApiError(400, "text.format: json_schema requires a schema", param="text.format.schema")
        schema = JsonSchema(name=form.name or "answer", schema=form.schema_)
    try:
        return ChatRequest(
            model=body.model,
            messages=list(_messages(body)),
            temperature=body.temperature,
            top_p=body.top_p,
            max_completion_tokens=body.max_output_tokens,
            sources=body.sources,
            response_format=ResponseFormat(type=form.type, json_schema=schema) if form else None,
        )
    except ValidationError as error:
        raise from_validation_errors(error.errors()) from error


def _messages(body: ResponsesRequest) -> Iterator[Message]:
    if body.instructions is not None:
        yield Message(role="system", content=body.instructions)
    items = [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    for item in items:
        yield Message(role=item.role, content=item.content)

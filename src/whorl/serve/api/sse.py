r"""Server-sent events, large answers in pieces, and the detection of disconnected clients.

    data: {...}\n\n                  one event;   data: [DONE]\n\n   the last event of completions and chat
    event: NAME\ndata: {...}\n\n     the typed events of /v1/responses

A client can leave in three ways. It closes the connection: a task that waits for the disconnect notices at once. It stops
reading: the socket buffers fill, `send` blocks, and after `stall_seconds` the client is dropped. It dies: same as the
second. In each case the `finally` block closes the streams, which aborts their sequences and frees their pages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import orjson
from fastapi import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from whorl.serve.errors import STOPPING, to_api_error

LOG = logging.getLogger("whorl.serve")
T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
PIECE_ITEMS = 256  # of a list in a whole answer
PIECE_BYTES = 1 << 16


def format_event(content: Mapping[str, Any], name: str = "") -> bytes:
    """Encode one event."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + orjson.dumps(content) + b"\n\n"


async def encode_json(n_entries: int, make: Callable[[], Any]) -> list[bytes]:
    """Return the JSON of `make()` in pieces; made outside of the event loop if it has many entries."""

    def work() -> list[bytes]:
        return list(_joined(json_pieces(make())))

    return await asyncio.to_thread(work) if n_entries > PIECE_ITEMS else work()


def json_pieces(value: Any) -> Iterator[bytes]:
    """Yield the JSON of `value` in parts. An iterator is written as a list, and its items are made one by one.

    The encoder holds the interpreter's lock, so that no other thread runs while it writes one part.
    """
    if isinstance(value, dict):
        opening = b"{"
        for name, item in value.items():
            yield opening + orjson.dumps(name) + b":"
            yield from json_pieces(item)
            opening = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, Iterator):
        opening = b"["
        for item in value:
            yield opening
            yield from json_pieces(item)
            opening = b","
        yield b"]" if opening == b"," else b"[]"
    elif isinstance(value, list) and len(value) > PIECE_ITEMS:
        for start in range(0, len(value), PIECE_ITEMS):
            yield (b"," if start else b"[") + orjson.dumps(value[start : start + PIECE_ITEMS])[1:-1]
        yield b"]"
    else:
        yield orjson.dumps(value)


def _joined(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Join parts to pieces of at least `PIECE_BYTES`."""
    own, size = [], 0
    for part in parts:
        own.append(part)
        size += len(part)
        if size >= PIECE_BYTES:
            yield b"".join(own)
            own, size = [], 0
    yield b"".join(own)


class JsonPieces(Response):
    """A JSON response that is sent in pieces. A client that stops reading is dropped after `stall_seconds`."""

    media_type = "application/json"

    def __init__(self, pieces: Sequence[bytes], stall_seconds: float, headers: Mapping[str, str]) -> None:
        self.pieces, self.stall_seconds = pieces, stall_seconds
        self.status_code, self.background, self.body = 200, None, b""
        self.init_headers({**headers, "content-length": str(sum(map(len, pieces)))})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _run_until_disconnect(receive, self._write(send))
        except TimeoutError:
            LOG.warning("a reader received no data for %.0f s and was dropped", self.stall_seconds)

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        for piece in self.pieces:
            async with asyncio.timeout(self.stall_seconds):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class EventStream(Response):
    """Response that sends the items of `events` as they are produced; `close` is called at the end in every case."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], None],
        stall_seconds: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.events, self.close, self.stall_seconds = events, close, stall_seconds
        self.status_code, self.background = 200, None
        self.init_headers({**(headers or {}), "cache-control": "no-store", "x-accel-buffering": "no"})
        self.raw_headers.append((b"content-type", b"text/event-stream; charset=utf-8"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _run_until_disconnect(receive, self._write(send))
        except TimeoutError:
            LOG.warning("a reader received no data for %.0f s and was dropped", self.stall_seconds)
        finally:
            self.close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for data in self.events:
                async with asyncio.timeout(self.stall_seconds):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except (TimeoutError, *STOPPING):
            raise
        except BaseException as error:  # the status was already sent, so the error is sent as an event
            await send(
                {
                    "type": "http.response.body",
                    "body": format_event(to_api_error(error).body),
                    "more_body": True,
                }
            )
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def run_until_disconnect(
    http: HttpRequest, work: Coroutine[Any, Any, T], close: Callable[[], None]
) -> T | None:
    """Return the result of `work`, or None if the client disconnects first; `close` is called in every case."""
    try:
        return await _run_until_disconnect(http.receive, work)
    finally:
        close()


async def _run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)

"""A replica without a model, used in this process or as a program. The last word of the prompt selects the response:

count:3      stream three events
hold         stream one and a half events, then wait for `release` or a disconnect
release      set `release`
die          kill the process
status:503   respond with this status
other        echo the request
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import uvicorn
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}).encode() + b"\n\n"


class FakeReplica:
    def __init__(self, name: str = "") -> None:
        self.name, self.health = name, {"status": "ok", "boot_id": os.getpid()}
        self.health_status = 200
        self.prompts: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.release, self.held, self.left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == "/health":
            await self.answer(send, self.health_status, self.health)
            return
        body = await Request(scope, receive).body()
        fields = json.loads(body) if body else {}
        prompt = fields.get("prompt") or (fields.get("messages") or [{"content": ""}])[-1]["content"]
        self.prompts.append(prompt)
        self.headers.append(dict(Headers(scope=scope)))
        verb, _, number = str(prompt).split(" ")[-1].partition(":")
        if verb == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif verb == "release":
            self.release.set()
            await self.answer(send, 200, {})
        elif verb == "status":
            await self.answer(send, int(number), {"error": {"message": "as asked", "code": "fake"}})
        elif verb in ("count", "hold"):
            await self.stream(receive, send, int(number or 1), verb == "hold")
        else:
            echo = {"name": self.name, "path": scope["path"], "prompt": prompt}
            await self.answer(send, 200, echo | {"query": scope["query_string"].decode()})

    async def stream(self, receive: Any, send: Any, n: int, hold: bool) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for i in range(n):
            await send({"type": "http.response.body", "body": event(f"{self.name}{i}"), "more_body": True})
        if hold:
            await send({"type": "http.response.body", "body": event("half")[:20], "more_body": True})
            self.held.set()
            gone = asyncio.ensure_future(receive())
            released = asyncio.ensure_future(self.release.wait())
            await asyncio.wait({gone, released}, return_when=asyncio.FIRST_COMPLETED)
            released.cancel()
            if gone.done():
                self.left.set()
                return
            gone.cancel()
            await send({"type": "http.response.body", "body": event("half")[20:], "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def answer(self, send: Any, status: int, content: Any) -> None:
        await JSONResponse(content, status)({"type": "http"}, None, send)  # type: ignore[arg-type]


@asynccontextmanager
async def running(app: Any, **settings: Any) -> AsyncIterator[str]:
    """Serve `app` on a free port in this event loop; yields its URL. settings: of uvicorn."""
    # asyncio disables Nagle's algorithm only with an explicit protocol.
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, log_level="warning", timeout_graceful_shutdown=1, lifespan="auto", **settings
    )
    server = uvicorn.Server(config)
    server.capture_signals = nullcontext  # type: ignore[method-assign]
    task = asyncio.ensure_future(server.serve(sockets=[listening]))
    while not server.started and not task.done():
        await asyncio.sleep(0.001)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listening.close()


if __name__ == "__main__":
    host, port = sys.argv[sys.argv.index("--host") + 1], sys.argv[sys.argv.index("--port") + 1]
    uvicorn.run(FakeReplica(f"{port}/"), host=host, port=int(port), log_level="warning")

"""A router over scripted replicas on real sockets, shared by the router's tests."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx

from tests.support.router.fake_replica import FakeReplica, running
from whorl.router.router import ReplicaRouter, make_router

LONG = "a prompt that is long enough to fill more than a block of the index " * 8


@dataclass
class World:
    """A router over scripted replicas in one event loop."""

    router: ReplicaRouter
    fakes: list[FakeReplica]
    client: httpx.AsyncClient

    async def ask(self, prompt: str) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"prompt": prompt})

    def stream(self, prompt: str) -> AbstractAsyncContextManager[httpx.Response]:
        return self.client.stream("POST", "/v1/completions", json={"prompt": prompt})

    def metric(self, text: str) -> float:
        lines = self.router.metrics.exposition(self.router.pool).decode().splitlines()
        return sum(float(x.split()[-1]) for x in lines if x.startswith(text))

    async def check_health(self) -> None:
        async with httpx.AsyncClient() as client:
            await self.router.pool.check_health(client)


@asynccontextmanager
async def world(n: int = 2, *, extra: dict[str, str] | None = None, **settings: Any) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        fakes = [FakeReplica(f"r{i}/") for i in range(n)]
        urls = {f"r{i}": await stack.enter_async_context(running(f)) for i, f in enumerate(fakes)}
        router = make_router({**urls, **(extra or {})}, health_check_interval=3600.0, **settings)
        url = await stack.enter_async_context(running(router.app))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20.0))
        yield World(router, fakes, client)


def status_and_code(answer: httpx.Response) -> tuple[int, str]:
    """The status and the code of an error."""
    return answer.status_code, answer.json()["error"]["code"]


async def rest(parts: AsyncIterator[bytes]) -> bytes:
    """The remaining bytes of a stream."""
    return b"".join([part async for part in parts])


@asynccontextmanager
async def breaking(answer: bytes = b"") -> AsyncIterator[tuple[str, list[int]]]:
    """A healthy replica that answers every request with `answer` and closes. Yields (url, [number of requests])."""
    count = [0]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET /health"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            else:
                count[0] += 1
                writer.write(answer)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", count


def async_test(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an asynchronous test in a new event loop, for at most 60 seconds."""

    @functools.wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **fixtures), 60))

    return run

"""A router over scripted replicas on real sockets, shared by the router's tests."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx

from tests.support.router.fake_replica import FakeReplica, running
from whorl.router.breaker import CircuitBreaker
from whorl.router.router import ReplicaRouter, make_router

LONG = "a prompt that is long enough to fill more than a block of the index " * 8


@dataclass
class World:
    """A router over scripted replicas in one event loop. `look` runs a health check."""

    router: ReplicaRouter
    fakes: list[FakeReplica]
    client: httpx.AsyncClient
    look: Callable[[], Awaitable[None]]

    async def ask(self, prompt: str, **more: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"prompt": prompt, **more})

    def metric(self, text: str) -> float:
        lines = self.router.metrics.exposition(self.router.pool).decode().splitlines()
        return sum(float(x.split()[-1]) for x in lines if x.startswith(text))


@asynccontextmanager
async def world(
    n: int = 2,
    *,
    extra: dict[str, str] | None = None,
    breaker: Callable[[], CircuitBreaker] = CircuitBreaker,
    **settings: Any,
) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        fakes = [FakeReplica(f"r{i}/") for i in range(n)]
        urls = {f"r{i}": await stack.enter_async_context(running(f)) for i, f in enumerate(fakes)}
        router = make_router({**urls, **(extra or {})}, health_check_interval=3600.0, **settings)
        for replica in router.pool.replicas.values():
            replica.breaker = breaker()
        url = await stack.enter_async_context(running(router.app))
        timeout = httpx.Timeout(20.0)
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=timeout))
        own = await stack.enter_async_context(httpx.AsyncClient())

        async def look() -> None:
            await router.pool.check_health(own)

        yield World(router, fakes, client, look)


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

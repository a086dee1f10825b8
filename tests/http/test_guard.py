"""Paths that name another route, tenant or host; bodies that together take the memory."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from tests.support.router.harness import async_test

from whorl.http.bodies import FREE_BYTES, Bodies, ClientDisconnected
from whorl.http.guard import RefusedError, check_request, path_problem


@pytest.mark.parametrize(
    "target",
    [
        "/", "/v1/models", "/v1/models/", "/v1/models/a%2Fb", "/v1/models/a.b..c", "/static/chat.html", "/v1/x;y=1",
        "/v1/models/%C3%A9", "/...", "/v1/models/~.a", "/v1/models//tmp/model", "/;/a", "/%25",
    ],
)  # fmt: skip
def test_ordinary_paths_pass(target: str) -> None:
    assert path_problem(target) == ""


@pytest.mark.parametrize(
    "target",
    [
        "/health/../v1/models", "/../tenant-b/x", "/a/./b", "/a/..", "/.", "/%2e%2e/x", "/%2E./x", "/..%2fx", "/a%2f..%2fb",
        "/%252e%252e/x", "/%25252e%25252e/x", "/a/..;/b", "/..;a=b/c", "//a/x", "//", "/%c0%ae/x", "/%2f/a", "/a\\..\\b",
        "/..%5cb", "/a%5c..%5cb", "/a%00b", "/a%0d%0ab", "/a#b", "http://localhost/health", "%2F@host/", "*", "localhost:80",
        "", "/%" + "25" * 9 + "2e", "/a/..%3fx", "/a/..%23b/c", "/a/..%20/b",
    ],
)  # fmt: skip
def test_paths_with_two_readings_are_refused(target: str) -> None:
    assert path_problem(target)


def scope(path: bytes = b"/", **headers: str) -> dict[str, Any]:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"raw_path": path, "path": path.decode(), "headers": pairs}


def test_host_path_and_encoding_are_checked() -> None:
    def status(one: dict[str, Any], local_only: bool = True) -> int:
        headers = {name.decode(): value.decode() for name, value in one["headers"]}
        try:
            check_request(one, headers, local_only)
        except RefusedError as error:
            return error.status
        return 200

    assert status(scope(host="localhost:8000")) == status(scope(host="a.example"), False) == 200
    assert status(scope(host="a.example")) == status(scope()) == 403
    assert status(scope(b"/a/../b", host="localhost")) == 400
    assert status(scope(host="localhost", content_encoding="identity")) == 200
    for encoding in ("gzip", "br", "GZIP", "identity, gzip"):
        assert status(scope(host="localhost", content_encoding=encoding)) == 415


class Sender:
    """A client that sends a body in parts, each when `go` is called."""

    def __init__(self, *parts: bytes, ends: bool = True) -> None:
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for n, part in enumerate(parts):
            more = not ends or n < len(parts) - 1
            self.messages.put_nowait({"type": "http.request", "body": part, "more_body": more})

    async def receive(self) -> dict[str, Any]:
        return await self.messages.get()


async def read(bodies: Bodies, sender: Sender, client: str = "a") -> Any:
    """The body, or the status of a refusal."""
    try:
        async with bodies.reading(sender.receive, client) as body:
            return body
    except RefusedError as error:
        return error.status


@async_test
async def test_sum_of_bodies_in_flight_is_bounded() -> None:
    big = FREE_BYTES + 1
    bodies = Bodies(2 * FREE_BYTES, 30.0, 4 * big)
    waiting = [asyncio.ensure_future(read(bodies, Sender(b"x" * big, ends=False))) for _ in range(2)]
    await asyncio.sleep(0)
    assert bodies.shares.total == 2 * big
    assert await read(bodies, Sender(b"x" * big)) == 503  # one client has half
    assert await read(bodies, Sender(b"x" * FREE_BYTES)) == b"x" * FREE_BYTES  # a small body is always read
    assert await read(bodies, Sender(b"x" * big), "b") == b"x" * big
    async with (
        bodies.reading(Sender(b"y" * big).receive, "b") as first,
        bodies.reading(Sender(b"y" * FREE_BYTES, b"z").receive, "b") as second,
    ):
        assert len(first) == len(second) == big
        assert await read(bodies, Sender(b"x" * big), "c") == 503  # all are in flight until their answers end
    for task in waiting:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    assert bodies.shares.total == 0 and not bodies.shares.held
    assert await read(bodies, Sender(b"x" * big)) == b"x" * big


@async_test
async def test_refused_body_is_discarded_and_holds_nothing() -> None:
    bodies = Bodies(2 * FREE_BYTES, 0.1)
    long = Sender(*[b"x" * FREE_BYTES] * 5)
    assert await read(bodies, long) == 413 and long.messages.empty()
    assert await read(bodies, Sender(*[b"x" * FREE_BYTES] * 40)) == 413  # it stops after 8 times the limit
    assert await read(bodies, Sender(b"x" * FREE_BYTES, b"y", ends=False)) == 408
    gone = Sender(b"x" * FREE_BYTES, b"y", ends=False)
    gone.messages.put_nowait({"type": "http.disconnect"})
    with pytest.raises(ClientDisconnected):
        await read(bodies, gone)
    assert bodies.shares.total == 0

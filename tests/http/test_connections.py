"""Bounds on open connections, with a server over real sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import psutil
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from whorl.http.connections import bounded_protocol

REQUEST = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
LARGE = REQUEST.replace(b"/ ", b"/large ", 1)
HEADER_SECONDS = 0.5
STALL_SECONDS = 0.3


@pytest.fixture
def address(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    """A server with at most 20 connections; its parameter is the time for a header."""
    header_seconds = getattr(request, "param", HEADER_SECONDS)
    large = PlainTextResponse("x" * (16 << 20))  # more than the kernel's buffers take
    app = Starlette(routes=[Route("/", lambda _: PlainTextResponse("ok")), Route("/large", lambda _: large)])
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, http=bounded_protocol(20, header_seconds, STALL_SECONDS), log_level="error", backlog=16
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield listener.getsockname()
    server.should_exit = True
    thread.join(10)


def ask(connection: socket.socket) -> bytes:
    connection.sendall(REQUEST)
    answer = b""
    while not answer.endswith(b"ok") and (part := connection.recv(1000)):
        answer += part
    return answer


def is_closed(connection: socket.socket, seconds: float) -> bool:
    connection.settimeout(seconds)
    try:
        return connection.recv(1000) == b""
    except TimeoutError:
        return False


def test_connections_without_a_header_are_closed(address: tuple[str, int]) -> None:
    with ExitStack() as stack:
        idle, half, kept = (stack.enter_context(socket.create_connection(address)) for _ in range(3))
        assert ask(kept).endswith(b"ok")
        half.sendall(REQUEST[:20])
        time.sleep(HEADER_SECONDS / 2)
        half.sendall(REQUEST[20:24])  # more bytes give no more time
        assert is_closed(idle, 5) and is_closed(half, 5)
        assert ask(kept).endswith(b"ok"), "kept alive after a response"
        kept.sendall(REQUEST[:10])  # half of a second request
        assert is_closed(kept, 5)


@pytest.mark.parametrize("address", [60.0], indirect=True)  # so it is not the timer that makes room
def test_idle_connections_cannot_shut_out_others(address: tuple[str, int]) -> None:
    with ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(address)) for _ in range(60)]
        began = time.monotonic()
        assert ask(stack.enter_context(socket.create_connection(address))).endswith(b"ok")
        assert time.monotonic() - began < 30
        assert all(is_closed(connection, 5) for connection in idle[:40]), "the oldest are closed"


def n_connections(port: int) -> int:
    """The server's ends of open connections."""
    mine = psutil.Process().net_connections("tcp")
    return sum(one.laddr.port == port and one.status in ("ESTABLISHED", "CLOSE_WAIT") for one in mine)


def test_clients_that_never_read_are_dropped(address: tuple[str, int]) -> None:
    with ExitStack() as stack:
        stalled, slow = (stack.enter_context(socket.create_connection(address)) for _ in range(2))
        for connection in (stalled, slow):
            connection.sendall(LARGE)
        n, deadline = 0, time.monotonic() + 3 * STALL_SECONDS
        while time.monotonic() < deadline:  # takes some bytes in each period
            n += len(slow.recv(1 << 20))
            time.sleep(STALL_SECONDS / 5)
        assert n_connections(address[1]) == 1, "only the one that reads is left"
        while n < 16 << 20 and (part := slow.recv(1 << 20)):
            n += len(part)
        assert n > 16 << 20

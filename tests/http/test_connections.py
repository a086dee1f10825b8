"""Bounds on open connections, with a server over real sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from whorl.http.connections import bounded_protocol

REQUEST = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
HEADER_SECONDS = 0.5


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    """A server with at most 20 connections."""
    app = Starlette(routes=[Route("/", lambda _: PlainTextResponse("ok"))])
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=bounded_protocol(20, HEADER_SECONDS), log_level="error", backlog=16)
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


def test_idle_connections_cannot_shut_out_others(address: tuple[str, int]) -> None:
    with ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(address)) for _ in range(60)]
        began = time.monotonic()
        assert ask(stack.enter_context(socket.create_connection(address))).endswith(b"ok")
        assert time.monotonic() - began < HEADER_SECONDS
        assert all(is_closed(connection, HEADER_SECONDS / 2) for connection in idle[:40]), (
            "the oldest are closed"
        )

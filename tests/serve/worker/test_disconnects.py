"""Disconnects, slow readers, draining, and a failing engine.

No test depends on timing: the engine's steps are released one by one (`Gate`).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from tests.support.router.harness import async_test
from tests.support.serve.live_server import Gate, Running, make_state, make_tiny_engine, running

from whorl.engine.request import Delta, Request, Token
from whorl.serve.api.sse import EventStream
from whorl.serve.worker.worker import EngineWorker

STREAM = {"model": "tiny", "prompt": "def ", "max_tokens": 200, "stream": True, "ignore_eos": True}


@pytest.fixture
def gated() -> Iterator[tuple[Running, Gate]]:
    engine = make_tiny_engine()
    gate = Gate(engine)
    with running(make_state(engine)) as server:
        yield server, gate
        gate.let(10_000)


@contextmanager
def open_stream(url: str, **changes: Any) -> Iterator[Iterator[str]]:
    """Lines of a streamed completion, after the first one. They hold a reference that keeps the connection open."""
    with httpx.stream("POST", f"{url}/v1/completions", json=STREAM | changes, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        yield lines


def raw_request(version: str, **changes: Any) -> bytes:
    """A completion request as bytes."""
    body = json.dumps(STREAM | changes).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


def drained(server: Running) -> None:
    server.wait(server.api.worker.wait_drained())


def finish_reason(lines: Iterable[str]) -> str:
    """The finish reason of a complete stream."""
    *_, event, end = filter(None, lines)
    assert end == "data: [DONE]"
    return str(json.loads(event.removeprefix("data: "))["choices"][0]["finish_reason"])


def test_disconnect_in_stream_aborts_and_frees_pages(gated: tuple[Running, Gate]) -> None:
    server, gate = gated
    gate.let(4)
    with open_stream(server.url, n=2):
        assert len(server.api.worker.streams) == 2
    gate.let(1)  # the abort runs after the current step
    drained(server)
    gate.let(10_000)
    engine = server.api.worker.engine
    assert server.ask(lambda e: (e.check_integrity(), e.cache.groups[0].pool.n_used))[1] == 0
    assert engine.stats.finished == {"abort": 2}
    assert b'whorl_sequences_finished_total{reason="abort"} 2.0' in server.api.metrics.exposition


def test_disconnect_before_full_response_aborts(gated: tuple[Running, Gate]) -> None:
    server, gate = gated
    with socket.create_connection(("127.0.0.1", server.port)) as s:
        s.sendall(raw_request("1.1", stream=False))
        gate.let(2)
        while not server.in_loop(lambda: server.api.worker.running):
            pass
    gate.let(1)
    drained(server)
    gate.let(10_000)
    assert server.ask(lambda e: e.stats.finished) == {"abort": 1}


def test_slow_reader_does_not_block_others() -> None:
    with running(make_state()) as server:
        server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect(("127.0.0.1", server.port))
        slow.sendall(raw_request("1.0", n=8, logprobs=20, seed=1))
        fast = server.post("/v1/completions", json=STREAM | {"stream": False}, timeout=60)
        assert fast.json()["usage"]["completion_tokens"] == 200
        drained(server)  # all eight end although no data was read
        server.ask(lambda e: e.check_integrity())
        got = bytearray()
        slow.settimeout(60)
        while part := slow.recv(1 << 16):
            got += part
        slow.close()
    assert len(got) > 100_000 and got.endswith(b"data: [DONE]\n\n")
    events = [json.loads(e) for e in re.findall("^data: ({.*)$", got.decode(), re.M)]
    tokens = sum(len(c["logprobs"]["tokens"]) for e in events for c in e["choices"])
    assert tokens == 8 * 200
    assert len(events) < 1000  # unread deltas were merged


@async_test
async def test_event_stream_drops_stalled_reader() -> None:
    closed: list[bool] = []

    async def events() -> Any:
        yield b"data: 1\n\n"
        yield b"data: 2\n\n"

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()  # full buffers

    await EventStream(events(), lambda: closed.append(True), stall_seconds=0.01)({}, receive, send)
    assert closed == [True]


ROOT = Path(__file__).parents[3]
CHILD = """
import sys
from tests.support.serve.live_server import make_state, make_tiny_engine
from whorl.serve.server import bind_socket, run_server

engine = make_tiny_engine()
real, n = engine.step, 0

def step():
    global n
    n += 1
    if n == 4:
        assert sys.stdin.readline()  # released by the test
    return real()

engine.step = step
api = make_state(engine, drain_seconds=60)
run_server(api, bind_socket(api.config), lambda url: print(url, flush=True))
"""


def test_sigterm_drains_running_and_rejects_new_requests() -> None:
    pipe, env = subprocess.PIPE, os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD]
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env, cwd=ROOT)
    assert process.stdout is not None and process.stdin is not None
    url = process.stdout.readline().strip()
    try:
        with open_stream(url) as lines:
            process.send_signal(signal.SIGTERM)
            while httpx.get(f"{url}/health").json()["status"] != "draining":
                pass
            assert httpx.get(f"{url}/health/ready").status_code == 503
            late = httpx.post(f"{url}/v1/completions", json=STREAM)
            assert late.status_code == 503 and late.json()["error"]["code"] == "draining"
            assert int(late.headers["retry-after"]) == 60
            process.stdin.write("go\n")
            process.stdin.flush()
            assert finish_reason(lines) == "length"
        assert process.wait(60) == 0
    finally:
        process.kill()


def test_second_sigterm_ends_without_a_traceback() -> None:
    pipe, env = subprocess.PIPE, os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD]
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env, cwd=ROOT)
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    try:
        with open_stream(url):
            process.send_signal(signal.SIGTERM)
            while httpx.get(f"{url}/health").json()["status"] != "draining":
                pass
            process.send_signal(signal.SIGTERM)
            errors = process.communicate("go\n", timeout=60)[1]
        assert process.returncode == 0 and "Traceback" not in errors
    finally:
        process.kill()


def test_drain_timeout_ends_streams_with_an_error() -> None:
    engine = make_tiny_engine()
    gate = Gate(engine)
    server = Running(make_state(engine, drain_seconds=0))
    gate.let(2)
    with open_stream(server.url) as lines:
        server.in_loop(server.server.drain)
        *_, event = filter(None, lines)
        assert json.loads(event.removeprefix("data: "))["error"]["code"] == "shutdown"
    gate.let(10_000)
    server.thread.join(60)
    assert not server.thread.is_alive() and engine.stats.finished == {"abort": 1}
    engine.check_integrity()


def test_connections_set_tcp_nodelay(gated: tuple[Running, Gate]) -> None:
    """With Nagle's algorithm each small event would be delayed by up to 40 ms."""
    server, _ = gated
    with socket.create_connection(("127.0.0.1", server.port)) as s:
        s.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert s.recv(100)

        def delays() -> list[int]:
            ends = [c.transport.get_extra_info("socket") for c in server.server.server_state.connections]
            return [end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for end in ends]

        assert server.in_loop(delays) == [1]


@async_test
async def test_worker_fails_all_streams_when_the_engine_fails() -> None:
    engine = make_tiny_engine()
    deltas = [Delta(str(i), (Token(65, -1.0, -1.0),), b"A") for i in range(3)]
    engine.step = Mock(side_effect=[deltas, ArithmeticError("a bug")])  # type: ignore[method-assign]
    worker = EngineWorker(engine)
    worker.start()
    for stream in [worker.submit(Request(id=str(i), ids=(1,))) for i in range(3)]:
        await stream.admitted()
        with pytest.raises(RuntimeError, match="engine failed"):
            while True:
                await stream.next()
    assert isinstance(worker.error, ArithmeticError) and not worker.streams
    with pytest.raises(RuntimeError, match="engine failed"):
        await worker.submit(Request(id="late", ids=(1,))).admitted()
    with pytest.raises(RuntimeError):
        await worker.call(lambda engine: engine.busy)
    await worker.stop()


def test_server_reports_failed_engine() -> None:
    with running(make_state()) as server:
        server.ask(lambda e: setattr(e, "step", lambda: 1 / 0))
        answer = server.post("/v1/completions", json=STREAM | {"stream": False})
        assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
        assert "ZeroDivision" not in answer.text
        assert server.get("/health").status_code == 503
        assert server.post("/v1/completions", json=STREAM).status_code == 503
        assert server.get("/metrics").status_code == 200
        assert server.get("/v1/engine/state").json()["status"] == "failed"


@async_test
async def test_stream_merges_unread_deltas() -> None:
    worker = EngineWorker(make_tiny_engine())
    worker.start()
    stream = worker.submit(Request(id="a", ids=(1, 2, 3), max_tokens=50))
    await worker.wait_drained()
    whole = await stream.next()
    assert len(whole.tokens) == 50 and whole.finish_reason == "length"
    stream.close()
    left = worker.submit(Request(id="b", ids=(1, 2, 3), max_tokens=50))
    left.close()
    left.close()
    await worker.wait_drained()
    await worker.call(lambda e: e.check_integrity())
    await worker.stop()

"""Requests through the router over real sockets, with streaming and failing replicas."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.support.router.fake_replica import FakeReplica, event, running
from tests.support.router.harness import LONG, async_test, breaking, world

from whorl.router.breaker import RetryBudget
from whorl.router.proxy import SSEFramer

# Forwarding


@async_test
async def test_stream_forwards_only_complete_events() -> None:
    async with world(1) as w, w.client.stream("POST", "/v1/completions", json={"prompt": "hold:2"}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-whorl-replica"] == "r0"
        parts = answer.aiter_raw()
        seen = b""
        while b"r0/1" not in seen:
            seen += await anext(parts)
        await w.fakes[0].held.wait()  # the replica has sent half an event
        assert seen == event("r0/0") + event("r0/1")
        w.fakes[0].release.set()
        rest = b"".join([part async for part in parts])
        assert rest == event("half") + b"data: [DONE]\n\n"


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_sse_framer_is_independent_of_chunk_boundaries(end: bytes) -> None:
    stream = b"".join(b'data: {"n": %d}' % i + end for i in range(5)) + b"data: [DO"
    for size in range(1, 12):
        events, out = SSEFramer(), []
        for i in range(0, len(stream), size):
            if whole := events.feed(stream[i : i + size]):
                assert whole.endswith(end)
                out.append(whole)
        assert b"".join(out) + events.tail == stream
        assert events.tail == b"data: [DO"


def test_sse_framer_bounds_its_buffer() -> None:
    events = SSEFramer()
    given = sum(len(events.feed(b"x" * 65536)) for _ in range(64))
    assert given + len(events.tail) == 64 * 65536 and len(events.tail) <= SSEFramer.MAX_EVENT_BYTES


@async_test
async def test_proxy_forwards_path_query_headers_and_status() -> None:
    async with world(1) as w:
        answer = await w.client.post(
            "/v1/x%20y?a=1&b=2", json={"prompt": "hello"}, headers={"x-own": "7", "authorization": "Bearer k"}
        )
        assert answer.json() == {"name": "r0/", "path": "/v1/x y", "query": "a=1&b=2", "prompt": "hello"}
        got = w.fakes[0].headers[0]
        assert (got["x-own"], got["authorization"], got["x-forwarded-for"]) == ("7", "Bearer k", "127.0.0.1")
        assert (await w.ask("status:429")).status_code == 429
        assert (await w.client.get("/v1/models")).status_code == 200


@async_test
async def test_client_disconnect_reaches_the_replica() -> None:
    async with world(1) as w:
        async with w.client.stream("POST", "/v1/completions", json={"prompt": "hold"}) as answer:
            await anext(answer.aiter_raw())
        await w.fakes[0].left.wait()
        while w.router.pool.policy.loads["r0"].running:
            await asyncio.sleep(0)
        assert w.metric('whorl_router_attempts_total{outcome="cancelled"') == 1
        assert w.router.pool.totals.finished == 0, "cancelled requests are not counted"


@async_test
async def test_conversation_stays_on_the_replica_with_its_prefix() -> None:
    async with world(3) as w:
        said = [{"role": "user", "content": LONG}]
        homes = set()
        for turn in range(6):
            answer = await w.client.post("/v1/chat/completions", json={"model": "m", "messages": said})
            homes.add(answer.headers["x-whorl-replica"])
            said += [{"role": "assistant", "content": LONG}, {"role": "user", "content": f"turn {turn}"}]
        assert len(homes) == 1
        home = homes.pop()
        assert w.metric(f'whorl_router_prompt_blocks_total{{cache="cached",replica="{home}"') > 0
        w.router.pool.on_restart(home)
        assert home not in w.router.pool.available(), "a restarted replica is unavailable until it is healthy"


# Failures


@async_test
async def test_failed_request_is_retried_and_circuit_opens() -> None:
    async with breaking() as (url, count), world(1, extra={"bad": url}) as w:
        w.router.pool.policy.begin((), "r0")  # the broken replica has the lower load
        for _ in range(8):
            answer = await w.ask("hello")
            assert (answer.status_code, answer.headers["x-whorl-replica"]) == (200, "r0")
        assert count[0] == 3, "three failures in a row open its circuit"
        assert w.metric('whorl_router_replica_circuit_open{replica="bad"') == 1
        assert w.metric("whorl_router_retries_total") == 3
        assert w.router.pool.totals.within_slo == 8


@async_test
async def test_truncated_json_response_is_retried() -> None:
    half = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    async with breaking(half) as (url, count), world(1, extra={"bad": url}) as w:
        w.router.pool.policy.begin((), "r0")
        answer = await w.ask("hello")
        assert answer.json()["name"] == "r0/" and count[0] == 1


@async_test
async def test_broken_stream_ends_with_error_and_no_retry() -> None:
    chunk = event("one") + event("two")[:9]
    half = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    half += f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n"
    async with breaking(half) as (url, count), world(1, extra={"bad": url}) as w:
        w.router.pool.policy.begin((), "r0")
        answer = await w.ask("hello")
        first, second, rest = answer.content.split(b"\n\n")
        assert first + b"\n\n" == event("one") and rest == b""
        error = json.loads(second.removeprefix(b"data: "))["error"]
        assert error["code"] == "replica_lost" and "bad broke the connection" in error["message"]
        assert count[0] == 1 and w.fakes[0].prompts == []


@async_test
async def test_read_timeout_counts_as_failure() -> None:
    async with world(1, read_timeout=0.05, budget=RetryBudget()) as w:
        answer = await w.ask("hold:0")
        assert b"sent no data for 0.05 s" in answer.content
        assert w.metric('whorl_router_attempts_total{outcome="timeout"') == 1


@async_test
async def test_status_503_is_retried_and_500_is_not() -> None:
    async with world(2) as w:
        answer = await w.ask("status:503")
        assert answer.status_code == 503
        assert [len(f.prompts) for f in w.fakes] == [1, 1], "both replicas got the request"
        for _ in range(6):
            assert (await w.ask("status:500")).json()["error"]["code"] == "fake"
        assert sum(len(f.prompts) for f in w.fakes) == 2 + 6
        assert len(w.router.pool.available()) == 2
        for _ in range(12):
            await w.ask("status:502")
        assert w.router.pool.available() == []
        refused = await w.ask("hello")
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"] | {"message": ""} == {
            "message": "", "type": "server_error", "param": None, "code": "no_replica",
        }  # fmt: skip


@async_test
async def test_empty_retry_budget_prevents_retry() -> None:
    async with breaking() as (url, _), world(1, extra={"bad": url}, budget=RetryBudget(0.0, 1.0)) as w:
        w.router.pool.policy.begin((), "r0")
        answers = [await w.ask("hello") for _ in range(4)]
        assert sorted(a.status_code for a in answers) == [200, 200, 503, 503]
        assert any("retry budget is empty" in a.text for a in answers)


@async_test
async def test_open_circuit_is_probed_and_closes() -> None:
    now = [0.0]
    async with breaking() as (url, count), world(0, extra={"r": url}) as w:
        w.router.pool.clock = lambda: now[0]
        for _ in range(5):
            assert (await w.ask("x")).status_code == 503
        assert count[0] == 3
        now[0] = 1.1
        await w.ask("x")
        await w.ask("x")
        assert count[0] == 4, "one probe, which failed"
        fake = FakeReplica("back/")
        async with running(fake) as better:
            w.router.pool.get("r").url = better
            now[0] = 10.0
            assert (await w.ask("x")).json()["name"] == "back/"
            assert w.metric('whorl_router_replica_circuit_open{replica="r"') == 0

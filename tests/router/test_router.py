"""Requests through the router over real sockets: streams, failing replicas, draining, health checks, goodput."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import random
from collections.abc import AsyncIterator

import pytest
from tests.support.router.fake_replica import FakeReplica, event, running
from tests.support.router.harness import LONG, async_test, breaking, rest, status_and_code, world

from whorl.errors import ConfigError
from whorl.http.draining_server import DrainingServer
from whorl.router.breaker import RetryBudget
from whorl.router.metrics import SLO
from whorl.router.proxy import SSEFramer
from whorl.router.router import make_router, request_block_hashes, serve_router
from whorl.router.routing_policy import RoutingPolicy

JSON = {"content-type": "application/json"}
LONG_HASHES = request_block_hashes("/v1/completions", json.dumps({"prompt": LONG}).encode())

# Forwarding


@async_test
async def test_stream_forwards_only_complete_events() -> None:
    async with world(1) as w, w.stream("hold:2") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-whorl-replica"] == "r0"
        parts = answer.aiter_raw()
        seen = b""
        while b"r0/1" not in seen:
            seen += await anext(parts)
        await w.fakes[0].held.wait()  # the replica has sent half an event
        assert seen == event("r0/0") + event("r0/1")
        w.fakes[0].release.set()
        assert await rest(parts) == event("half") + b"data: [DONE]\n\n"


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_sse_framer_is_independent_of_chunk_boundaries(end: bytes) -> None:
    stream = b"".join(b'data: {"n": %d}' % i + end for i in range(5)) + b"data: [DO"
    for size in range(1, 12):
        events = SSEFramer()
        fed = [events.feed(stream[i : i + size]) for i in range(0, len(stream), size)]
        assert all(whole.endswith(end) for whole in fed if whole)
        assert b"".join(fed) + events.tail == stream
        assert events.tail == b"data: [DO"


def test_sse_framer_bounds_its_buffer() -> None:
    events = SSEFramer()
    given = sum(len(events.feed(b"x" * 65536)) for _ in range(64))
    assert given + len(events.tail) == 64 * 65536 and len(events.tail) <= SSEFramer.MAX_EVENT_BYTES


@async_test
async def test_proxy_forwards_path_query_headers_and_status() -> None:
    async with world(1) as w:
        headers = {"x-own": "7", "authorization": "Bearer k"}
        answer = await w.client.post("/v1/x%20y?a=1&b=2", json={"prompt": "hello"}, headers=headers)
        assert answer.json() == {"name": "r0/", "path": "/v1/x y", "query": "a=1&b=2", "prompt": "hello"}
        assert w.fakes[0].headers[0].items() >= (headers | {"x-forwarded-for": "127.0.0.1"}).items()
        assert (await w.ask("status:429")).status_code == 429
        assert (await w.client.get("/v1/models")).status_code == 200


@async_test
async def test_client_disconnect_reaches_the_replica() -> None:
    async with world(1) as w:
        async with w.stream("hold") as answer:
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
        (home,) = homes
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
        first, second, end = (await w.ask("hello")).content.split(b"\n\n")
        assert first + b"\n\n" == event("one") and end == b""
        error = json.loads(second.removeprefix(b"data: "))["error"]
        assert error["code"] == "replica_lost" and "bad broke the connection" in error["message"]
        assert count[0] == 1 and w.fakes[0].prompts == []


@async_test
async def test_read_timeout_counts_as_failure() -> None:
    async with world(1, read_timeout=0.05, budget=RetryBudget()) as w:
        assert b"sent no data for 0.05 s" in (await w.ask("hold:0")).content
        assert w.metric('whorl_router_attempts_total{outcome="timeout"') == 1


@async_test
async def test_status_503_is_retried_and_500_is_not() -> None:
    async with world(2) as w:
        assert (await w.ask("status:503")).status_code == 503
        assert [len(f.prompts) for f in w.fakes] == [1, 1], "both replicas got the request"
        for _ in range(6):
            assert status_and_code(await w.ask("status:500")) == (500, "fake")
        assert sum(len(f.prompts) for f in w.fakes) == 2 + 6
        assert len(w.router.pool.available()) == 2
        for _ in range(12):
            await w.ask("status:502")
        assert w.router.pool.available() == []
        rejected = await w.ask("hello")
        assert status_and_code(rejected) == (503, "no_replica") and rejected.headers["retry-after"] == "1"
        error = rejected.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"] == "server_error" and error["param"] is None


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
        async with running(FakeReplica("back/")) as better:
            w.router.pool.get("r").url = better
            now[0] = 10.0
            assert (await w.ask("x")).json()["name"] == "back/"
            assert w.metric('whorl_router_replica_circuit_open{replica="r"') == 0


# Draining, health checks and administration


@async_test
async def test_drain_finishes_running_and_sends_no_new_requests() -> None:
    async with world(2) as w, w.stream("hold") as answer:
        parts = answer.aiter_raw()
        await anext(parts)
        name = answer.headers["x-whorl-replica"]
        replicas = (await w.client.post("/v1/router/drain", json={"replica": name})).json()["replicas"]
        state = next(r for r in replicas if r["name"] == name)
        assert state["draining"] and not state["drained"] and state["running"] == 1
        others = {(await w.ask("hello")).headers["x-whorl-replica"] for _ in range(6)}
        assert len(others) == 1 and name not in others
        w.fakes[int(name[1])].release.set()
        assert (await rest(parts)).endswith(b"data: [DONE]\n\n")
        assert next(r for r in w.router.pool.describe() if r["name"] == name)["drained"]
        await w.client.post("/v1/router/resume", json={"replica": name})
        assert len(w.router.pool.available()) == 2
        assert (await w.client.post("/v1/router/drain", json={"replica": "r7"})).status_code == 404
        deep = b'{"replica": ' + b"[" * 1000 + b"]" * 1000 + b"}"
        for invalid in (b"[]", b"\xff", b"[" * 8000, deep, b'{"replica": 1}'):
            answer = await w.client.post("/v1/router/drain", content=invalid, headers=JSON)
            assert answer.status_code == 400


@async_test
async def test_web_pages_cannot_reach_a_local_router() -> None:
    async with world(1) as w:
        w.router.local_only = True
        body = b'{"replica": "r0"}'

        async def drain(**headers: str) -> int:
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            return (await w.client.post("/v1/router/drain", content=body, headers=given)).status_code

        assert await drain(content_type="text/plain") == 403  # what a form of another site can send
        assert await drain(**JSON, origin="http://evil.example") == 403
        assert await drain(**JSON, origin="null") == 403
        assert await drain(**JSON, host="evil.example") == 403
        assert not w.router.pool.describe()[0]["draining"]
        for host in ("evil.example", "evil.example:80", "[::1].evil", "127.0.0.1.evil.example"):
            for path in ("/v1/router/replicas", "/v1/completions", "/health", "/health/live", "/metrics"):
                answer = await w.client.get(path, headers={"host": host})
                assert status_and_code(answer) == (403, "foreign_host"), (host, path)
        for host in ("localhost", "LOCALHOST:80", "127.0.0.1:8000", "[::1]:8000"):
            answer = await w.client.get("/v1/router/replicas", headers={"host": host})
            assert answer.status_code == 200, host
        assert await drain(**JSON) == 200


@async_test
async def test_rebound_name_of_a_page_is_no_admin() -> None:
    """A router that requires keys accepts any Host, and a page's own name may point to this machine."""
    async with world(1, is_api_key=lambda key: False) as w:
        rebound = {"host": "evil.example", "origin": "http://evil.example"}
        answer = await w.client.post("/v1/router/drain", json={"replica": "r0"}, headers=rebound)
        assert status_and_code(answer) == (401, "admin_key_needed")
        assert not w.router.pool.describe()[0]["draining"]


@async_test
async def test_path_cannot_name_another_host() -> None:
    """A path that decodes to "/..." but begins with "%2F@" would turn the replica's address into user information."""
    other = FakeReplica("secret/")
    async with running(other) as url, world(1) as w:
        port = w.client.base_url.port
        for path in (f"%2F@{url.removeprefix('http://')}/internal", "%2Fx", "%2f.evil.example"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
            assert b" 400 " in head and b"invalid_path" in body, path
        assert other.prompts == w.fakes[0].prompts == []


@async_test
async def test_path_cannot_leave_the_prefix_of_a_replica() -> None:
    other = FakeReplica("x/")
    async with running(other) as url, world(0, extra={"t": f"{url}/tenant-a"}) as w:
        await w.check_health()
        port, n_checks = w.client.base_url.port, len(other.prompts)
        targets = (
            "/../tenant-b/x",
            "/%2e%2e/tenant-b/x",
            "/..%2ftenant-b/x",
            "/..;/x",
            "/health/../v1/models",
            "//x",
        )
        for target in (*targets, "/a\\..\\b", "http://localhost/../x", "*"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET {target} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
            assert b" 400 " in head and b"invalid_path" in body, target
        assert len(other.prompts) == n_checks


@async_test
async def test_metrics_need_a_key_if_there_are_keys() -> None:
    async with world(1, is_api_key=lambda key: key == "wk-1") as w:
        assert status_and_code(await w.client.get("/metrics", headers={"host": "a"})) == (
            401,
            "invalid_api_key",
        )
        for key, status in (("wk-1", 200), ("wk-2", 401)):
            headers = {"authorization": f"Bearer {key}", "host": "a"}
            assert (await w.client.get("/metrics", headers=headers)).status_code == status
        assert (await w.client.get("/health")).status_code == 200
        assert (await w.client.get("/health/live")).json() == {"status": "ok"}
    async with world(0, admin_key_sha256=hashlib.sha256(b"secret").hexdigest()) as w:
        assert (await w.client.get("/metrics")).status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert (await w.client.get("/metrics", headers=headers)).status_code == 200


def test_address_with_a_password_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        make_router({"a": "http://me:hunter2@host"})
    assert "hunter2" not in str(refused.value)


@async_test
async def test_large_bodies_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whorl.router.router.IN_FLIGHT_BYTES", 1 << 20)
    monkeypatch.setattr("whorl.router.router.MAX_BODY_BYTES", 1 << 20)
    async with world(1) as w:
        held = w.router._bodies.shares
        assert held.take("127.0.0.1", 1 << 20)
        answer = await w.client.post("/v1/completions", content=b"x" * (1 << 18), headers=JSON)
        assert status_and_code(answer) == (503, "bodies_full") and answer.headers["retry-after"] == "2"
        held.give_back("127.0.0.1", 1 << 20)
        answer = await w.client.post(
            "/v1/completions", content=b"x" * 9, headers={"content-encoding": "gzip"}
        )
        assert status_and_code(answer) == (415, "unsupported_encoding") and w.fakes[0].prompts == []
        assert (await w.ask("hello")).status_code == 200


@async_test
async def test_body_without_a_valid_key_is_not_read() -> None:
    async with world(1, is_api_key=lambda key: key == "wk-1") as w:
        for given in ({}, {"authorization": "Bearer wk-2"}, {"authorization": "Basic wk-1"}):
            answer = await w.client.post("/v1/completions", content=b"x" * (1 << 20), headers=given)
            assert status_and_code(answer) == (401, "invalid_api_key")
        assert (await w.client.get("/v1/models")).status_code == 200, "without a body the replica decides"
        await w.client.post("/v1/completions", json={"prompt": "a"}, headers={"authorization": "bearer wk-1"})
        assert w.fakes[0].prompts == ["", "a"]


def test_deeply_nested_prompt_raises_nothing() -> None:
    for depth in (100, 900, 100_000):
        request_block_hashes("/v1/completions", b'{"prompt":' + b"[" * depth + b"]" * depth + b"}")


@async_test
async def test_half_sent_body_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whorl.router.router.BODY_SECONDS", 0.2)

    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(0.6)
        yield b"}"

    async with world(1) as w:
        for path in ("/v1/completions", "/v1/router/drain"):
            answer = await w.client.post(path, content=slow(), headers=JSON)
            assert status_and_code(answer) == (408, "timeout"), path


@async_test
async def test_public_router_uses_no_replica_without_keys() -> None:
    async with world(2) as w:
        w.router.pool.keys_required = True
        w.fakes[0].health = {"status": "ok", "keys_required": True}
        await w.check_health()
        first, second = w.router.pool.describe()
        assert first["healthy"] and not first["problem"]
        assert not second["healthy"] and "requires no API key" in second["problem"]
        w.fakes[1].health = {"status": "ok", "keys_required": True}
        await w.check_health()
        assert len(w.router.pool.available()) == 2


@async_test
async def test_health_checks_update_replica_state() -> None:
    async with world(2) as w:
        fleet, fake = w.router.pool, w.fakes[0]
        fake.health, fake.health_status = {"status": "draining"}, 503
        await w.check_health()
        assert fleet.available() == ["r1"] and fleet.replicas["r0"].draining
        fake.health, fake.health_status = {"status": "broken"}, 500
        await w.check_health()
        assert fleet.available() == ["r0", "r1"], "a single failure is tolerated"
        await w.check_health()
        assert fleet.available() == ["r1"]
        fleet.policy.begin(LONG_HASHES, "r0")
        fake.health = {"status": "ok", "boot_id": 1, "evicted_tokens": 64, "queue": 5}
        fake.health_status = 200
        await w.check_health()
        assert fleet.available() == ["r0", "r1"]
        assert fleet.snapshot().queue == 5 + 0
        fleet.policy.begin(LONG_HASHES, "r0")
        known = len(fleet.policy.indexes["r0"])
        fake.health["evicted_tokens"] = 128
        await w.check_health()
        assert len(fleet.policy.indexes["r0"]) == known - 2
        fake.health["boot_id"] = 2
        await w.check_health()
        assert len(fleet.policy.indexes["r0"]) == 0
        assert (await w.client.get("/health")).json() == {"status": "ok", "replicas": 2, "available": 2}
        w.router.draining = True
        assert (await w.client.get("/health")).status_code == 503
        assert status_and_code(await w.ask("hello")) == (503, "draining")


@async_test
async def test_admin_endpoints_require_key_or_local_caller() -> None:
    async with world(1) as w:

        async def status(**headers: str) -> int:
            answer = await w.client.get("/v1/router/replicas", headers=headers)
            return int(answer.status_code)

        advice = (await w.client.get("/v1/router/advice")).json()
        assert advice["change"] == 0 and advice["reasons"]
        assert await status(forwarded="for=1.2.3.4") == 401
        assert await status(**{"x-forwarded-for": "1.2.3.4"}) == 401
        w.router.admin_key_sha256 = hashlib.sha256(b"secret").hexdigest()
        assert await status() == await status(authorization="Bearer secrets") == 401
        assert await status(authorization="Bearer secret") == 200


@async_test
async def test_body_over_limit_returns_413(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whorl.router.router.MAX_BODY_BYTES", 1 << 20)
    async with world(1) as w:
        for path, n in (("/v1/completions", 1 << 21), ("/v1/router/drain", 1 << 14)):
            answer = await w.client.post(path, content=b"x" * n, headers=JSON)
            assert status_and_code(answer) == (413, "request_too_large") and w.fakes[0].prompts == [], path


@async_test
async def test_goodput_counts_requests_within_slo() -> None:
    async with world(1, slo=SLO(first_byte=0.5)) as w:
        now = [0.0]
        w.router.pool.clock = lambda: now[0]
        await w.ask("hello")
        slow = asyncio.ensure_future(w.ask("hold:0"))
        await w.fakes[0].held.wait()
        now[0] = 1.0
        w.fakes[0].release.set()
        await slow
        await w.ask("status:400")  # client errors are not counted
        assert (w.router.pool.totals.within_slo, w.router.pool.totals.finished) == (1, 2)
        assert w.metric("whorl_router_goodput") == 0.5


def test_request_block_hashes_of_invalid_bodies_are_empty() -> None:
    for body in (b"", b"\xff", b"[1]", b'{"prompt": {"a": 1}}', b'{"messages": 3}', b"{" * 5000):
        assert request_block_hashes("/v1/completions", body) == ()
    assert request_block_hashes("/elsewhere", json.dumps({"prompt": LONG}).encode()) == ()
    assert len(LONG_HASHES) == len(LONG) // 128


@async_test
async def test_openai_client_maps_router_errors() -> None:
    openai = pytest.importorskip("openai")
    async with world(1) as w:
        client = openai.AsyncOpenAI(base_url=f"{w.client.base_url}/v1", api_key="k", max_retries=0)
        said = [{"role": "user", "content": "count:3"}]
        stream = await client.chat.completions.create(model="m", messages=said, stream=True)
        assert [c.choices[0].delta.content async for c in stream] == ["r0/0", "r0/1", "r0/2"]
        w.router.pool.drain("r0")
        with pytest.raises(openai.InternalServerError, match="draining"):
            await client.chat.completions.create(model="m", messages=said)
        await client.close()


def test_router_excludes_libraries_from_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.unfreeze()
    frozen: list[int] = []
    monkeypatch.setattr(DrainingServer, "run", lambda self: frozen.append(gc.get_freeze_count()))
    serve_router(make_router({}), "127.0.0.1", 0)
    gc.unfreeze()
    assert frozen[0] > 10_000


def test_make_router_accepts_a_policy() -> None:
    policy = RoutingPolicy(random.Random(0), load_slack=1.0)
    assert make_router({"a": "http://127.0.0.1:1/"}, policy=policy).pool.policy is policy

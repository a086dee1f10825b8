"""Draining, health checks, admin endpoints, limits and goodput of the router."""

from __future__ import annotations

import asyncio
import hashlib
import json

import pytest
from tests.support.router.harness import LONG, async_test, world

from whorl.router.metrics import SLO
from whorl.router.router import make_router, request_block_hashes
from whorl.router.routing_policy import RoutingPolicy


@async_test
async def test_drain_finishes_running_and_sends_no_new_requests() -> None:
    async with world(2) as w, w.client.stream("POST", "/v1/completions", json={"prompt": "hold"}) as answer:
        parts = answer.aiter_raw()
        await anext(parts)
        name = answer.headers["x-whorl-replica"]
        told = (await w.client.post("/v1/router/drain", json={"replica": name})).json()["replicas"]
        state = next(r for r in told if r["name"] == name)
        assert state["draining"] and not state["drained"] and state["running"] == 1
        others = {(await w.ask("hello")).headers["x-whorl-replica"] for _ in range(6)}
        assert len(others) == 1 and name not in others
        w.fakes[int(name[1])].release.set()
        assert b"".join([p async for p in parts]).endswith(b"data: [DONE]\n\n")
        state = next(r for r in w.router.pool.describe() if r["name"] == name)
        assert state["drained"]
        await w.client.post("/v1/router/resume", json={"replica": name})
        assert len(w.router.pool.available()) == 2
        assert (await w.client.post("/v1/router/drain", json={"replica": "r7"})).status_code == 404
        assert (await w.client.post("/v1/router/drain", json=[])).status_code == 400
        assert (await w.client.post("/v1/router/drain", content=b"\xff")).status_code == 400


@async_test
async def test_health_checks_update_replica_state() -> None:
    async with world(2) as w:
        fleet, fake = w.router.pool, w.fakes[0]
        fake.health, fake.health_status = {"status": "draining"}, 503
        await w.look()
        assert fleet.available() == ["r1"] and fleet.replicas["r0"].draining
        fake.health, fake.health_status = {"status": "broken"}, 500
        await w.look()
        assert fleet.available() == ["r0", "r1"], "a single failure is tolerated"
        await w.look()
        assert fleet.available() == ["r1"]
        hashes = request_block_hashes("/v1/completions", json.dumps({"prompt": LONG}).encode())
        fleet.policy.begin(hashes, "r0")
        fake.health, fake.health_status = (
            {"status": "ok", "boot_id": 1, "evicted_tokens": 64, "queue": 5},
            200,
        )
        await w.look()
        assert fleet.available() == ["r0", "r1"]
        assert fleet.snapshot().queue == 5 + 0
        fleet.policy.begin(hashes, "r0")
        known = len(fleet.policy.indexes["r0"])
        fake.health["evicted_tokens"] = 128
        await w.look()
        assert len(fleet.policy.indexes["r0"]) == known - 2
        fake.health["boot_id"] = 2
        await w.look()
        assert len(fleet.policy.indexes["r0"]) == 0
        assert (await w.client.get("/health")).json() == {"status": "ok", "replicas": 2, "available": 2}
        w.router.draining = True
        assert (await w.client.get("/health")).status_code == 503
        refused = await w.ask("hello")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")


@async_test
async def test_admin_endpoints_require_key_or_local_caller() -> None:
    async with world(1) as w:
        advice = await w.client.get("/v1/router/advice")
        assert advice.json()["change"] == 0 and advice.json()["reasons"]
        proxied = {"x-forwarded-for": "1.2.3.4"}
        assert (await w.client.get("/v1/router/replicas", headers=proxied)).status_code == 401
        w.router.admin_key_sha256 = hashlib.sha256(b"secret").hexdigest()
        assert (await w.client.get("/v1/router/replicas")).status_code == 401
        right, wrong = {"authorization": "Bearer secret"}, {"authorization": "Bearer secrets"}
        assert (await w.client.get("/v1/router/replicas", headers=wrong)).status_code == 401
        assert (await w.client.get("/v1/router/replicas", headers=right)).status_code == 200


@async_test
async def test_body_over_limit_returns_413(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whorl.router.router.MAX_BODY_BYTES", 1 << 20)
    async with world(1) as w:
        answer = await w.client.post("/v1/completions", content=b"x" * (1 << 21))
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        assert w.fakes[0].prompts == []


@async_test
async def test_goodput_counts_requests_within_slo() -> None:
    async with world(1, slo=SLO(first_byte=0.5)) as w:
        now = [0.0]
        w.router.pool.clock = lambda: now[0]
        await w.ask("hello")
        asked = asyncio.ensure_future(w.ask("hold:0"))
        await w.fakes[0].held.wait()
        now[0] = 1.0
        w.fakes[0].release.set()
        await asked
        await w.ask("status:400")  # client errors are not counted
        assert (w.router.pool.totals.within_slo, w.router.pool.totals.finished) == (1, 2)
        assert w.metric("whorl_router_goodput") == 0.5


def test_request_block_hashes_of_invalid_bodies_are_empty() -> None:
    for body in (b"", b"\xff", b"[1]", b'{"prompt": {"a": 1}}', b'{"messages": 3}', b"{" * 5000):
        assert request_block_hashes("/v1/completions", body) == ()
    assert request_block_hashes("/elsewhere", json.dumps({"prompt": LONG}).encode()) == ()
    assert (
        len(request_block_hashes("/v1/completions", json.dumps({"prompt": LONG}).encode()))
        == len(LONG) // 128
    )


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


def test_make_router_accepts_a_policy() -> None:
    import random

    policy = RoutingPolicy(random.Random(0), load_slack=1.0)
    assert make_router({"a": "http://127.0.0.1:1/"}, policy=policy).pool.policy is policy

"""Requests through the router: over real sockets, to replicas that stream, break, drain and die."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
import pytest
from fake_replica import FakeReplica, event, running

from whorl.serve.fleet.breaker import Breaker, RetryBudget
from whorl.serve.fleet.policy import Policy
from whorl.serve.fleet.relay import Events
from whorl.serve.fleet.router import Router, hashes_of, make_router
from whorl.serve.fleet.tolls import Promise

LONG = "a prompt that is long enough to fill more than a block of the index " * 8


@dataclass
class World:
    """A router over fakes, all in one loop. `look` replaces waiting for the router's next look."""

    router: Router
    fakes: list[FakeReplica]
    client: httpx.AsyncClient
    look: Callable[[], Awaitable[None]]

    async def ask(self, prompt: str, **more: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"prompt": prompt, **more})

    def metric(self, text: str) -> float:
        lines = self.router.tolls.exposition(self.router.fleet).decode().splitlines()
        return sum(float(x.split()[-1]) for x in lines if x.startswith(text))


@asynccontextmanager
async def world(
    n: int = 2,
    *,
    extra: dict[str, str] | None = None,
    breaker: Callable[[], Breaker] = Breaker,
    **settings: Any,
) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        fakes = [FakeReplica(f"r{i}/") for i in range(n)]
        urls = {f"r{i}": await stack.enter_async_context(running(f)) for i, f in enumerate(fakes)}
        router = make_router({**urls, **(extra or {})}, look_every=3600.0, **settings)
        for replica in router.fleet.replicas.values():
            replica.breaker = breaker()
        url = await stack.enter_async_context(running(router.app))
        timeout = httpx.Timeout(20.0)
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=timeout))
        own = await stack.enter_async_context(httpx.AsyncClient())

        async def look() -> None:
            await router.fleet.look(own)

        yield World(router, fakes, client, look)


@asynccontextmanager
async def breaking(answer: bytes = b"") -> AsyncIterator[tuple[str, list[int]]]:
    """A replica that takes every request, writes `answer` and closes; its /health is fine. (url, requests counted)."""
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


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))  # type: ignore[arg-type]


# What goes through


def test_events_arrive_one_by_one_and_half_an_event_is_not_shown() -> None:
    async def test() -> None:
        async with (
            world(1) as w,
            w.client.stream("POST", "/v1/completions", json={"prompt": "hold:2"}) as answer,
        ):
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["x-whorl-replica"] == "r0"
            parts = answer.aiter_raw()
            seen = b""
            while b"r0/1" not in seen:
                seen += await anext(parts)
            await w.fakes[0].held.wait()  # the replica has written half an event, and waits
            assert seen == event("r0/0") + event("r0/1")
            w.fakes[0].release.set()
            rest = b"".join([part async for part in parts])
            assert rest == event("half") + b"data: [DONE]\n\n"

    run(test)


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_events_cut_anywhere_are_the_same_events(end: bytes) -> None:
    stream = b"".join(b'data: {"n": %d}' % i + end for i in range(5)) + b"data: [DO"
    for size in range(1, 12):
        events, out = Events(), []
        for i in range(0, len(stream), size):
            if whole := events.feed(stream[i : i + size]):
                assert whole.endswith(end)
                out.append(whole)
        assert b"".join(out) + events.tail == stream
        assert events.tail == b"data: [DO"


def test_an_event_without_an_end_is_not_collected_for_ever() -> None:
    events = Events()
    given = sum(len(events.feed(b"x" * 65536)) for _ in range(64))
    assert given + len(events.tail) == 64 * 65536 and len(events.tail) <= Events.LONGEST


def test_path_query_headers_and_status_pass_both_ways() -> None:
    async def test() -> None:
        async with world(1) as w:
            answer = await w.client.post(
                "/v1/x%20y?a=1&b=2",
                json={"prompt": "hello"},
                headers={"x-own": "7", "authorization": "Bearer k"},
            )
            assert answer.json() == {"name": "r0/", "path": "/v1/x y", "query": "a=1&b=2", "prompt": "hello"}
            got = w.fakes[0].headers[0]
            assert (got["x-own"], got["authorization"], got["x-forwarded-for"]) == (
                "7",
                "Bearer k",
                "127.0.0.1",
            )
            assert (await w.ask("status:429")).status_code == 429
            assert (await w.client.get("/v1/models")).status_code == 200

    run(test)


def test_a_client_that_goes_away_is_told_to_the_replica() -> None:
    async def test() -> None:
        async with world(1) as w:
            async with w.client.stream("POST", "/v1/completions", json={"prompt": "hold"}) as answer:
                await anext(answer.aiter_raw())
            await w.fakes[0].left.wait()
            while w.router.fleet.policy.loads["r0"].running:
                await asyncio.sleep(0)
            assert w.metric('whorl_router_attempts_total{outcome="cancelled"') == 1
            assert w.router.fleet.tally.finished == 0, "who left says nothing of the fleet"

    run(test)


def test_a_conversation_stays_where_its_beginning_is_cached() -> None:
    async def test() -> None:
        async with world(3) as w:
            said = [{"role": "user", "content": LONG}]
            homes = set()
            for turn in range(6):
                answer = await w.client.post("/v1/chat/completions", json={"model": "m", "messages": said})
                homes.add(answer.headers["x-whorl-replica"])
                said += [{"role": "assistant", "content": LONG}, {"role": "user", "content": f"turn {turn}"}]
            assert len(homes) == 1
            home = homes.pop()
            assert w.metric(f'whorl_router_prompt_blocks_total{{expected="cached",replica="{home}"') > 0
            w.router.fleet.restarted(home)
            assert home not in w.router.fleet.available(), "a new process is not asked before it is healthy"

    run(test)


# What breaks


def test_what_was_not_answered_is_asked_again_elsewhere_and_the_broken_replica_is_left_alone() -> None:
    async def test() -> None:
        async with breaking() as (url, count), world(1, extra={"bad": url}) as w:
            w.router.fleet.policy.begin(
                (), "r0"
            )  # so that the broken one looks emptier, whenever two are compared
            for _ in range(8):
                answer = await w.ask("hello")
                assert (answer.status_code, answer.headers["x-whorl-replica"]) == (200, "r0")
            assert count[0] == 3, "three failures in a row open its circuit"
            assert w.metric('whorl_router_replica_circuit_open{replica="bad"') == 1
            assert w.metric("whorl_router_retries_total") == 3
            assert w.router.fleet.tally.good == 8

    run(test)


def test_an_answer_cut_in_the_middle_is_asked_again_if_it_was_no_stream() -> None:
    async def test() -> None:
        half = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
        async with breaking(half) as (url, count), world(1, extra={"bad": url}) as w:
            w.router.fleet.policy.begin((), "r0")
            answer = await w.ask("hello")
            assert answer.json()["name"] == "r0/" and count[0] == 1

    run(test)


def test_a_stream_that_breaks_ends_in_an_error_and_is_not_asked_again() -> None:
    async def test() -> None:
        chunk = event("one") + event("two")[:9]
        half = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        half += f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n"
        async with breaking(half) as (url, count), world(1, extra={"bad": url}) as w:
            w.router.fleet.policy.begin((), "r0")
            answer = await w.ask("hello")
            first, second, rest = answer.content.split(b"\n\n")
            assert first + b"\n\n" == event("one") and rest == b""
            error = json.loads(second.removeprefix(b"data: "))["error"]
            assert error["code"] == "replica_lost" and "bad broke the connection" in error["message"]
            assert count[0] == 1 and w.fakes[0].prompts == []

    run(test)


def test_a_replica_that_is_silent_for_too_long_is_a_failure() -> None:
    async def test() -> None:
        async with world(1, patience=0.05, budget=RetryBudget()) as w:
            answer = await w.ask("hold:0")
            assert b"was silent for 0.05 s" in answer.content
            assert w.metric('whorl_router_attempts_total{outcome="timeout"') == 1

    run(test)


def test_a_full_replica_is_no_broken_one_and_a_bug_is_not_passed_from_one_to_the_next() -> None:
    async def test() -> None:
        async with world(2) as w:
            answer = await w.ask("status:503")
            assert answer.status_code == 503
            assert [len(f.prompts) for f in w.fakes] == [1, 1], "both were asked"
            for _ in range(6):
                assert (await w.ask("status:500")).json()["error"]["code"] == "fake"
            assert sum(len(f.prompts) for f in w.fakes) == 2 + 6
            assert len(w.router.fleet.available()) == 2
            for _ in range(12):
                await w.ask("status:502")
            assert w.router.fleet.available() == []
            refused = await w.ask("hello")
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
            assert refused.json()["error"] | {"message": ""} == {
                "message": "", "type": "server_error", "param": None, "code": "no_replica",
            }  # fmt: skip

    run(test)


def test_without_a_budget_there_is_no_second_attempt() -> None:
    async def test() -> None:
        async with breaking() as (url, _), world(1, extra={"bad": url}, budget=RetryBudget(0.0, 1.0)) as w:
            w.router.fleet.policy.begin((), "r0")
            answers = [await w.ask("hello") for _ in range(4)]
            assert sorted(a.status_code for a in answers) == [200, 200, 503, 503]
            assert any("too many retries" in a.text for a in answers)

    run(test)


def test_a_broken_circuit_is_probed_and_closes() -> None:
    async def test() -> None:
        now = [0.0]
        async with breaking() as (url, count), world(0, extra={"r": url}) as w:
            w.router.fleet.clock = lambda: now[0]
            for _ in range(5):
                assert (await w.ask("x")).status_code == 503
            assert count[0] == 3
            now[0] = 1.1
            await w.ask("x")
            await w.ask("x")
            assert count[0] == 4, "one probe, which failed"
            fake = FakeReplica("back/")
            async with running(fake) as better:
                w.router.fleet.get("r").url = better
                now[0] = 10.0
                assert (await w.ask("x")).json()["name"] == "back/"
                assert w.metric('whorl_router_replica_circuit_open{replica="r"') == 0

    run(test)


# Health, draining, admin


def test_draining_lets_the_running_finish_and_sends_nothing_new() -> None:
    async def test() -> None:
        async with (
            world(2) as w,
            w.client.stream("POST", "/v1/completions", json={"prompt": "hold"}) as answer,
        ):
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
            state = next(r for r in w.router.fleet.describe() if r["name"] == name)
            assert state["drained"]
            await w.client.post("/v1/router/resume", json={"replica": name})
            assert len(w.router.fleet.available()) == 2
            assert (await w.client.post("/v1/router/drain", json={"replica": "r7"})).status_code == 404
            assert (await w.client.post("/v1/router/drain", json=[])).status_code == 400
            assert (await w.client.post("/v1/router/drain", content=b"\xff")).status_code == 400

    run(test)


def test_health_is_heard_and_two_silences_are_an_illness() -> None:
    async def test() -> None:
        async with world(2) as w:
            fleet, fake = w.router.fleet, w.fakes[0]
            fake.health, fake.health_status = {"status": "draining"}, 503
            await w.look()
            assert fleet.available() == ["r1"] and fleet.replicas["r0"].draining
            fake.health, fake.health_status = {"status": "broken"}, 500
            await w.look()
            assert fleet.available() == ["r0", "r1"], "one silence may be chance"
            await w.look()
            assert fleet.available() == ["r1"]
            hashes = hashes_of("/v1/completions", json.dumps({"prompt": LONG}).encode())
            fleet.policy.begin(hashes, "r0")
            fake.health, fake.health_status = (
                {"status": "ok", "boot": 1, "evicted_tokens": 64, "queue": 5},
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
            fake.health["boot"] = 2
            await w.look()
            assert len(fleet.policy.indexes["r0"]) == 0
            assert (await w.client.get("/health")).json() == {"status": "ok", "replicas": 2, "available": 2}
            w.router.draining = True
            assert (await w.client.get("/health")).status_code == 503
            refused = await w.ask("hello")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")

    run(test)


def test_admin_pages_want_a_key_or_a_caller_at_home() -> None:
    async def test() -> None:
        async with world(1) as w:
            advice = await w.client.get("/v1/router/advice")
            assert advice.json()["change"] == 0 and advice.json()["reasons"]
            through_a_proxy = {"x-forwarded-for": "1.2.3.4"}
            assert (await w.client.get("/v1/router/replicas", headers=through_a_proxy)).status_code == 401
            w.router.admin_key_sha256 = hashlib.sha256(b"secret").hexdigest()
            assert (await w.client.get("/v1/router/replicas")).status_code == 401
            right, wrong = {"authorization": "Bearer secret"}, {"authorization": "Bearer secrets"}
            assert (await w.client.get("/v1/router/replicas", headers=wrong)).status_code == 401
            assert (await w.client.get("/v1/router/replicas", headers=right)).status_code == 200

    run(test)


def test_a_body_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr("whorl.serve.fleet.router.LONGEST_BODY", 1 << 20)
        async with world(1) as w:
            answer = await w.client.post("/v1/completions", content=b"x" * (1 << 21))
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
            assert w.fakes[0].prompts == []

    run(test)


def test_goodput_counts_what_kept_the_promise() -> None:
    async def test() -> None:
        async with world(1, promise=Promise(first=0.5)) as w:
            now = [0.0]
            w.router.fleet.clock = lambda: now[0]
            await w.ask("hello")
            asked = asyncio.ensure_future(w.ask("hold:0"))
            await w.fakes[0].held.wait()
            now[0] = 1.0
            w.fakes[0].release.set()
            await asked
            await w.ask("status:400")  # the client's own fault: neither good nor bad
            assert (w.router.fleet.tally.good, w.router.fleet.tally.finished) == (1, 2)
            assert w.metric("whorl_router_goodput") == 0.5

    run(test)


def test_bodies_that_cannot_be_read_are_the_replicas_to_refuse() -> None:
    for body in (b"", b"\xff", b"[1]", b'{"prompt": {"a": 1}}', b'{"messages": 3}', b"{" * 5000):
        assert hashes_of("/v1/completions", body) == ()
    assert hashes_of("/elsewhere", json.dumps({"prompt": LONG}).encode()) == ()
    assert len(hashes_of("/v1/completions", json.dumps({"prompt": LONG}).encode())) == len(LONG) // 128


def test_the_official_client_sees_its_own_kind_of_errors() -> None:
    openai = pytest.importorskip("openai")

    async def test() -> None:
        async with world(1) as w:
            client = openai.AsyncOpenAI(base_url=f"{w.client.base_url}/v1", api_key="k", max_retries=0)
            said = [{"role": "user", "content": "count:3"}]
            stream = await client.chat.completions.create(model="m", messages=said, stream=True)
            assert [c.choices[0].delta.content async for c in stream] == ["r0/0", "r0/1", "r0/2"]
            w.router.fleet.drain("r0")
            with pytest.raises(openai.InternalServerError, match="draining"):
                await client.chat.completions.create(model="m", messages=said)
            await client.close()

    run(test)


def test_the_policy_can_be_given() -> None:
    import random

    policy = Policy(random.Random(0), slack=1.0)
    assert make_router({"a": "http://127.0.0.1:1/"}, policy=policy).fleet.policy is policy

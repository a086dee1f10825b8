"""The attack corpus against a real server: no internal error, no held event loop, nothing kept, the same text after it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest
from bench.serve._attacks import KINDS, Attack, Target, one_of_each, targets_with_keys
from bench.serve._traffic import Counts, judge, wave
from tests.support.router.fake_replica import running as in_this_loop
from tests.support.serve.live_server import Running, make_state, running

from whorl.http.connections import uvicorn_limits
from whorl.router.router import ReplicaRouter, make_router
from whorl.serve.middleware.auth import KeyFile
from whorl.serve.server import api_key_check

MAX_HOLD = 0.25  # seconds of the event loop's own computing: a fault holds it for longer on any machine
MAX_GROWTH = 150 << 20  # bytes; the client's memory is in it
CONTROL = {"model": "tiny", "prompt": "def f(", "max_tokens": 20, "temperature": 0, "ignore_eos": True}


def control(server: Running, key: str) -> Any:
    headers = {"authorization": f"Bearer {key}"}
    answer = server.post("/v1/completions", json=CONTROL, headers=headers, timeout=60)
    return answer.json()["choices"][0]["text"]


@asynccontextmanager
async def routed(server: Running) -> AsyncIterator[tuple[int, ReplicaRouter]]:
    """A router in this event loop before a server: (port, router)."""
    router = make_router({"r0": server.url}, is_api_key=api_key_check(server.api.config))
    router.local_only = not router.requires_keys
    async with in_this_loop(router.app, **uvicorn_limits()) as url:
        yield httpx.URL(url).port, router


@pytest.mark.parametrize(("keys", "router", "waves"), [(False, False, 1), (True, True, 1)])
def test_attack_corpus_changes_nothing_for_others(
    tmp_path: Path, keys: bool, router: bool, waves: int
) -> None:
    file = KeyFile(tmp_path / "keys.json")
    own, target = file.add("own"), Target("tiny", scale=0.1)
    first, targets = (
        targets_with_keys(target, file.add(name, requests_per_minute=5, tokens_per_minute=20_000))
        if keys
        else (target,)
        for name in ("first", "limited")
    )
    assert len(KINDS) >= 60
    with running(make_state(key_file=file.path if keys else None)) as server:
        text = control(server, own)

        async def send(attacks: Iterator[tuple[str, int, Attack]], counts: Counts) -> None:
            if not router:
                await wave(server.port, attacks, counts)
                return
            async with routed(server) as (port, front):
                await wave(port, attacks, counts)
                async with asyncio.timeout(30):
                    while front.pool.describe()[0]["running"]:
                        await asyncio.sleep(0.02)
                assert front.pool.available() == ["r0"]

        asyncio.run(
            send(one_of_each(0, first), Counts())
        )  # the first requests of a process take twice the time
        server.reset_watchdog()
        before = psutil.Process().memory_info().rss
        counts = Counts()

        async def attack_all() -> None:
            for seed in range(1, waves + 1):
                await send(one_of_each(seed, targets), counts)
                assert await asyncio.to_thread(control, server, own) == text, f"after the wave of seed {seed}"

        asyncio.run(attack_all())
        assert counts.bad == []
        assert counts.tried == len(KINDS) * waves
        assert counts.refused > counts.tried / 2 and counts.answered > 0
        assert not keys or (counts.statuses[401] > 20 and counts.statuses[429] > 0)
        assert server.api.watchdog.longest_own < MAX_HOLD
        server.wait(server.api.worker.wait_drained())
        server.ask(lambda engine: engine.check_integrity())
        assert server.api.worker.streams == {} and server.api._limits_by_request == {}
        assert psutil.Process().memory_info().rss - before < MAX_GROWTH


@pytest.mark.parametrize(
    ("answer", "denied", "words"),
    [
        (b"HTTP/1.1 500 Error\r\n\r\n", False, "status 500"),
        (b"HTTP/1.1 429 Many\r\nx: y\r\n\r\n", False, "status 429"),
        (b"HTTP/1.1 429 Many\r\nretry-after: 1\r\n\r\n", False, ""),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"error":{"code":"internal_error"}}', False, "internal"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"id":"a","object":"text_completion"}', True, "without a valid key"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"id":"a","object":"text_completion"}', False, ""),
    ],
)
def test_judge_names_bad_answers(answer: bytes, denied: bool, words: str) -> None:
    bad = judge(answer, denied).bad
    assert (words in bad) if words else not bad


def test_attacks_without_the_valid_key_are_denied() -> None:
    attacks = [one for _, _, one in one_of_each(0, targets_with_keys(Target("tiny", 0.01), "wk-valid"))]
    assert all(isinstance(one, Attack) for one in attacks)
    assert {one.denied for one in attacks} == {True, False}

"""Replica processes: killed, restarted, drained, orphaned."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.router import fake_replica
from tests.support.router.fake_replica import running
from tests.support.router.harness import async_test, rest, status_and_code

from whorl.errors import ConfigError
from whorl.router import replica_processes as module
from whorl.router.replica_processes import ReplicaSupervisor, drop_options, split_cores
from whorl.router.router import ReplicaRouter

FAKE = [sys.executable, str(Path(fake_replica.__file__))]
PROGRAM = """
import sys
from whorl.router.replica_processes import serve_replicas
serve_replicas(sys.argv[2:], 2, port=int(sys.argv[1]), grace=20)
"""


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_BACKOFF", 0.01)


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.005)


def complete(prompt: str) -> dict[str, Any]:
    """The arguments of a completion request."""
    return {"url": "/v1/completions", "json": {"prompt": prompt}}


@asynccontextmanager
async def fleet(n: int) -> AsyncIterator[tuple[ReplicaRouter, ReplicaSupervisor, httpx.AsyncClient]]:
    router, replicas = module.make_replicated_router(FAKE, n, seed=0, health_check_interval=0.05, grace=10.0)
    async with running(router.app) as url, httpx.AsyncClient(base_url=url, timeout=30.0) as client:
        yield router, replicas, client


def gone(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    return True


@given(st.integers(1, 9), st.lists(st.integers(0, 63), unique=True, max_size=16))
def test_split_cores_is_even_and_disjoint(n: int, cores: list[int]) -> None:
    parts = split_cores(n, cores)
    assert len(parts) == n
    if len(cores) < n:
        assert parts == [()] * n
    else:
        assert [c for part in parts for c in part] == cores
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_drop_options_removes_options_with_values() -> None:
    words = ["serve", "m", "--port", "80", "--seed", "1", "--host=::", "--replicas", "2", "--porter", "x"]
    kept = drop_options(words, ("--port", "--host", "--replicas"))
    assert kept == ["serve", "m", "--seed", "1", "--porter", "x"]


@async_test
async def test_killed_replica_ends_stream_and_is_restarted() -> None:
    async with fleet(2) as (router, replicas, client):
        async with client.stream("POST", **complete("hold:1")) as answer:
            parts = answer.aiter_raw()
            seen = await anext(parts)
            victim = next(p for p in replicas.processes if p.name == answer.headers["x-whorl-replica"])
            old = victim.url
            os.kill(victim.pid, signal.SIGKILL)
            _, error, end = (seen + await rest(parts)).split(b"\n\n")
        assert b"replica_lost" in error and end == b""
        assert (await client.post(**complete("hello"))).status_code == 200
        await until(lambda: victim.starts == 2 and len(router.pool.available()) == 2)
        assert victim.url != old
        assert len(router.pool.policy.indexes[victim.name]) == 0
    assert all(p.popen is not None and p.popen.returncode is not None for p in replicas.processes)


@async_test
async def test_crashing_request_is_tried_on_two_replicas() -> None:
    async with fleet(3) as (router, replicas, client):
        assert status_and_code(await client.post(**complete("please die"))) == (503, "no_replica")
        await until(lambda: sum(p.starts for p in replicas.processes) == 5)
        await until(lambda: len(router.pool.available()) == 3)
        assert sorted(p.starts for p in replicas.processes) == [1, 2, 2]


@async_test
async def test_supervisor_raises_when_replica_never_starts() -> None:
    exits, sleeps = [sys.executable, "-c", "exit(3)"], [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(ConfigError, match="ended with exit code 3"):
        await ReplicaSupervisor(exits, 2).__aenter__()
    hung = ReplicaSupervisor(sleeps, 1, start_timeout=0.3)
    with pytest.raises(ConfigError, match="before it answered"):
        await hung.__aenter__()
    assert hung.processes[0].pid == 0


@asynccontextmanager
async def router_program() -> AsyncIterator[tuple[subprocess.Popen[str], httpx.AsyncClient, list[str]]]:
    """`serve_replicas` as a program: (process, client of the router, the replicas' URLs)."""
    port = module.free_port()
    popen = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(port), *FAKE], env=os.environ, stderr=subprocess.PIPE, text=True
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30.0) as client:
            state = None
            while state is None:
                assert popen.poll() is None
                with suppress(httpx.ConnectError):
                    state = (await client.get("/v1/router/replicas")).json()
                await asyncio.sleep(0.01)
            yield popen, client, [r["url"] for r in state["replicas"]]
    finally:
        popen.kill()
        popen.wait()


async def pids(client: httpx.AsyncClient, urls: list[str]) -> list[int]:
    return [(await client.get(f"{url}/health")).json()["boot_id"] for url in urls]


@async_test
async def test_sigterm_finishes_requests_then_stops_replicas() -> None:
    async with router_program() as (popen, client, urls):
        children = await pids(client, urls)
        async with client.stream("POST", **complete("hold:1")) as answer:
            parts = answer.aiter_raw()
            await anext(parts)
            popen.send_signal(signal.SIGTERM)
            while (health := await client.get("/health")).status_code == 200:
                await asyncio.sleep(0.005)
            assert health.json()["status"] == "draining", "it still responds while draining"
            assert status_and_code(await client.post(**complete("new"))) == (503, "draining")
            assert popen.poll() is None and not any(gone(pid) for pid in children)
            for url in urls:  # the replicas still run
                await client.post(f"{url}/v1/completions", json={"prompt": "release"})
            assert (await rest(parts)).endswith(b"data: [DONE]\n\n")
        await until(lambda: popen.poll() is not None)
        assert popen.returncode == 0
        assert all(gone(pid) for pid in children)
        assert popen.stderr is not None
        addresses = popen.stderr.read().split("routing to 2 servers")[1].split()
        assert addresses[1] == str(client.base_url) + "/" and "/engine" in addresses[3]


@async_test
async def test_second_sigterm_ends_all_at_once_without_a_traceback() -> None:
    async with router_program() as (popen, client, urls):
        children = await pids(client, urls)
        async with client.stream("POST", **complete("hold:1")) as answer:
            await anext(answer.aiter_raw())
            popen.send_signal(signal.SIGTERM)
            while (await client.get("/health")).status_code == 200:
                await asyncio.sleep(0.005)
            popen.send_signal(signal.SIGTERM)
            await until(lambda: popen.poll() is not None)
        assert popen.returncode == 0 and all(gone(pid) for pid in children)
        assert popen.stderr is not None and "Traceback" not in popen.stderr.read()


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG exists only on Linux")
@async_test
async def test_killed_router_leaves_no_orphans() -> None:
    async with router_program() as (popen, client, urls):
        children = await pids(client, urls)
        popen.kill()
        await until(lambda: all(gone(pid) for pid in children))

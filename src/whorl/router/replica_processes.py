"""Replica processes on this machine: started with their cores, supervised, restarted, drained, behind a router.

    whorl serve MODEL --replicas 2   =   router on the given port
                                         |- whorl serve MODEL on a free port, cores 0-3
                                         '- whorl serve MODEL on a free port, cores 4-7

A replica is any process that `command + --host H --port P` starts and whose /health returns 200. Each gets separate cores
if there are enough: servers that share cores wait for each other at the end of every matrix product.

- A process that exits is restarted after a backoff, which doubles from `MIN_BACKOFF` to `MAX_BACKOFF` and is reset after
  `STABLE_SECONDS`. The pool then clears the prefix index of the replica.
- A process that is not healthy within `start_timeout` is killed and counts as one that exited.
- On SIGTERM (uvicorn then ends the lifespan) the router first finishes its requests. Then the replicas get SIGTERM, and
  SIGKILL after `grace` seconds, or at once after a second SIGTERM.
- If this process is killed, the kernel sends SIGTERM to the replicas (`start_command`), so no orphan keeps its memory.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx2 as httpx

from whorl.errors import ConfigError
from whorl.machine.process import describe_exit, start_command
from whorl.router.replica_pool import ReplicaPool
from whorl.router.router import ReplicaRouter, serve_router
from whorl.router.routing_policy import RoutingPolicy

LOG = logging.getLogger("whorl.router")
MIN_BACKOFF, MAX_BACKOFF, STABLE_SECONDS = 0.5, 30.0, 60.0
_POLL_SECONDS = 0.05  # interval of the /health checks of a starting replica


def split_cores(n: int, cores: Sequence[int] | None = None) -> list[tuple[int, ...]]:
    """Split the cores among n replicas in contiguous groups; return empty tuples (any core) if there are fewer than n."""
    if n < 1:
        raise ConfigError(f"{n} replicas", expected="at least 1")
    if cores is None:
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ()
    if len(cores) < n:
        return [()] * n
    bounds = [i * len(cores) // n for i in range(n + 1)]
    return [tuple(cores[a:b]) for a, b in itertools.pairwise(bounds)]


def drop_options(arguments: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return a command line without some options and their values (both "--port 80" and "--port=80")."""
    out, skip = list[str](), False
    for word in arguments:
        if skip or word in options:
            skip = not skip
        elif not word.startswith(tuple(f"{option}=" for option in options)):
            out.append(word)
    return out


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that is free now. If another process takes it first, the replica exits and is restarted on another."""
    with socket.socket() as listening:
        listening.bind((host, 0))
        return int(listening.getsockname()[1])


@dataclass
class ReplicaProcess:
    """The process of one replica, or its pending restart."""

    name: str
    cores: tuple[int, ...] = ()
    popen: subprocess.Popen[bytes] | None = None
    url: str = ""
    starts: int = 0
    backoff: float = field(default_factory=lambda: MIN_BACKOFF)

    @property
    def pid(self) -> int:
        """Process id; 0 if no process runs."""
        return self.popen.pid if self.popen is not None and self.popen.returncode is None else 0


class ReplicaSupervisor(AbstractAsyncContextManager["ReplicaSupervisor"]):
    """Runs `n` processes of one command while the context is open.

    Args:
        command: starts a server when --host and --port are added.
        pool: the replicas are added to it as r0, r1, ...; None: they are only supervised.
        start_timeout: seconds to become healthy; grace: seconds to exit.
        min_ready: number of healthy replicas that entering waits for; default all.

    Raises, on entering:
        ConfigError: a replica exited before it was healthy, so the command is probably wrong.
    """

    def __init__(
        self,
        command: Sequence[str],
        n: int,
        pool: ReplicaPool | None = None,
        *,
        host: str = "127.0.0.1",
        env: Mapping[str, str] | None = None,
        start_timeout: float = 300.0,
        grace: float = 40.0,
        min_ready: int | None = None,
    ) -> None:
        self.command, self.pool, self.host = list(command), pool, host
        self.start_timeout, self.grace, self.min_ready = start_timeout, grace, min_ready or n
        self.processes = [ReplicaProcess(f"r{i}", cores) for i, cores in enumerate(split_cores(n))]
        self._env = {**os.environ, **(env or {})}
        self._supervision_tasks: list[asyncio.Task[None]] = []
        self._ready_count: asyncio.Semaphore
        self._client: httpx.AsyncClient

    async def __aenter__(self) -> ReplicaSupervisor:
        self._client = httpx.AsyncClient(trust_env=False)
        self._ready_count = asyncio.Semaphore(0)
        self._supervision_tasks = [asyncio.ensure_future(self._supervise(p)) for p in self.processes]
        up = asyncio.ensure_future(self._wait_ready())
        try:
            await asyncio.wait([up, *self._supervision_tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in self._supervision_tasks:
                if task.done():
                    task.result()
        except BaseException:
            await self._stop_all()
            raise
        finally:
            up.cancel()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop_all()

    async def _wait_ready(self) -> None:
        for _ in range(self.min_ready):
            await self._ready_count.acquire()

    async def _supervise(self, process: ReplicaProcess) -> None:
        """Start and restart one replica."""
        while True:
            start = time.monotonic()
            self._start(process)
            healthy = await self._wait_for_health(process)
            if healthy:
                if process.starts == 1:
                    self._ready_count.release()
                LOG.info("replica %s is up at %s", process.name, process.url)
                await self._wait_for_exit(process)
            elif process.starts == 1:
                exit_description = _exit_description(process.popen)
                raise ConfigError(
                    f"replica {process.name} {exit_description} before it answered at {process.url}/health",
                    expected="a server that keeps running",
                    do=f"run it directly to see the error: {' '.join(self._command(process))}",
                )
            if time.monotonic() - start > STABLE_SECONDS:
                process.backoff = MIN_BACKOFF
            exit_description = _exit_description(process.popen)
            LOG.warning("replica %s %s; restarting in %g s", process.name, exit_description, process.backoff)
            await asyncio.sleep(process.backoff)
            process.backoff = min(MAX_BACKOFF, 2 * process.backoff)

    def end_now(self) -> None:
        """Give the replicas no time to exit, from now on."""
        self.grace = 0.0

    def _command(self, process: ReplicaProcess) -> list[str]:
        return [*self.command, "--host", self.host, "--port", process.url.rsplit(":", 1)[1]]

    def _start(self, process: ReplicaProcess) -> None:
        process.url = f"http://{self.host}:{free_port(self.host)}"
        process.starts += 1
        if self.pool is not None:
            if process.name not in self.pool.replicas:
                self.pool.add(process.name, process.url)
            else:
                self.pool.on_restart(process.name, process.url)
        threads = {"OMP_NUM_THREADS": str(len(process.cores))} if process.cores else {}
        process.popen = start_command(self._command(process), process.cores, {**self._env, **threads})

    async def _wait_for_health(self, process: ReplicaProcess) -> bool:
        deadline = time.monotonic() + self.start_timeout
        while time.monotonic() < deadline:
            assert process.popen is not None
            if process.popen.poll() is not None:
                return False
            with suppress(httpx.HTTPError, ValueError):
                answer = await self._client.get(f"{process.url}/health", timeout=2.0)
                if answer.status_code == 200:
                    if self.pool is not None and process.name in self.pool.replicas:
                        body = answer.json() if "json" in answer.headers.get("content-type", "") else {}
                        self.pool.on_health_response(self.pool.get(process.name), 200, body)
                    return True
            await asyncio.sleep(_POLL_SECONDS)
        await self._stop(process, signal.SIGKILL)
        return False

    async def _wait_for_exit(self, process: ReplicaProcess) -> None:
        """Wait for the exit of the process by polling: a handler of SIGCHLD would affect the whole program."""
        assert process.popen is not None
        while process.popen.poll() is None:
            await asyncio.sleep(_POLL_SECONDS)
        if self.pool is not None:
            self.pool.get(process.name).healthy = False

    async def _stop(self, process: ReplicaProcess, signal_number: signal.Signals) -> None:
        popen = process.popen
        if popen is None or popen.poll() is not None:
            return
        popen.send_signal(signal_number)
        started = time.monotonic()
        while popen.poll() is None:
            if time.monotonic() > started + self.grace:
                LOG.warning("replica %s did not exit within %g s and was killed", process.name, self.grace)
                popen.kill()
                popen.wait()
                return
            await asyncio.sleep(_POLL_SECONDS)

    async def _stop_all(self) -> None:
        for task in self._supervision_tasks:
            task.cancel()
        for task in self._supervision_tasks:
            with suppress(asyncio.CancelledError, Exception):
                await task
        await asyncio.gather(*(self._stop(p, signal.SIGTERM) for p in self.processes))
        await self._client.aclose()


def _exit_description(popen: subprocess.Popen[bytes] | None) -> str:
    code = popen.poll() if popen is not None else None
    if code is None:
        return "did not become healthy"
    return describe_exit(code)


def make_replicated_router(
    command: Sequence[str],
    n: int,
    *,
    seed: int | None = None,
    policy: RoutingPolicy | None = None,
    **settings: Any,
) -> tuple[ReplicaRouter, ReplicaSupervisor]:
    """Return a router whose lifespan runs `n` processes of `command`, and their supervisor; `settings` go to both."""
    supervisor_settings = {
        k: settings.pop(k) for k in ("env", "start_timeout", "grace", "min_ready") if k in settings
    }
    pool = ReplicaPool(policy or RoutingPolicy(random.Random(seed)))
    replicas = ReplicaSupervisor(command, n, pool, **supervisor_settings)
    return ReplicaRouter(pool, outer_context=replicas, **settings), replicas


def serve_replicas(
    command: Sequence[str],
    n: int,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    grace: float = 40.0,
    no_auth: bool = False,
    **settings: Any,
) -> None:
    """Serve on host:port with `n` processes of `command` until SIGTERM or SIGINT; running requests get `grace` seconds.

    Args:
        command: starts one server when `--host H --port P` are added.
        settings: of `ReplicaRouter` and `ReplicaSupervisor`.

    Raises:
        ConfigError: a replica does not become healthy.
    """
    router, replicas = make_replicated_router(command, n, grace=grace, **settings)
    serve_router(router, host, port, grace, no_auth=no_auth, on_force_exit=replicas.end_now)

"""Replicas as processes of this machine: started, given their cores, watched, restarted, drained. With the router in front.

    whorl serve MODEL --replicas 2   =   router on the port asked for
                                         |- whorl serve MODEL on a free port, cores 0-3
                                         '- whorl serve MODEL on a free port, cores 4-7

A replica is whatever `command + --host H --port P` starts and whose /health then answers 200. Each gets cores of its own
where there are enough: two servers whose threads share cores wait for one another at every product's end.

- One that ends is started again, after a wait that doubles from `FIRST_WAIT` to `LONGEST_WAIT` and is forgotten once it has
  stayed up for `STEADY` seconds. The router is told, so that nothing is believed to be in the new one's cache.
- One that starts and never becomes healthy within `start_within` is ended and counts as one that ended.
- On SIGTERM (which the web server turns into the end of its life-span) the router finishes what it has accepted first; only
  then are the replicas told to stop, and ended by force `grace` seconds later.
- If this process is killed outright its replicas get SIGTERM from the kernel (Linux's PR_SET_PDEATHSIG): no orphan keeps the
  memory. It is asked for by a few lines that run in the child before the server does (`_CHILD`): what runs between fork and
  exec must not be Python in a process with threads.
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
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx2 as httpx

from whorl.errors import ConfigError
from whorl.router.replica_pool import ReplicaPool
from whorl.router.router import ReplicaRouter, serve_router
from whorl.router.routing_policy import RoutingPolicy

LOG = logging.getLogger("whorl.router")
MIN_BACKOFF, MAX_BACKOFF, STABLE_SECONDS = 0.5, 30.0, 60.0
_POLL_SECONDS = 0.05  # of a starting replica's /health

# argv: the parent's process id, cores ("0,1" or "" for any), the command. An exec keeps both settings.
_CHILD_SCRIPT = """
import os, signal, sys
parent, cores, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)  # 1: PR_SET_PDEATHSIG
    if cores:
        os.sched_setaffinity(0, {int(c) for c in cores.split(",")})
if os.getppid() != parent:  # it died before the kernel was asked
    sys.exit(1)
os.execvp(command[0], command)
"""


def split_cores(n: int, cores: Sequence[int] | None = None) -> list[tuple[int, ...]]:
    """The cores split among n replicas, neighbours together; empty tuples (any core) where there are fewer than n."""
    if n < 1:
        raise ConfigError(f"{n} replicas", expected="at least 1")
    if cores is None:
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ()
    if len(cores) < n:
        return [()] * n
    borders = [i * len(cores) // n for i in range(n + 1)]
    return [tuple(cores[a:b]) for a, b in itertools.pairwise(borders)]


def drop_options(arguments: Sequence[str], options: Sequence[str]) -> list[str]:
    """A command line's words without some of its options and their values ("--port 80" and "--port=80" alike)."""
    out, skip = list[str](), False
    for word in arguments:
        if skip or word in options:
            skip = not skip
        elif not word.startswith(tuple(f"{option}=" for option in options)):
            out.append(word)
    return out


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody has at this moment. Somebody may take it before a replica does: that one ends and gets another."""
    with socket.socket() as listening:
        listening.bind((host, 0))
        return int(listening.getsockname()[1])


@dataclass
class ReplicaProcess:
    """One replica's process, or the wait for its next one."""

    name: str
    cores: tuple[int, ...] = ()
    popen: subprocess.Popen[bytes] | None = None
    url: str = ""
    starts: int = 0
    backoff: float = field(default_factory=lambda: MIN_BACKOFF)

    @property
    def pid(self) -> int:
        """0 between two lives."""
        return self.popen.pid if self.popen is not None and self.popen.returncode is None else 0


class ReplicaSupervisor(AbstractAsyncContextManager["ReplicaSupervisor"]):
    """`n` processes of one command, kept alive while the context lasts.

    Args:
        command: starts a server when --host and --port are added.
        fleet: gets them as r0, r1, ...; None: they are only kept alive.
        start_within: seconds to become healthy in; grace: seconds to end in.
        any_of: return from entering as soon as so many are healthy (the rest follow); default all.

    Raises, on entering:
        ConfigError: a replica ended before it was ever healthy: the command is wrong, and would be wrong again.
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
            for keeper in self._supervision_tasks:
                if keeper.done():
                    keeper.result()
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
        """One replica's lives, one after another."""
        while True:
            began = time.monotonic()
            self._start(process)
            healthy = await self._wait_for_health(process)
            if healthy:
                if process.starts == 1:
                    self._ready_count.release()
                LOG.info("replica %s is up at %s", process.name, process.url)
                await self._wait_for_exit(process)
            elif process.starts == 1:
                how = _exit_description(process.popen)
                raise ConfigError(
                    f"replica {process.name} {how} before it answered at {process.url}/health",
                    expected="a server that stays up",
                    do=f"run it alone and see: {' '.join(self._command(process))}",
                )
            if time.monotonic() - began > STABLE_SECONDS:
                process.backoff = MIN_BACKOFF
            how = _exit_description(process.popen)
            LOG.warning("replica %s %s; started again in %g s", process.name, how, process.backoff)
            await asyncio.sleep(process.backoff)
            process.backoff = min(MAX_BACKOFF, 2 * process.backoff)

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
        cores = ",".join(map(str, process.cores))
        threads = {"OMP_NUM_THREADS": str(len(process.cores))} if process.cores else {}
        process.popen = subprocess.Popen(
            [sys.executable, "-c", _CHILD_SCRIPT, str(os.getpid()), cores, *self._command(process)],
            env={**self._env, **threads},
            stdin=subprocess.DEVNULL,
        )

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
                        told = answer.json() if "json" in answer.headers.get("content-type", "") else {}
                        self.pool.on_health_response(self.pool.get(process.name), 200, told)
                    return True
            await asyncio.sleep(_POLL_SECONDS)
        await self._stop(process, signal.SIGKILL)
        return False

    async def _wait_for_exit(self, process: ReplicaProcess) -> None:
        """Returns when the process has ended. It is looked at: a handler of SIGCHLD would be the whole program's."""
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
        deadline = time.monotonic() + self.grace
        while popen.poll() is None:
            if time.monotonic() > deadline:
                LOG.warning("replica %s did not end within %g s and was killed", process.name, self.grace)
                popen.kill()
                popen.wait()
                return
            await asyncio.sleep(_POLL_SECONDS)

    async def _stop_all(self) -> None:
        for keeper in self._supervision_tasks:
            keeper.cancel()
        for keeper in self._supervision_tasks:
            with suppress(asyncio.CancelledError, Exception):
                await keeper
        await asyncio.gather(*(self._stop(p, signal.SIGTERM) for p in self.processes))
        await self._client.aclose()


def _exit_description(popen: subprocess.Popen[bytes] | None) -> str:
    code = popen.poll() if popen is not None else None
    if code is None:
        return "did not come up"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def make_replicated_router(
    command: Sequence[str],
    n: int,
    *,
    seed: int | None = None,
    policy: RoutingPolicy | None = None,
    **settings: Any,
) -> tuple[ReplicaRouter, ReplicaSupervisor]:
    """A router whose life-span holds `n` processes of `command`; `settings` as `Router` and `Replicas` take them."""
    own = {k: settings.pop(k) for k in ("env", "start_timeout", "grace", "min_ready") if k in settings}
    fleet = ReplicaPool(policy or RoutingPolicy(random.Random(seed)))
    replicas = ReplicaSupervisor(command, n, fleet, **own)
    return ReplicaRouter(fleet, outer_context=replicas, **settings), replicas


def serve_replicas(
    command: Sequence[str],
    n: int,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    grace: float = 40.0,
    **settings: Any,
) -> None:
    """Serve on host:port from `n` processes of `command`, until SIGTERM or SIGINT; what runs then gets `grace` seconds.

    Args:
        command: starts one server when `--host H --port P` are added.
        settings: of `Router` and `Replicas`.

    Raises:
        ConfigError: a replica does not come up.
    """
    router, _ = make_replicated_router(command, n, grace=grace, **settings)
    serve_router(router, host, port, grace)

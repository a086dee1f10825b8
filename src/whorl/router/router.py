"""The router: one address in front of several replicas. Where what was decided elsewhere becomes an HTTP application.

    client -> router -> replica 0 | replica 1 | ...

It speaks the replicas' own API: whatever it does not know it passes on, so the same client works with and without it. Of its
own it has

    GET  /health                 200 while at least one replica may be asked
    GET  /metrics                its own counters, per replica (`tolls.py`)
    GET  /v1/router/replicas     each replica's state
    GET  /v1/router/advice       how many there should be, and why (`advice.py`)
    POST /v1/router/drain        {"replica": "r1"}: nothing new goes there, what runs there finishes
    POST /v1/router/resume       the same, taken back

The last four tell of the machines behind, and two of them change something: they are answered to callers on the same machine
(and not through a proxy there), or with the admin's key. The key is kept as a hash.

The parts: `prefixes.py` (what is cached where), `policy.py` (who answers), `breaker.py` (who is not asked, who is asked
twice), `fleet.py` (health), `relay.py` (one request), `replicas.py` (the processes).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext, suppress
from types import FrameType
from typing import Any

import httpx2 as httpx
import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from whorl.errors import ConfigError
from whorl.router.autoscaling_advice import AutoscalingConfig, advise
from whorl.router.breaker import RetryBudget
from whorl.router.metrics import SLO, RouterMetrics
from whorl.router.prefix_index import BlockHashes, block_hashes, prompt_and_seed
from whorl.router.proxy import Proxy, ProxyRequest, ProxyResponse, error_body
from whorl.router.replica_pool import HEALTH_CHECK_SECONDS, ReplicaPool
from whorl.router.routing_policy import RoutingPolicy

LOG = logging.getLogger("whorl.router")
MAX_BODY_BYTES = 32 << 20
PROMPT_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
# Nothing is bounded here: a request waits in its replica's queue, which knows what waiting means, not in a socket pool
CONNECTION_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=128, keepalive_expiry=4.0)


class ReplicaRouter:
    """The application's state. fleet: its replicas are added by whoever starts them; `app`: what a server runs."""

    def __init__(
        self,
        pool: ReplicaPool,
        *,
        slo: SLO | None = None,
        autoscaling: AutoscalingConfig | None = None,
        admin_key_sha256: str | None = None,
        read_timeout: float = 300.0,
        health_check_interval: float = HEALTH_CHECK_SECONDS,
        outer_context: AbstractAsyncContextManager[Any] | None = None,
    ) -> None:
        """around: entered before the first look and left after the last answer (the processes, `replicas.py`)."""
        self.pool, self.metrics = pool, RouterMetrics(slo)
        self.autoscaling, self.admin_key_sha256 = autoscaling or AutoscalingConfig(), admin_key_sha256
        self.draining = False
        self._read_timeout, self._health_check_interval, self.outer_context = (
            read_timeout,
            health_check_interval,
            outer_context,
        )
        self._proxy: Proxy | None = None
        self.startup_error: ConfigError | None = (
            None  # why it never began: a web server only says that it did not
        )
        self.app = Starlette(
            lifespan=self._lifespan,
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/v1/router/replicas", self._require_admin(self._replicas)),
                Route("/v1/router/advice", self._require_admin(self._advice)),
                Route("/v1/router/drain", self._require_admin(self._drain), methods=["POST"]),
                Route("/v1/router/resume", self._require_admin(self._resume), methods=["POST"]),
                Mount("/", self._forward),
            ],
        )

    @property
    def in_flight(self) -> int:
        """Requests that have no answer, or not all of it."""
        return self._proxy.in_flight if self._proxy is not None else 0

    async def wait_drained(self) -> None:
        """Returns when no request is under way."""
        while self.in_flight:
            await asyncio.sleep(0.02)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self.outer_context or nullcontext())
            except ConfigError as error:
                self.startup_error = error
                raise
            client = await stack.enter_async_context(
                httpx.AsyncClient(limits=CONNECTION_LIMITS, trust_env=False)
            )
            self._proxy = Proxy(self.pool, client, self.metrics, self._read_timeout)
            await self.pool.check_health(client)
            watch = asyncio.ensure_future(self.pool.run_health_checks(client, self._health_check_interval))
            try:
                yield
            finally:
                watch.cancel()
                with suppress(asyncio.CancelledError):
                    await watch

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = ProxyResponse(send)
        if scope["type"] != "http":
            return  # no web socket has anything to say here; the server closes it
        if self.draining:
            await reply.send_error(503, "draining", "the router is shutting down; ask another", retry_after=1)
            return
        try:
            body = await _read_body(Request(scope, receive))
        except ClientDisconnect:
            return
        if body is None:
            text = f"the request's body is longer than {MAX_BODY_BYTES >> 20} MiB"
            await reply.send_error(413, "request_too_large", text)
            return
        assert self._proxy is not None
        query = scope.get("query_string", b"")
        asked = ProxyRequest(
            method=scope["method"],
            target=_target(scope) + (f"?{query.decode('latin-1')}" if query else ""),
            headers=_forwarded_headers(scope),
            body=body,
            hashes=request_block_hashes(scope["path"], body),
        )
        await self._proxy.handle(asked, receive, send)

    async def _health(self, request: Request) -> Response:
        free = [] if self.draining else self.pool.available()
        status = "draining" if self.draining else "ok" if free else "no replica"
        told = {"status": status, "replicas": len(self.pool.replicas), "available": len(free)}
        return JSONResponse(told, 200 if free else 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(
            self.metrics.exposition(self.pool), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def _replicas(self, request: Request) -> Response:
        return JSONResponse({"draining": self.draining, "replicas": self.pool.describe()})

    async def _advice(self, request: Request) -> Response:
        advice = advise(self.pool.snapshots, self.autoscaling)
        told = {"replicas": advice.replicas, "change": advice.change, "reasons": advice.reasons}
        return JSONResponse({**told, "text": str(advice)})

    async def _drain(self, request: Request) -> Response:
        return await self._set_draining(request, True)

    async def _resume(self, request: Request) -> Response:
        return await self._set_draining(request, False)

    async def _set_draining(self, request: Request, on: bool) -> Response:
        try:
            name = (await request.json())["replica"]
            self.pool.drain(str(name), on)
        except ConfigError as error:
            return _error_response(404, "unknown_replica", str(error))
        except (ValueError, KeyError, TypeError):
            return _error_response(400, "invalid_body", 'expected {"replica": NAME}')
        return await self._replicas(request)

    def _require_admin(
        self, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def checked(request: Request) -> Response:
            if self._is_admin(request):
                return await answer(request)
            return _error_response(
                401, "admin_key_needed", "the admin's key is needed, or a caller on the same machine"
            )

        return checked

    def _is_admin(self, request: Request) -> bool:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.admin_key_sha256 is not None:
            digest = hashlib.sha256(given.encode()).hexdigest()
            return hmac.compare_digest(digest, self.admin_key_sha256)
        if any(name in request.headers for name in ("x-forwarded-for", "forwarded")):
            return False
        with suppress(ValueError):
            return request.client is not None and ipaddress.ip_address(request.client.host).is_loopback
        return False


def make_router(
    replicas: Mapping[str, str],
    *,
    seed: int = 0,
    policy: RoutingPolicy | None = None,
    budget: RetryBudget | None = None,
    **settings: Any,
) -> ReplicaRouter:
    """A router over replicas that run already, by name and URL; `settings` as `Router` takes them."""
    fleet = ReplicaPool(policy or RoutingPolicy(random.Random(seed)), budget)
    for name, url in replicas.items():
        fleet.add(name, url)
    return ReplicaRouter(fleet, **settings)


class _DrainingServer(uvicorn.Server):
    """uvicorn, which goes on listening while it drains: /health says so, and what is new is told 503 in words."""

    def __init__(self, config: uvicorn.Config, router: ReplicaRouter, grace: float) -> None:
        super().__init__(config)
        self.router, self.grace = router, grace
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal; a second one ends at once. Not kept for later, as uvicorn does: it would spoil the exit code."""
        if self.router.draining or self._loop is None:
            self.should_exit = self.force_exit = True
        else:
            self.router.draining = True
            self._loop.call_soon_threadsafe(self._start_drain)

    def _start_drain(self) -> None:
        self._task = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        try:
            await asyncio.wait_for(self.router.wait_drained(), self.grace)
        except TimeoutError:
            LOG.warning("%d requests were cut off", self.router.in_flight)
        self.should_exit = True


def serve_router(router: ReplicaRouter, host: str, port: int, grace: float = 40.0) -> None:
    """Serve until SIGTERM or SIGINT; what runs then gets `grace` seconds.

    Raises:
        ConfigError: it never began, since a replica does not come up.
    """
    config = uvicorn.Config(
        router.app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=2
    )
    with suppress(SystemExit):  # with which uvicorn leaves if the router never began
        _DrainingServer(config, router, grace).run()
    if router.startup_error is not None:
        raise router.startup_error


def request_block_hashes(path: str, body: bytes) -> BlockHashes:
    """The prompt's blocks; none where there is no prompt, or none that can be read (the replica says what is wrong)."""
    if path not in PROMPT_PATHS:
        return ()
    try:
        told = orjson.loads(body)
    except orjson.JSONDecodeError:
        return ()
    return block_hashes(*prompt_and_seed(told)) if isinstance(told, dict) else ()


async def _read_body(request: Request) -> bytes | None:
    """None: too long."""
    parts, size = list[bytes](), 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            return None
        parts.append(part)
    return b"".join(parts)


def _target(scope: Scope) -> str:
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw.decode("latin-1")


def _forwarded_headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    client = scope.get("client")
    own = [(b"x-forwarded-for", client[0].encode())] if client else []
    earlier = [v for k, v in scope["headers"] if k == b"x-forwarded-for"]
    if earlier and own:
        own = [(b"x-forwarded-for", b", ".join([*earlier, own[0][1]]))]
    return [(k, v) for k, v in scope["headers"] if k != b"x-forwarded-for"] + own


def _error_response(status: int, code: str, message: str) -> Response:
    return Response(error_body(status, code, message), status, media_type="application/json")

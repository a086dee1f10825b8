"""The router's HTTP application: one address in front of several replicas.

    client -> router -> replica 0 | replica 1 | ...

It forwards the replicas' API unchanged, so clients work with and without it. Its own endpoints:

    GET  /health                 200 while at least one replica is available
    GET  /metrics                metrics per replica (`metrics.py`)
    GET  /v1/router/replicas     state of each replica
    GET  /v1/router/advice       advised number of replicas with reasons (`autoscaling_advice.py`)
    POST /v1/router/drain        {"replica": "r1"}: send no new requests there; running ones finish
    POST /v1/router/resume       revert a drain

The endpoints under /v1/router accept the admin key, or callers on the same machine that use a local name as Host and did not
come through a proxy. Only the hash of the key is stored. A web page must not reach them through a browser. A POST needs a
JSON content type and no foreign Origin. Every request passes the checks of `http/guard.py`: a foreign Host is refused if
there are no keys (DNS rebinding), and so is a path that another program may read as another one.

A body is read only with a valid API key if the replicas require keys; the replicas check requests without a body. /metrics
needs an API key or the admin key, if there are any.

Parts: `prefix_index.py` (cached prefixes), `routing_policy.py` (choice of a replica), `breaker.py` (failures and retries),
`replica_pool.py` (health), `proxy.py` (one request), `replica_processes.py` (processes).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext, suppress
from typing import Any

import httpx2 as httpx
import orjson
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from whorl.errors import ConfigError
from whorl.http.answers import no_cookies
from whorl.http.bodies import Bodies, ClientDisconnected
from whorl.http.draining_server import DrainingServer, server_config
from whorl.http.guard import RefusedError, headers_of, target_of
from whorl.http.hosts import cross_site_problem, http_address, is_local_name, is_loopback, print_pages
from whorl.http.json_text import json_text_problem
from whorl.http.server_process import prepare_server_process, trim_memory
from whorl.router.autoscaling_advice import AutoscalingConfig, advise
from whorl.router.breaker import RetryBudget
from whorl.router.metrics import SLO, RouterMetrics
from whorl.router.prefix_index import BlockHashes, block_hashes, prompt_and_seed
from whorl.router.proxy import Guard, Proxy, ProxyRequest, ProxyResponse, error_body, forwarded_headers
from whorl.router.replica_pool import HEALTH_CHECK_SECONDS, ReplicaPool
from whorl.router.routing_policy import RoutingPolicy

MAX_BODY_BYTES = 32 << 20
BODY_SECONDS = 30.0  # within which a request body must arrive
IN_FLIGHT_BYTES = 256 << 20  # of all bodies; one client may have half
LARGE_BODY_BYTES = (
    1 << 13
)  # larger bodies are parsed outside of the event loop, or refused by the router's own endpoints
PROMPT_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
ADMIN_NEEDED = (
    "requires the admin key, or a caller on the same machine with 127.0.0.1, localhost or [::1] as Host"
)
# No limit on connections: requests wait in the queue of their replica, not in a connection pool.
CONNECTION_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=128, keepalive_expiry=4.0)


class ReplicaRouter:
    """State of the router. The caller adds replicas to `pool`; `app` is the ASGI application."""

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
        is_api_key: Callable[[str], bool] | None = None,
    ) -> None:
        """Store the settings.

        Args:
            outer_context: entered before the first health check and left after the last response (`replica_processes.py`).
            is_api_key: whether the replicas accept an API key. With it, any Host is accepted.
        """
        self.pool, self.metrics = pool, RouterMetrics(slo)
        self.autoscaling, self.admin_key_sha256 = autoscaling or AutoscalingConfig(), admin_key_sha256
        self.draining = False
        self._is_api_key = is_api_key
        self.local_only = False  # without keys: accept only local names as Host; set by `serve_router`
        self._read_timeout, self._health_check_interval, self.outer_context = (
            read_timeout,
            health_check_interval,
            outer_context,
        )
        self._proxy: Proxy | None = None
        self._bodies = Bodies(MAX_BODY_BYTES, BODY_SECONDS, IN_FLIGHT_BYTES)
        self.startup_error: ConfigError | None = None  # uvicorn reports only that the startup failed
        self.app = Starlette(
            lifespan=self._lifespan,
            middleware=[Middleware(Guard, local_only=lambda: self.local_only)],
            routes=[
                Route("/health", self._health),
                Route("/health/live", self._live),
                Route("/metrics", self._metrics),
                Route("/v1/router/replicas", self._require_admin(self._replicas)),
                Route("/v1/router/advice", self._require_admin(self._advice)),
                Route("/v1/router/drain", self._require_admin(self._drain), methods=["POST"]),
                Route("/v1/router/resume", self._require_admin(self._resume), methods=["POST"]),
                Mount("/", self._forward),
            ],
        )

    @property
    def requires_keys(self) -> bool:
        """Whether the replicas require API keys."""
        return self._is_api_key is not None

    @property
    def in_flight(self) -> int:
        """Requests without a complete response."""
        return self._proxy.in_flight if self._proxy is not None else 0

    async def wait_drained(self) -> None:
        """Wait until no request is in progress."""
        while self.in_flight:
            await asyncio.sleep(0.02)

    def abort(self) -> None:
        """Leave the requests in flight to be cancelled by the server."""

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self.outer_context or nullcontext())
            except ConfigError as error:
                self.startup_error = error
                raise
            client = await stack.enter_async_context(
                httpx.AsyncClient(limits=CONNECTION_LIMITS, trust_env=False, cookies=no_cookies())
            )
            self._proxy = Proxy(self.pool, client, self.metrics, self._read_timeout)
            await self.pool.check_health(client)
            tasks = [
                asyncio.ensure_future(self.pool.run_health_checks(client, self._health_check_interval)),
                asyncio.ensure_future(self.metrics.watchdog.run()),
                asyncio.ensure_future(trim_memory()),
            ]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = ProxyResponse(send)
        if scope["type"] != "http":
            return  # no endpoint uses web sockets; the server closes the connection
        if self.draining:
            await reply.send_error(503, "draining", "the router is draining; use another", retry_after=1)
            return
        assert self._proxy is not None
        try:
            self._check_key(scope)
            async with self._bodies.reading(
                receive, scope["client"][0] if scope.get("client") else ""
            ) as body:
                if len(body) > LARGE_BODY_BYTES:
                    hashes = await asyncio.to_thread(request_block_hashes, scope["path"], body)
                else:
                    hashes = request_block_hashes(scope["path"], body)
                query = scope.get("query_string", b"").decode("latin-1")
                proxied = ProxyRequest(
                    method=scope["method"],
                    target=target_of(scope) + (f"?{query}" if query else ""),
                    headers=forwarded_headers(scope),
                    body=body,
                    hashes=hashes,
                )
                await self._proxy.handle(proxied, receive, send)
        except ClientDisconnected:
            return
        except RefusedError as error:
            await reply.refuse(error)

    async def _health(self, request: Request) -> Response:
        available = [] if self.draining else self.pool.available()
        status = "draining" if self.draining else "ok" if available else "no replica"
        body = {"status": status, "replicas": len(self.pool.replicas), "available": len(available)}
        return JSONResponse(body, 200 if available else 503)

    async def _live(self, request: Request) -> Response:
        return JSONResponse({"status": "draining" if self.draining else "ok"})

    async def _metrics(self, request: Request) -> Response:
        has_keys = self.requires_keys or self.admin_key_sha256 is not None
        if has_keys and not (self._has_api_key(headers_of(request.scope)) or self._is_admin(request)):
            return _error_response(401, "invalid_api_key", "requires an API key or the admin key")
        return Response(
            self.metrics.exposition(self.pool), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def _replicas(self, request: Request) -> Response:
        return JSONResponse({"draining": self.draining, "replicas": self.pool.describe()})

    async def _advice(self, request: Request) -> Response:
        advice = advise(self.pool.snapshots, self.autoscaling)
        body = {"replicas": advice.replicas, "change": advice.change, "reasons": advice.reasons}
        return JSONResponse({**body, "text": str(advice)})

    async def _drain(self, request: Request) -> Response:
        return await self._set_draining(request, True)

    async def _resume(self, request: Request) -> Response:
        return await self._set_draining(request, False)

    async def _set_draining(self, request: Request, on: bool) -> Response:
        try:
            async with self._bodies.reading(request.receive, "admin", LARGE_BODY_BYTES) as body:
                name = orjson.loads(body)["replica"]
            if not isinstance(name, str):  # text of a deep list would exceed the recursion limit
                raise TypeError
            self.pool.drain(name, on)
        except ClientDisconnected:
            return Response(status_code=400)  # not sent
        except RefusedError as error:
            return _error_response(error.status, error.code, error.message)
        except ConfigError as error:
            return _error_response(404, "unknown_replica", str(error))
        except (ValueError, KeyError, TypeError):
            return _error_response(400, "invalid_body", 'expected {"replica": NAME}')
        return await self._replicas(request)

    def _require_admin(
        self, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def checked(request: Request) -> Response:
            if problem := cross_site_problem(request.method, request.headers):
                return _error_response(403, "cross_site_request", problem)
            if self._is_admin(request):
                return await answer(request)
            return _error_response(401, "admin_key_needed", ADMIN_NEEDED)

        return checked

    def _check_key(self, scope: Scope) -> None:
        """Raise RefusedError if the request has a body, and no valid API key although the replicas require one."""
        headers = headers_of(scope)
        if not self.requires_keys or not {"content-length", "transfer-encoding"} & set(headers):
            return
        if not self._has_api_key(headers):
            raise RefusedError(401, "invalid_api_key", "unknown API key; send 'Authorization: Bearer KEY'")

    def _has_api_key(self, headers: Mapping[str, str]) -> bool:
        kind, _, key = headers.get("authorization", "").partition(" ")
        return self._is_api_key is not None and kind.lower() == "bearer" and self._is_api_key(key.strip())

    def _is_admin(self, request: Request) -> bool:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.admin_key_sha256 is not None:
            digest = hashlib.sha256(given.encode()).hexdigest()
            return hmac.compare_digest(digest, self.admin_key_sha256)
        if any(name in request.headers for name in ("x-forwarded-for", "forwarded")):
            return False
        if not is_local_name(request.headers.get("host", "")):  # the name of a web page, by DNS rebinding
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
    """Return a router over running replicas, given by name and URL; `settings` as in `ReplicaRouter`."""
    pool = ReplicaPool(policy or RoutingPolicy(random.Random(seed)), budget)
    for name, url in replicas.items():
        pool.add(name, url)
    return ReplicaRouter(pool, **settings)


def serve_router(
    router: ReplicaRouter,
    host: str,
    port: int,
    grace: float = 40.0,
    *,
    no_auth: bool = False,
    on_force_exit: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGTERM or SIGINT; running requests get `grace` seconds. Prints the addresses when it is ready.

    Args:
        no_auth: replicas without API keys are used also if `host` is reachable from other machines.
        on_force_exit: called in the handler of a second signal.

    Raises:
        ConfigError: the startup failed, because a replica does not become healthy.
    """
    router.local_only = is_loopback(host) and not router.requires_keys
    router.pool.keys_required = not is_loopback(host) and not no_auth
    config = server_config(router.app, host=host, port=port, timeout_graceful_shutdown=2)

    def print_addresses() -> None:
        print(f"routing to {len(router.pool.replicas)} servers", file=sys.stderr)
        print_pages(http_address(host, port))

    prepare_server_process()
    with suppress(SystemExit):  # uvicorn raises it if the startup failed
        DrainingServer(config, router, grace, print_addresses, on_force_exit).run()
    if router.startup_error is not None:
        raise router.startup_error


def request_block_hashes(path: str, body: bytes) -> BlockHashes:
    """Return the block hashes of the prompt; empty if there is no prompt or it cannot be parsed (the replica reports it)."""
    if path not in PROMPT_PATHS or (len(body) > LARGE_BODY_BYTES and json_text_problem(body)):
        return ()
    try:
        parsed = orjson.loads(body)
        return block_hashes(*prompt_and_seed(parsed)) if isinstance(parsed, dict) else ()
    except (orjson.JSONDecodeError, RecursionError):
        return ()


def _error_response(status: int, code: str, message: str) -> Response:
    return Response(error_body(status, code, message), status, media_type="application/json")

"""Checks before every request: host, path, key, drain, size. A rejected request costs almost no work.

    check                                                 protects against
    host, path and content-encoding (`http/guard.py`)     DNS rebinding, paths that name another route
    API key, before the body is read                      large uploads without a key
    limits of the key, where routes do not charge them    one key that takes all places (the arena)
    body size and time limits, also for chunked bodies    memory exhaustion, slow uploads (`http/bodies.py`)
    no CORS headers; JSON needs its content type          cross-origin requests of web pages

HEAD is answered as GET; the server sends no body for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from whorl.http.bodies import Bodies, ClientDisconnected
from whorl.http.guard import Message, Receive, RefusedError, Scope, Send, check_request, headers_of
from whorl.serve.config import ServeConfig
from whorl.serve.errors import ApiError, to_api_error
from whorl.serve.middleware.auth import KeyLimits, KeyStore

Application = Callable[[Scope, Receive, Send], Awaitable[None]]

PUBLIC_PREFIXES = ("/health/", "/static/")
PUBLIC_PATHS = ("/", "/engine", "/feed", "/loop", "/search", "/favicon.ico", "/health", "/openapi.json")


class AdmissionState(Protocol):
    """The parts of a server that the checks use.

    Attributes:
        local_only: only this machine reaches the server. key_store: None if no keys are required.
    """

    config: ServeConfig
    key_store: KeyStore | None
    local_only: bool

    def check_accepting(self, limits: KeyLimits | None) -> None:
        """Raise ApiError if the server accepts no POST now. limits: those of its key, for routes that charge none."""

    def count_response(self, path: str, status: int) -> None:
        """Count a response. path: of the route."""


class AdmissionMiddleware:
    """ASGI middleware that checks requests and reads their bodies."""

    def __init__(self, app: Application, state: AdmissionState) -> None:
        self.app, self.state = app, state
        self._bodies = Bodies(state.config.max_body, state.config.body_seconds)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = getattr(scope.get("route"), "path", "other")  # the route: a bounded number of labels
                self.state.count_response(path, message["status"])
            await send(message)

        try:
            self._check(scope)
            async with self._bodies.reading(receive, client_of(scope)) as body:
                await self.app(scope, _replay(body, receive), counted)
        except ClientDisconnected:
            return
        except (RefusedError, ApiError) as error:
            await to_api_error(error).response(scope, receive, counted)

    def _check(self, scope: Scope) -> None:
        headers, path = headers_of(scope), scope["path"]
        check_request(scope, headers, self.state.local_only)
        if path in PUBLIC_PATHS or path.startswith(PUBLIC_PREFIXES):
            return
        if self.state.key_store is not None:
            self._check_key(scope, headers, self.state.key_store)
        if scope["method"] == "POST":
            self.state.check_accepting(scope.get("state", {}).get("key_limits"))

    def _check_key(self, scope: Scope, headers: Mapping[str, str], keys: KeyStore) -> None:
        kind, _, key = headers.get("authorization", "").partition(" ")
        limits = keys.authenticate(key.strip()) if kind.lower() == "bearer" else None
        if limits is None:
            problem = "unknown API key" if key else "no API key; send 'Authorization: Bearer KEY'"
            raise ApiError(401, problem, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        scope.setdefault("state", {})["key_limits"] = limits


def client_of(scope: Scope) -> str:
    """Return the unit of fair shares: the id of the request's key, or its IP address without keys."""
    limits = scope.get("state", {}).get("key_limits")
    if limits is not None:
        return str(limits.key.id)
    return scope["client"][0] if scope.get("client") else ""


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields a body which was read, and then what follows it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay

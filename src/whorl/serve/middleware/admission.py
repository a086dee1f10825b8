"""Checks before every request: host, key, drain, size. A rejected request costs almost no work.

    check                                                 protects against
    Host header is a local name, if there are no keys     DNS rebinding by a web page
    API key, before the body is read                      large uploads without a key
    body size and time limits, also for chunked bodies    memory exhaustion, slow uploads
    no CORS headers; JSON needs its content type          cross-origin requests of web pages

A body that is too large is still read and discarded, up to `DISCARD_FACTOR` times the limit. A client that gets a response
while it sends would see a broken pipe instead of the 413.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

from whorl.errors import shorten
from whorl.http.hosts import is_local_name
from whorl.serve.config import ServeConfig
from whorl.serve.errors import ApiError, to_api_error
from whorl.serve.middleware.auth import KeyStore

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

PUBLIC_PREFIXES = ("/health", "/static/", "/openapi.json")
PAGE_PATHS = ("/", "/engine", "/favicon.ico")
DISCARD_FACTOR = 8  # times the limit


class ClientDisconnected(Exception):
    """The client disconnected while it sent the request."""


class AdmissionState(Protocol):
    """The parts of a server that the checks use.

    Attributes:
        local_only: only this machine reaches the server. key_store: None if no keys are required.
    """

    config: ServeConfig
    key_store: KeyStore | None
    local_only: bool

    def check_accepting(self) -> None:
        """Raise ApiError if the server accepts no requests now."""

    def count_response(self, path: str, status: int) -> None:
        """Count a response. path: of the route."""


class AdmissionMiddleware:
    """ASGI middleware that checks requests and reads their bodies."""

    def __init__(self, app: Application, state: AdmissionState) -> None:
        self.app, self.state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                path = getattr(scope.get("route"), "path", "other")  # the route: a bounded number of labels
                self.state.count_response(path, message["status"])
            await send(message)

        try:
            self._check(scope)
            body = await self._read_body(scope, receive)
        except ClientDisconnected:
            return
        except Exception as error:
            await to_api_error(error).response(scope, receive, counted)
            return
        replayed = False

        async def replay_body() -> MutableMapping[str, Any]:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay_body, counted)

    def _check(self, scope: Scope) -> None:
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        path = scope["path"]
        host = headers.get("host", "")
        if self.state.local_only and not is_local_name(host):
            raise ApiError(
                403, f"this server accepts the hosts 127.0.0.1 and localhost, not {shorten(host)!r}"
            )
        if path in PAGE_PATHS or path.startswith(PUBLIC_PREFIXES):
            return
        if self.state.key_store is not None:
            kind, _, key = headers.get("authorization", "").partition(" ")
            limits = self.state.key_store.authenticate(key.strip()) if kind.lower() == "bearer" else None
            if limits is None:
                problem = "unknown API key" if key else "no API key; send 'Authorization: Bearer KEY'"
                raise ApiError(401, problem, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
            scope.setdefault("state", {})["key_limits"] = limits
        if scope["method"] == "POST":
            self.state.check_accepting()

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        """Return the whole body.

        Raises:
            ApiError: it is larger than the limit, or took too long.
            ClientDisconnected: the client disconnected.
        """
        limit, parts, size = self.state.config.max_body, [], 0
        try:
            async with asyncio.timeout(self.state.config.body_seconds):
                more = True
                while more and size <= DISCARD_FACTOR * limit:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected
                    part = message.get("body", b"")
                    size += len(part)
                    if size <= limit:
                        parts.append(part)
                    more = message.get("more_body", False)
        except TimeoutError:
            raise ApiError(408, "the request took too long to arrive", code="timeout") from None
        if size > limit:
            raise ApiError(413, f"the request is larger than {limit:,} bytes", code="request_too_large")
        return b"".join(parts)

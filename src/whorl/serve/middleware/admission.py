"""What stands before every request: host, key, drain, size. Whatever is refused here has cost next to nothing.

    a server without keys answers only to its own names        no web page can reach it under another (DNS rebinding)
    a key is asked for before the body is read                  a stranger sends headers, not megabytes
    the body is read here, up to a limit, within a time         chunked bodies too, which say no length
    no cross-origin headers, JSON must call itself JSON         a web page elsewhere cannot make a browser ask

A body that is too large is still read, and thrown away, up to a few times the limit: a client who is answered while it sends
sees a broken pipe and never the 413.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from whorl.serve.errors import ApiError, to_api_error

if TYPE_CHECKING:
    from whorl.serve.app_state import AppState

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

PUBLIC_PREFIXES = ("/health", "/static/", "/openapi.json")
PAGE_PATHS = ("/", "/engine", "/favicon.ico")
LOCAL_HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]", "::1"})
DISCARD_FACTOR = 8  # times the limit


class ClientDisconnected(Exception):
    """The client went away while it was sending."""


class AdmissionMiddleware:
    """ASGI middleware around the application."""

    def __init__(self, app: Application, state: AppState) -> None:
        self.app, self.state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                path = getattr(scope.get("route"), "path", "other")  # the route's, so that there are few
                self.state.metrics.http_requests.labels(path, str(message["status"])).inc()
            await send(message)

        try:
            self._check(scope)
            body = await self._read_body(scope, receive)
        except ClientDisconnected:
            return
        except Exception as error:
            await to_api_error(error).response(scope, receive, counted)
            return
        given = False

        async def again() -> MutableMapping[str, Any]:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, again, counted)

    def _check(self, scope: Scope) -> None:
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        path = scope["path"]
        if self.state.local_only and _strip_port(headers.get("host", "")) not in LOCAL_HOSTS:
            raise ApiError(
                403, f"this server answers to 127.0.0.1 and localhost, not to {headers.get('host')!r}"
            )
        if path in PAGE_PATHS or path.startswith(PUBLIC_PREFIXES):
            return
        if self.state.key_store is not None:
            kind, _, key = headers.get("authorization", "").partition(" ")
            account = self.state.key_store.authenticate(key.strip()) if kind.lower() == "bearer" else None
            if account is None:
                given = "an unknown API key" if key else "no API key; send it as 'Authorization: Bearer KEY'"
                raise ApiError(
                    401, f"you gave {given}", code="invalid_api_key", headers={"www-authenticate": "Bearer"}
                )
            scope.setdefault("state", {})["account"] = account
        if scope["method"] == "POST":
            self.state.check_accepting()

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body.

        Raises:
            ApiError: it is larger than the limit, or took too long.
            Gone: the client went away.
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


def _strip_port(header: str) -> str:
    """A Host header without its port."""
    if header.startswith("["):
        return header.partition("]")[0] + "]"
    return header.partition(":")[0].lower()

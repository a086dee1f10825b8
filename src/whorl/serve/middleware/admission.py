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

from whorl.serve.errors import ApiError, refusal

if TYPE_CHECKING:
    from whorl.serve.app_state import Api

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = ("/health", "/static/", "/openapi.json")
PAGES = ("/", "/engine", "/favicon.ico")
LOCAL = frozenset({"127.0.0.1", "localhost", "[::1]", "::1"})
THROWN_AWAY = 8  # times the limit


class Gone(Exception):
    """The client went away while it was sending."""


class Guard:
    """ASGI middleware around the application."""

    def __init__(self, app: Application, api: Api) -> None:
        self.app, self.api = app, api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                path = getattr(scope.get("route"), "path", "other")  # the route's, so that there are few
                self.api.metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        try:
            self._check(scope)
            body = await self._body(scope, receive)
        except Gone:
            return
        except Exception as error:
            await refusal(error).response(scope, receive, counted)
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
        if self.api.local_only and _host(headers.get("host", "")) not in LOCAL:
            raise ApiError(
                403, f"this server answers to 127.0.0.1 and localhost, not to {headers.get('host')!r}"
            )
        if path in PAGES or path.startswith(OPEN):
            return
        if self.api.accounts is not None:
            kind, _, key = headers.get("authorization", "").partition(" ")
            account = self.api.accounts.find(key.strip()) if kind.lower() == "bearer" else None
            if account is None:
                given = "an unknown API key" if key else "no API key; send it as 'Authorization: Bearer KEY'"
                raise ApiError(
                    401, f"you gave {given}", code="invalid_api_key", headers={"www-authenticate": "Bearer"}
                )
            scope.setdefault("state", {})["account"] = account
        if scope["method"] == "POST":
            self.api.check_open()

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body.

        Raises:
            ApiError: it is larger than the limit, or took too long.
            Gone: the client went away.
        """
        limit, parts, size = self.api.config.max_body, [], 0
        try:
            async with asyncio.timeout(self.api.config.body_seconds):
                more = True
                while more and size <= THROWN_AWAY * limit:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Gone
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


def _host(header: str) -> str:
    """A Host header without its port."""
    if header.startswith("["):
        return header.partition("]")[0] + "]"
    return header.partition(":")[0].lower()

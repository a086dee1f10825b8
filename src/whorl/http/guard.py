"""Checks of each request before any route, for the server, the arena and the router.

    check                                                      protects against
    Host is a local name, if only this machine may call        DNS rebinding by a web page
    the path is in origin form, without "." and ".."           a path that names another route, tenant or host
    no content-encoding                                        a compressed body, which no route reads

A path is checked as each program behind this one may read it: decoded any number of times, with "\\" as "/". The
part of a segment behind ";", "?", "#" or a space is cut off. "%2F" is allowed, because clients write it in names of models.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any
from urllib.parse import unquote

from whorl.errors import shorten
from whorl.http.hosts import is_local_name

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MAX_DECODINGS = 8
CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class RefusedError(Exception):
    """The reason to refuse a request. retry_after: seconds."""

    def __init__(self, status: int, code: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.retry_after = status, code, message, retry_after


def headers_of(scope: Scope) -> dict[str, str]:
    """Return the headers of a request, with names in lower case."""
    return {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}


def check_request(scope: Scope, headers: Mapping[str, str], local_only: bool) -> None:
    """Check the host, the path and the encoding of a request.

    Raises:
        RefusedError: 403, 400, 415.
    """
    if local_only and not is_local_name(host := headers.get("host", "")):
        text = f"this server accepts the hosts 127.0.0.1, localhost and [::1], not {shorten(host)!r}"
        raise RefusedError(403, "foreign_host", text)
    if problem := path_problem(target_of(scope)):
        raise RefusedError(400, "invalid_path", problem)
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        text = f"content-encoding {shorten(encoding)!r} is not accepted; send the body as it is"
        raise RefusedError(415, "unsupported_encoding", text)


def target_of(scope: Scope) -> str:
    """Return the path as the client wrote it."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw.decode("latin-1")


def path_problem(target: str) -> str:
    """Return why a path may name something else than it seems to name, or ""."""
    if not target.startswith("/"):  # after a replica's address, "%2F@host/" would name another host
        return "the path must begin with '/'"
    path = target
    try:
        for _ in range(MAX_DECODINGS):
            path, before = unquote(path, errors="strict"), path
            if path == before:
                break
        else:
            return "the path is encoded too often"
    except UnicodeDecodeError:  # an overlong "." in a lenient reader
        return "the path is not UTF-8"
    if "#" in target or CONTROL.search(path):
        return "the path has a control character or a fragment"
    path = path.replace("\\", "/")
    if path.startswith("//"):
        return "the path begins with '//'"
    if any(re.split("[;?# ]", part)[0] in (".", "..") for part in path.split("/")):
        return "the path has a segment '.' or '..'"
    return ""

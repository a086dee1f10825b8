"""Answers of a hostile endpoint, for `FakeEndpoint`: name -> function that sends one."""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler
from itertools import repeat

Handler = BaseHTTPRequestHandler


def _whole(body: bytes, status: int = 200, **headers: str) -> Callable[[Handler], None]:
    def send(handler: Handler) -> None:
        handler.send_response(status)
        sizes = {"content-type": "application/json", "content-length": str(len(body))}
        for name, value in (sizes | {k.replace("_", "-"): v for k, v in headers.items()}).items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    return send


def _endless(handler: Handler, kind: str, piece: bytes, seconds: float = 0.0) -> None:
    """Send pieces until the client closes the connection."""
    handler.send_response(200)
    handler.send_header("content-type", kind)
    handler.send_header("connection", "close")
    handler.end_headers()
    with suppress(OSError):
        for one in repeat(piece):
            handler.wfile.write(one)
            time.sleep(seconds)
    handler.close_connection = True


def _slow_header(handler: Handler) -> None:
    with suppress(OSError):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nx-a: ")
        for _ in range(200):
            handler.wfile.write(b"a")
            time.sleep(0.05)
    handler.close_connection = True


def _no_header(handler: Handler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n" + b"x: " + b"a" * 300_000 + b"\r\n\r\n")
    handler.close_connection = True


SSE = "text/event-stream"
PIECE = b"x" * (1 << 16)
HOSTILE: dict[str, Callable[[Handler], None]] = {
    "deep": _whole(b'{"choices": ' + b"[" * 3_000_000 + b"}"),
    "deep in a few bytes": _whole(b'{"choices": ' + b"[" * 60_000 + b"}"),
    "deep and valid": _whole(b'{"error": ' + b"[" * 900 + b"]" * 900 + b"}"),
    "deep error": _whole(b'{"error": ' + b"[" * 900 + b"]" * 900 + b"}", 400),
    "many lists": _whole(b'{"choices": [' + b"[]," * 1_100_000 + b"[]]}"),
    "surrogate": _whole(b'{"choices": [{"text": "\\ud800", "finish_reason": "stop"}]}'),
    "huge number": _whole(b'{"choices": [{"text": "a", "index": ' + b"9" * 400 + b"}]}"),
    "compressed": _whole(gzip.compress(b'{"a": "' + b"x" * 1_000_000 + b'"}'), content_encoding="gzip"),
    "redirect": _whole(b"", 307, location="http://127.0.0.1:9/v1/completions"),
    "cookie": _whole(b"{}", 400, set_cookie="a=b; path=/"),
    "negative wait": _whole(b"{}", 429, retry_after="-5"),
    "nan wait": _whole(b"{}", 429, retry_after="nan"),
    "huge wait": _whole(b"{}", 429, retry_after="1e300"),
    "worded wait": _whole(b"{}", 503, retry_after="soon"),
    "repeats the key": _whole(b'{"error": "unknown key secret-key"}', 401),
    "large header": _no_header,
    "slow header": _slow_header,
    "slow body": partial(_endless, kind="application/json", piece=b" ", seconds=0.05),
    "slow stream": partial(_endless, kind=SSE, piece=b":\n", seconds=0.05),
    "endless body": partial(_endless, kind="application/json", piece=PIECE),
    "endless line": partial(_endless, kind=SSE, piece=PIECE),
    "endless error": partial(_endless, kind="application/json", piece=b'{"error": 1}' * 9),
}

"""Answers of other servers under bounds, for every HTTP client of the package: an endpoint may be hostile, or broken.

    bytes of the whole answer, also of one line or one event     `read_pieces`
    lists, objects, fields and values; depth; lone surrogates    `parse_answer`
    compressed answers: a megabyte may become a gigabyte         refused; the clients request none
    cookies: an endpoint could store and mix those of callers    `no_cookies`

The time of an answer is bounded by the caller, with one `asyncio.timeout` around connection, headers and body.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import orjson

from whorl.errors import shorten
from whorl.http.json_text import json_text_problem

MAX_ANSWER_BYTES = 1 << 26
MAX_MESSAGE_BYTES = 1 << 16  # of an error, or of a /health
VALUES_FACTOR = 20  # times the bounds of a request: log-probabilities of a long text are many objects
FEW_BYTES = 1 << 16  # of JSON whose values are not counted
PLAIN = {"accept-encoding": "identity"}  # header of each request
_TAG = re.compile(r"<(?:style|script)\b.*?</(?:style|script)>|<[^>]*>", re.DOTALL)


class BadAnswerError(ValueError):
    """An answer is not JSON, or exceeds a bound."""


class TooLargeError(BadAnswerError):
    """An answer has too many bytes or values; the same request would get the same."""


def no_cookies() -> CookieJar:
    """Return the cookies of a client that stores none."""
    return CookieJar(DefaultCookiePolicy(allowed_domains=[]))


async def read_pieces(answer: Any, max_bytes: int = MAX_ANSWER_BYTES) -> AsyncIterator[bytes]:
    """Yield the bytes of a streamed response of httpx or httpx2.

    Raises:
        BadAnswerError: it is compressed, or larger than `max_bytes` (`TooLargeError`).
    """
    if _is_compressed(answer):
        raise BadAnswerError("the answer is compressed, although none was requested")
    n_bytes = 0
    async for piece in answer.aiter_bytes():
        n_bytes += len(piece)
        if n_bytes > max_bytes:
            raise TooLargeError(f"the answer is larger than {max_bytes >> 10:,} KiB")
        yield piece


async def read_answer(answer: Any, max_bytes: int = MAX_ANSWER_BYTES) -> bytes:
    """Return the whole body. Raises as `read_pieces`."""
    return b"".join([piece async for piece in read_pieces(answer, max_bytes)])


async def read_message(answer: Any) -> str:
    """Return the text of an error, or its first part; "" if it is compressed."""
    body = bytearray()
    if _is_compressed(answer):
        return ""
    async for piece in answer.aiter_bytes():
        body += piece
        if len(body) > MAX_MESSAGE_BYTES:
            break
    return body[:MAX_MESSAGE_BYTES].decode(errors="replace")


def error_message(text: str) -> str:
    """Return the message of an error of the API in one line; of another text, such as a page of HTML, its first words."""
    try:
        return message_of(parse_answer(text.encode()))
    except (ValueError, AttributeError):
        return shorten(" ".join(_TAG.sub(" ", text).split()))


def message_of(content: dict[str, Any]) -> str:
    """Return the message of an error's object, in one line."""
    error = content.get("error") or content.get("detail") or content
    message = error["message"] if isinstance(error, dict) and "message" in error else error
    return " ".join(str(message).split())


def _is_compressed(answer: Any) -> bool:
    return answer.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity")


def parse_answer(body: bytes) -> Any:
    """Return the content of JSON text.

    Raises:
        BadAnswerError: it is not JSON, has too many values or levels, a lone surrogate, or an integer above 64 bits.
    """
    if len(body) > FEW_BYTES and (problem := json_text_problem(body, VALUES_FACTOR)):
        raise TooLargeError(f"the answer has {problem}")
    try:
        content = json.loads(body)
        orjson.dumps(content)  # has bounds on levels and integers, and accepts no lone surrogates
    except (ValueError, RecursionError) as error:
        raise BadAnswerError(
            f"the answer is no JSON: {shorten(body[:1000].decode(errors='replace'))!r}"
        ) from error
    except TypeError as error:
        raise BadAnswerError(f"the answer has a value that is not accepted: {error}") from error
    return content


class SSEParser:
    """Incremental parser of server-sent events; accepts bytes cut at any position."""

    def __init__(self) -> None:
        self._rest, self._data = bytearray(), list[bytes]()

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes; return the data of complete events."""
        self._rest += data
        if b"\n" not in data:  # a line without end is searched once
            return []
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events

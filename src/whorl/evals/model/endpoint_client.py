"""POST requests to an OpenAI-compatible endpoint, with retries: a whole answer, or the reason why it is missing.

    client.call("/completions", body, parse)        parse(events) -> result; a `Fault` of it is retried as well

An answer has bounds on bytes, values and levels (`http/answers.py`). A call has one deadline, for all of its attempts.
An event loop in a thread sends the requests, because a read of a socket cannot be ended from outside.

Retried: no connection, a timeout, the statuses 408, 409, 425, 429 and 5xx, a body or a stream that ends early, an answer of
another model. Waits grow by the factor 2, with jitter, and follow `Retry-After`. Not retried: statuses that depend on the
request (400, 413, 422) or on the settings (401, 403, 404).

The subtle point is a dead endpoint. Each of 10,000 requests would wait for all of its retries, so after `DEAD_AFTER` calls
without any answer the others fail at once, with the same reason.

Needs httpx (`pip install 'whorl[serve]'`).
"""

from __future__ import annotations

import asyncio
import importlib
import math
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from whorl.errors import ConfigError, shorten, without_credentials
from whorl.evals.model.requests import Missing
from whorl.http.answers import (
    PLAIN,
    BadAnswerError,
    SSEParser,
    TooLargeError,
    error_message,
    message_of,
    no_cookies,
    parse_answer,
    read_answer,
    read_message,
    read_pieces,
)

T = TypeVar("T")
Events = list[dict[str, Any]]

RETRIED_STATUS = frozenset({408, 409, 425, 429})
REQUEST_STATUS = frozenset({400, 413, 422})  # the next request may succeed
KEY_STATUS = frozenset({401, 403})
DEAD_AFTER = 20  # calls in a row
MAX_WAIT = 60.0  # seconds
MAX_EVENTS = 1 << 20  # of a stream


class Fault(Exception):
    """Why an answer cannot be used. wait: its `Retry-After`, seconds from 0. of_request: another request may succeed."""

    def __init__(
        self, reason: str, *, retry: bool = True, wait: float | None = None, of_request: bool = False
    ) -> None:
        super().__init__(reason)
        self.retry, self.wait, self.of_request = retry, wait, of_request


class EndpointClient:
    """Calls one endpoint from many threads.

    Args:
        url: with the version, such as http://127.0.0.1:8000/v1.
        api_key_env: environment variable with the key; no key is sent where it is unset.
        timeout: seconds without a byte. deadline: seconds of a call, all attempts together; at least all of their timeouts.
        max_retries: after the first attempt. backoff: seconds before the first retry.

    Raises:
        ConfigError: no URL of HTTP, or httpx is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key_env: str = "OPENAI_API_KEY",
        timeout: float = 60.0,
        deadline: float = 600.0,
        max_retries: int = 4,
        backoff: float = 0.5,
        concurrency: int = 16,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"the endpoint {shorten(url)!r} is not a URL", expected="such as http://127.0.0.1:8000/v1"
            )
        if without_credentials(url) != url:
            raise ConfigError(
                f"the endpoint {url} has a password or key in its URL",
                expected="an environment variable with the key",
            )
        try:
            self._httpx: Any = importlib.import_module("httpx")
        except ImportError as error:
            raise ConfigError("endpoints need httpx", do="pip install 'whorl[serve]'") from error
        self.url, self.max_retries, self.backoff = url.rstrip("/"), max_retries, backoff
        self.timeout, self.deadline = timeout, max(deadline, (max_retries + 1) * timeout)
        key = self._key = os.environ.get(api_key_env, "")
        self._key_hint = (
            f"the key of {api_key_env} was sent" if key else f"no key was sent: set {api_key_env}"
        )
        self._client = self._httpx.AsyncClient(
            timeout=timeout, headers=PLAIN | ({"Authorization": f"Bearer {key}"} if key else {}), cookies=no_cookies(),
            limits=self._httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
        )  # fmt: skip
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=_run_loop, args=[self._loop], name="whorl-endpoint-io", daemon=True).start()
        weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)
        self._lock, self._failed_calls, self._last_reason = threading.Lock(), 0, ""
        self.n_posted = 0

    def call(self, path: str, body: Mapping[str, Any], parse: Callable[[Events], T]) -> T | Missing:
        """Return parse(events) of the first attempt that succeeds, or why none did. An answer in one piece is one event."""
        end = time.monotonic() + self.deadline
        for attempt in range(self.max_retries + 1):
            if self._failed_calls >= DEAD_AFTER:
                return Missing(
                    f"not requested: the endpoint failed {DEAD_AFTER} times in a row, last with {self._last_reason}"
                )
            try:
                out = _parsed(parse, self._attempt(path, body, end))
            except Fault as fault:
                text = str(fault)  # it may repeat the key
                reason = shorten(text.replace(self._key, "***") if self._key else text, 300)
                wait = (
                    self.backoff * 2**attempt * random.uniform(0.5, 1.0) if fault.wait is None else fault.wait
                )
                wait = min(wait, MAX_WAIT)
                is_late = time.monotonic() + wait >= end
                if not fault.retry or attempt == self.max_retries or is_late:
                    if not fault.of_request:
                        self._record(reason)
                    return Missing(reason if not attempt else f"{reason}; {attempt + 1} attempts")
                time.sleep(wait)
            else:
                self._record("")
                return out
        raise AssertionError("unreachable")

    def get(self, path: str) -> Any:
        """Return the JSON of a GET, or None."""
        try:
            return next(iter(self._run(self._fetch("GET", path, None, self.timeout))), None)
        except Fault:
            return None

    def close(self) -> None:
        """Close all connections."""
        self._run(self._client.aclose())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop of the requests."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _record(self, reason: str) -> None:
        with self._lock:
            self._failed_calls = self._failed_calls + 1 if reason else 0
            self._last_reason = reason

    def _attempt(self, path: str, body: Mapping[str, Any], end: float) -> Events:
        with self._lock:
            self.n_posted += 1
        return self._run(self._fetch("POST", path, dict(body), end - time.monotonic()))

    async def _fetch(self, method: str, path: str, body: dict[str, Any] | None, deadline: float) -> Events:
        """Return the events of an answer that ends within `deadline` seconds. Raises Fault."""
        httpx = self._httpx
        try:
            async with (
                asyncio.timeout(deadline),
                self._client.stream(method, self.url + path, json=body) as answer,
            ):
                if answer.status_code != 200:
                    text = await read_message(answer)
                    raise _status_fault(answer.status_code, answer.headers, text, self._key_hint)
                if answer.headers.get("content-type", "").startswith("text/event-stream"):
                    return await _read_stream(answer)
                return [_parse_object(await read_answer(answer))]
        except httpx.TimeoutException as error:
            raise Fault(
                f"timed out after {self.timeout:g} s without a byte ({type(error).__name__})"
            ) from error
        except TimeoutError as error:
            raise Fault(f"timed out: the answer did not end in {deadline:.3g} s") from error
        except BadAnswerError as error:
            large = isinstance(error, TooLargeError)
            raise Fault(str(error), retry=not large, of_request=large) from error
        except httpx.RemoteProtocolError as error:
            raise Fault(f"the answer ended early: {error}") from error
        except httpx.InvalidURL as error:
            raise Fault(f"the URL is wrong: {error}", retry=False) from error
        except httpx.HTTPError as error:
            raise Fault(f"no answer: {error or type(error).__name__}") from error


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _parsed(parse: Callable[[Events], T], events: Events) -> T:
    """Return parse(events). Raises Fault: also for events of another form than the API's."""
    try:
        return parse(events)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise Fault(
            f"the answer does not have the form of the API: {type(error).__name__}: {error}"
        ) from error


async def _read_stream(answer: Any) -> Events:
    """Return the events of a stream up to [DONE]. Raises Fault, BadAnswerError."""
    parser, events = SSEParser(), list[dict[str, Any]]()
    async for piece in read_pieces(answer):
        for data in parser.feed(piece):
            if data.strip() == b"[DONE]":
                return events
            if len(events) == MAX_EVENTS:
                raise TooLargeError(f"the stream has more than {MAX_EVENTS:,} events")
            events.append(_parse_object(data))
    raise Fault("the stream ended without [DONE]")


def _parse_object(body: bytes) -> dict[str, Any]:
    content = parse_answer(body)
    if not isinstance(content, dict):
        raise Fault(f"the answer is no object: {shorten(body[:1000].decode(errors='replace'))!r}")
    if content.get("error"):
        raise Fault(f"the endpoint reports: {message_of(content)}")
    return content


def _status_fault(status: int, headers: Mapping[str, str], text: str, key_hint: str = "") -> Fault:
    message = error_message(text)
    try:
        wait = float(headers.get("retry-after", ""))
    except ValueError:
        wait = math.nan
    if key_hint and status in KEY_STATUS:
        message = f"{message} ({key_hint})"
    retry = status in RETRIED_STATUS or status >= 500
    of_request = status in REQUEST_STATUS
    return Fault(
        f"status {status}: {message}",
        retry=retry,
        wait=wait if retry and wait >= 0 else None,
        of_request=of_request,
    )

"""One request through the router: choice of a replica, forwarding, retries, disconnects.

    body -> block hashes -> routing decision -> replica -> response

- An event stream is forwarded at once, in complete events only, so that an error event can follow if the replica dies in the
  middle of an event.
- Other responses are buffered, up to `MAX_BUFFERED_BYTES`, before the first byte is sent. So a replica that dies in the
  middle of a response costs only time.
- A request is retried at most once, on another replica, from the retry budget, and only if no byte was sent to the client.
  A request that crashes replicas thus reaches at most two. Output of two attempts is never mixed.
- If the client disconnects, the forwarding task is cancelled. This closes the connection to the replica, which then frees
  its pages. A slow client applies back-pressure to the replica; nothing is buffered for it.

Circuit breaker: a response below 500, or 500 itself, is a success, because a request that triggers a bug must not open one
circuit after another. 502, 504, broken connections and timeouts are failures. 503 is neither: the replica is full or
draining, and another one is tried.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import httpx2 as httpx
from starlette.types import ASGIApp

from whorl.http.guard import Receive, RefusedError, Scope, Send, check_request, headers_of
from whorl.router.metrics import RouterMetrics, Timings
from whorl.router.prefix_index import BlockHashes
from whorl.router.replica_pool import Replica, ReplicaPool
from whorl.router.routing_policy import Ticket

Headers = list[tuple[bytes, bytes]]

MAX_BUFFERED_BYTES = 8 << 20
MAX_ATTEMPTS = 2
# Headers of one connection (RFC 9110, section 7.6.1), and headers that the router sets.
HOP_BY_HOP_HEADERS = {
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer", b"transfer-encoding",
    b"upgrade", b"host", b"content-length", b"accept-encoding", b"date", b"server",
}  # fmt: skip


@dataclass
class ProxyRequest:
    """A client's request."""

    method: str
    target: str  # path and query
    headers: Headers
    body: bytes
    hashes: BlockHashes = ()


class ProxyResponse:
    """The response to the client. Stores whether a byte was sent, and ends every response in a valid form."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False
        self.status = 0

    async def start(self, status: int, headers: Headers) -> None:
        self.started, self.status = True, status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def body(self, data: bytes, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def send_full(self, status: int, headers: Headers, data: bytes) -> None:
        """Send a complete response."""
        await self.start(status, [*headers, (b"content-length", str(len(data)).encode())])
        await self.body(data, more=False)

    async def send_error(self, status: int, code: str, message: str, retry_after: int | None = None) -> None:
        """Send an error in the API's format."""
        headers: Headers = [(b"content-type", b"application/json")]
        if retry_after is not None:
            headers.append((b"retry-after", str(retry_after).encode()))
        if status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await self.send_full(status, headers, error_body(status, code, message))

    async def refuse(self, error: RefusedError) -> None:
        """Send the error of a request that is not forwarded."""
        await self.send_error(error.status, error.code, error.message, error.retry_after)

    async def send_error_event(self, message: str) -> None:
        """End a started stream with an error event, after the replica died."""
        await self.body(b"data: " + error_body(502, "replica_lost", message) + b"\n\n", more=False)


def error_body(status: int, code: str, message: str) -> bytes:
    """Return the API's error object."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


class Guard:
    """ASGI middleware: the checks of `http/guard.py`. local_only: whether only this machine may call, now."""

    def __init__(self, app: ASGIApp, local_only: Callable[[], bool]) -> None:
        self.app, self.local_only = app, local_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                check_request(scope, headers_of(scope), self.local_only())
            except RefusedError as error:
                await ProxyResponse(send).refuse(error)
                return
        await self.app(scope, receive, send)


class SSEFramer:
    """Cuts a byte stream into pieces of complete events."""

    MAX_EVENT_BYTES = 1 << 20  # a longer event is forwarded in parts

    def __init__(self) -> None:
        self.tail = b""

    def feed(self, data: bytes) -> bytes:
        """Return all complete events that were not returned yet."""
        data = self.tail + data
        cut = max(data.rfind(end) + len(end) if end in data else 0 for end in (b"\n\n", b"\r\n\r\n", b"\r\r"))
        if len(data) - cut > self.MAX_EVENT_BYTES:
            cut = len(data)
        self.tail = data[cut:]
        return data[:cut]


@dataclass
class _Attempt:
    """One attempt on one replica. breaker_updated: whether a result was recorded in the circuit breaker."""

    replica: Replica
    ticket: Ticket
    timings: Timings
    breaker_updated: bool = False
    is_event_stream: bool = False
    failure: str = ""  # the reason to try another replica, or the broken connection


@dataclass
class Proxy:
    """Forwards requests to a pool of replicas. read_timeout: seconds that a replica may send no data."""

    pool: ReplicaPool
    client: httpx.AsyncClient
    metrics: RouterMetrics
    read_timeout: float = 300.0
    connect_timeout: float = 2.0
    in_flight: int = field(default=0, init=False)

    async def handle(self, request: ProxyRequest, receive: Receive, send: Send) -> None:
        """Answer `request` unless its client disconnects first. `receive` must have returned the whole body already."""
        self.in_flight += 1
        work = asyncio.ensure_future(self._handle(request, ProxyResponse(send)))
        gone = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            self.in_flight -= 1
            for task in (work, gone):
                task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await work

    async def _handle(self, request: ProxyRequest, reply: ProxyResponse) -> None:
        pool, tried = self.pool, list[str]()
        pool.totals.arrived += 1
        pool.budget.deposit()
        timings = Timings(pool.clock())
        failure = ""
        within_slo: bool | None = None  # None: not counted (client disconnected or sent an invalid request)
        try:
            for attempt_number in range(MAX_ATTEMPTS):
                if attempt_number and pool.available(tried) and not pool.budget.try_spend():
                    failure += "; the retry budget is empty"
                    break
                sent = pool.dispatch(request.hashes, tried)
                if sent is None:
                    break
                replica, ticket, decision = sent
                self.metrics.record_decision(decision, retry=bool(attempt_number))
                tried.append(replica.name)
                attempt = _Attempt(replica, ticket, timings)
                try:
                    done = await self._try_replica(request, reply, attempt)
                finally:
                    pool.policy.end(ticket)
                    if not attempt.breaker_updated:
                        replica.breaker.cancel_probe()
                if done:
                    if not 400 <= reply.status < 500:
                        within_slo = (
                            not attempt.failure and reply.status < 500 and self.metrics.meets_slo(timings)
                        )
                    return
                failure = attempt.failure
            self.metrics.record_rejected()
            within_slo = False
            message = f"no replica answered: {failure}" if tried else "all replicas are down or draining"
            await reply.send_error(503, "no_replica", message, retry_after=1)
        finally:
            if within_slo is not None:
                pool.totals.finished += 1
                pool.totals.within_slo += within_slo

    async def _try_replica(self, proxied: ProxyRequest, reply: ProxyResponse, attempt: _Attempt) -> bool:
        """Return whether the client got a response, or a part of one. False: nothing was sent, try another replica."""
        replica, pool = attempt.replica, self.pool
        timeout = httpx.Timeout(self.read_timeout, connect=self.connect_timeout, pool=None)
        headers = [(k, v) for k, v in proxied.headers if k.lower() not in HOP_BY_HOP_HEADERS]
        headers.append((b"accept-encoding", b"identity"))  # compressed events could not be separated
        request = self.client.build_request(
            proxied.method,
            replica.url + proxied.target,
            headers=headers,
            content=proxied.body,
            timeout=timeout,
        )
        outcome = "cancelled"
        try:
            response = await self.client.send(request, stream=True)
            try:
                outcome = await self._forward_response(response, reply, attempt)
            finally:
                await response.aclose()
        except (httpx.HTTPError, httpx.StreamError) as error:
            attempt.breaker_updated = True
            replica.breaker.record_failure(pool.clock())
            if isinstance(error, httpx.ConnectError):
                replica.healthy = False  # unhealthy until the next successful health check
            outcome = "timeout" if isinstance(error, httpx.TimeoutException) else "broken"
            attempt.failure = f"{replica.name} " + (
                f"sent no data for {self.read_timeout:g} s"
                if outcome == "timeout"
                else "broke the connection"
            )
            if reply.started and not attempt.is_event_stream:
                raise  # the server cuts the connection, so that a response of unknown length does not look complete
            if reply.started:
                await reply.send_error_event(f"{attempt.failure} during the response; send the request again")
        finally:
            self.metrics.record_attempt(replica.name, outcome, attempt.timings, pool.clock())
        return reply.started

    async def _forward_response(
        self, response: httpx.Response, reply: ProxyResponse, attempt: _Attempt
    ) -> str:
        """Forward a response; return the outcome label. Raises the exceptions of the connection."""
        replica, pool, status = attempt.replica, self.pool, response.status_code
        if status in (502, 503, 504):
            if status != 503:
                attempt.breaker_updated = True
                replica.breaker.record_failure(pool.clock())
            attempt.failure = f"{replica.name} answered {status}"
            others = pool.available([replica.name])
            if others:
                return f"{status}"
        headers = [(k, v) for k, v in response.headers.raw if k.lower() not in HOP_BY_HOP_HEADERS]
        headers.append((b"x-whorl-replica", replica.name.encode()))
        if "text/event-stream" in response.headers.get("content-type", ""):
            await self._forward_stream(response, headers, reply, attempt)
        else:
            await self._forward_buffered(response, headers, reply, attempt)
        if not attempt.breaker_updated and status != 503:
            attempt.breaker_updated = True
            replica.breaker.record_success()
        return f"{status}"

    async def _forward_stream(
        self, response: httpx.Response, headers: Headers, reply: ProxyResponse, attempt: _Attempt
    ) -> None:
        events, attempt.is_event_stream = SSEFramer(), True
        async for data in response.aiter_raw():
            if whole := events.feed(data):
                if not reply.started:
                    self._record_first_byte(attempt)
                    await reply.start(response.status_code, headers)
                attempt.timings.add_events(self.pool.clock(), max(1, whole.count(b"\n\n")))
                await reply.body(whole, more=True)
        if not reply.started:
            await reply.start(response.status_code, headers)
        await reply.body(events.tail, more=False)

    async def _forward_buffered(
        self, response: httpx.Response, headers: Headers, reply: ProxyResponse, attempt: _Attempt
    ) -> None:
        parts, size = list[bytes](), 0
        async for data in response.aiter_raw():
            if reply.started:
                await reply.body(data, more=True)
                continue
            parts.append(data)
            size += len(data)
            if size >= MAX_BUFFERED_BYTES:
                await reply.start(response.status_code, headers)
                await reply.body(b"".join(parts), more=True)
        self._record_first_byte(attempt)
        if reply.started:
            await reply.body(b"", more=False)
        else:
            await reply.send_full(response.status_code, headers, b"".join(parts))

    def _record_first_byte(self, attempt: _Attempt) -> None:
        attempt.timings.first_byte = self.pool.clock()
        self.pool.policy.mark_prefilled(attempt.ticket)
        if not attempt.breaker_updated:
            attempt.breaker_updated = True
            attempt.replica.breaker.record_success()


async def _wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def forwarded_headers(scope: Scope) -> Headers:
    """Return the client's headers, and its address."""
    client = scope.get("client")
    own = [(b"x-forwarded-for", client[0].encode())] if client else []
    earlier = [v for k, v in scope["headers"] if k == b"x-forwarded-for"]
    if earlier and own:
        own = [(b"x-forwarded-for", b", ".join([*earlier, own[0][1]]))]
    return [(k, v) for k, v in scope["headers"] if k != b"x-forwarded-for"] + own

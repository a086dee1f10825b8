"""One request on its way through the router: to a replica, back to the client, and what happens when either of them goes.

    body -> blocks -> choice -> replica -> answer, event by event -> client

- A stream of events is passed on as it comes. Only whole events are passed: half of one is of no use to the client, and
  after a replica's death in mid-event the error could not be told behind it. Nothing else is held back.
- Any other answer is gathered before its first byte is sent (answers are small; a large one, `GATHERED` bytes or more, flows
  through). So a replica that dies in the middle of one costs the client nothing but time.
- A second attempt is made only while nothing at all was sent to the client, at another replica, out of the budget, and once:
  a request that kills whoever serves it shall not walk through the fleet. Sampling twice does no harm, but showing half of
  one answer and half of another would.
- A client that goes away cancels the task that relays for it; that closes the connection to the replica, which sees its
  client go away in turn and frees the pages. A client that reads slowly is waited for, and the replica's socket fills up: no
  answer is ever collected here on a slow reader's behalf.

What an answer says of the replica (the breaker): an answer below 500, and 500 itself, is a sign of life: a request that
finds a bug would otherwise shut out one replica after another. 502, 504, broken connections and timeouts are failures. 503
is neither: it is full or draining, and another is asked.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx

from whorl.router.metrics import RouterMetrics, Timings
from whorl.router.prefix_index import BlockHashes
from whorl.router.replica_pool import Replica, ReplicaPool
from whorl.router.routing_policy import Ticket

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
Headers = list[tuple[bytes, bytes]]

MAX_BUFFERED_BYTES = 8 << 20
MAX_ATTEMPTS = 2
# Of one connection, not of the message (RFC 9110, section 7.6.1); length and host are written anew.
HOP_BY_HOP_HEADERS = {
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer", b"transfer-encoding",
    b"upgrade", b"host", b"content-length", b"accept-encoding", b"date", b"server",
}  # fmt: skip


@dataclass
class ProxyRequest:
    """What the client asked."""

    method: str
    target: str  # path and query
    headers: Headers
    body: bytes
    hashes: BlockHashes = ()


class ProxyResponse:
    """The client's side: remembers whether anything was sent, and ends every answer in a form that a client understands."""

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
        """An answer in one piece."""
        await self.start(status, [*headers, (b"content-length", str(len(data)).encode())])
        await self.body(data, more=False)

    async def send_error(self, status: int, code: str, message: str, retry_after: int | None = None) -> None:
        """An error in the API's own shape."""
        headers: Headers = [(b"content-type", b"application/json")]
        if retry_after is not None:
            headers.append((b"retry-after", str(retry_after).encode()))
        await self.send_full(status, headers, error_body(status, code, message))

    async def send_error_event(self, message: str) -> None:
        """The replica died behind an answer that had begun: a last event says so."""
        await self.body(b"data: " + error_body(502, "replica_lost", message) + b"\n\n", more=False)


def error_body(status: int, code: str, message: str) -> bytes:
    """The API's error object."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


class SSEFramer:
    """Cuts a stream of events into pieces that end where an event ends."""

    MAX_EVENT_BYTES = 1 << 20  # an event beyond this is passed on in parts

    def __init__(self) -> None:
        self.tail = b""

    def feed(self, data: bytes) -> bytes:
        """All whole events that were not given yet."""
        data = self.tail + data
        cut = max(data.rfind(end) + len(end) if end in data else 0 for end in (b"\n\n", b"\r\n\r\n", b"\r\r"))
        if len(data) - cut > self.MAX_EVENT_BYTES:
            cut = len(data)
        self.tail = data[cut:]
        return data[:cut]


@dataclass
class _Attempt:
    """One replica, one try. learnt: whether the breaker was told something."""

    replica: Replica
    ticket: Ticket
    timings: Timings
    breaker_updated: bool = False
    is_event_stream: bool = False  # the answer is a stream of them
    failure: str = ""  # it is to be tried elsewhere, or what broke


@dataclass
class Proxy:
    """Answers requests from a fleet. tolls: where everything is counted; patience: seconds that a replica may be silent."""

    pool: ReplicaPool
    client: httpx.AsyncClient
    metrics: RouterMetrics
    read_timeout: float = 300.0
    connect_timeout: float = 2.0
    in_flight: int = field(default=0, init=False)

    async def handle(self, request: ProxyRequest, receive: Receive, send: Send) -> None:
        """Answer `asked`, unless its client goes away first. `receive` has given the whole body already."""
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
        fleet, tried = self.pool, list[str]()
        fleet.totals.arrived += 1
        fleet.budget.deposit()
        timings = Timings(fleet.clock())
        why = ""
        good: bool | None = (
            None  # None: says nothing of us (the client went away, or asked for what cannot be)
        )
        try:
            for attempt_number in range(MAX_ATTEMPTS):
                if attempt_number and fleet.available(tried) and not fleet.budget.try_spend():
                    why += "; too many retries already"
                    break
                sent = fleet.dispatch(request.hashes, tried)
                if sent is None:
                    break
                replica, ticket, choice = sent
                self.metrics.record_decision(choice, retry=bool(attempt_number))
                tried.append(replica.name)
                attempt = _Attempt(replica, ticket, timings)
                try:
                    done = await self._try_replica(request, reply, attempt)
                finally:
                    fleet.policy.end(ticket)
                    if not attempt.breaker_updated:
                        replica.breaker.cancel_probe()
                if done:
                    if not 400 <= reply.status < 500:
                        good = not attempt.failure and reply.status < 500 and self.metrics.meets_slo(timings)
                    return
                why = attempt.failure
            self.metrics.record_rejected()
            good = False
            said = (
                f"no replica can answer: {why}"
                if tried
                else "no replica can answer: all are down or draining"
            )
            await reply.send_error(503, "no_replica", said, retry_after=1)
        finally:
            if good is not None:
                fleet.totals.finished += 1
                fleet.totals.within_slo += good

    async def _try_replica(self, asked: ProxyRequest, reply: ProxyResponse, attempt: _Attempt) -> bool:
        """Whether the client has its answer, or part of one; False: nothing was sent, try elsewhere."""
        replica, fleet = attempt.replica, self.pool
        patience = httpx.Timeout(self.read_timeout, connect=self.connect_timeout, pool=None)
        headers = [(k, v) for k, v in asked.headers if k.lower() not in HOP_BY_HOP_HEADERS]
        headers.append((b"accept-encoding", b"identity"))  # events could not be told apart
        request = self.client.build_request(
            asked.method, replica.url + asked.target, headers=headers, content=asked.body, timeout=patience
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
            replica.breaker.record_failure(fleet.clock())
            if isinstance(error, httpx.ConnectError):
                replica.healthy = False  # nobody listens there: until the next look finds somebody
            outcome = "timeout" if isinstance(error, httpx.TimeoutException) else "broken"
            attempt.failure = f"{replica.name} " + (
                f"was silent for {self.read_timeout:g} s" if outcome == "timeout" else "broke the connection"
            )
            if reply.started and not attempt.is_event_stream:
                raise  # the server cuts the connection: an answer of unknown length must not look whole
            if reply.started:
                await reply.send_error_event(f"{attempt.failure} in mid-answer; ask again")
        finally:
            self.metrics.record_attempt(replica.name, outcome, attempt.timings, fleet.clock())
        return reply.started

    async def _forward_response(
        self, response: httpx.Response, reply: ProxyResponse, attempt: _Attempt
    ) -> str:
        """Pass it on; returns the outcome's name. Raises what the connection raises."""
        replica, fleet, status = attempt.replica, self.pool, response.status_code
        if status in (502, 503, 504):
            if status != 503:
                attempt.breaker_updated = True
                replica.breaker.record_failure(fleet.clock())
            attempt.failure = f"{replica.name} answered {status}"
            others = fleet.available([replica.name])
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
    """Returns when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass

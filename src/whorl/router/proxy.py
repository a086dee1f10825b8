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

from whorl.router.metrics import Timings, Tolls
from whorl.router.prefix_index import Chain
from whorl.router.replica_pool import Fleet, Replica
from whorl.router.routing_policy import Ticket

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
Headers = list[tuple[bytes, bytes]]

GATHERED = 8 << 20
ATTEMPTS = 2
# Of one connection, not of the message (RFC 9110, section 7.6.1); length and host are written anew.
HOP = {
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer", b"transfer-encoding",
    b"upgrade", b"host", b"content-length", b"accept-encoding", b"date", b"server",
}  # fmt: skip


@dataclass
class Incoming:
    """What the client asked."""

    method: str
    target: str  # path and query
    headers: Headers
    body: bytes
    hashes: Chain = ()


class Reply:
    """The client's side: remembers whether anything was sent, and ends every answer in a form that a client understands."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False
        self.status = 0

    async def begin(self, status: int, headers: Headers) -> None:
        self.begun, self.status = True, status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def body(self, data: bytes, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def whole(self, status: int, headers: Headers, data: bytes) -> None:
        """An answer in one piece."""
        await self.begin(status, [*headers, (b"content-length", str(len(data)).encode())])
        await self.body(data, more=False)

    async def refuse(self, status: int, code: str, message: str, retry_after: int | None = None) -> None:
        """An error in the API's own shape."""
        headers: Headers = [(b"content-type", b"application/json")]
        if retry_after is not None:
            headers.append((b"retry-after", str(retry_after).encode()))
        await self.whole(status, headers, error_body(status, code, message))

    async def broke(self, message: str) -> None:
        """The replica died behind an answer that had begun: a last event says so."""
        await self.body(b"data: " + error_body(502, "replica_lost", message) + b"\n\n", more=False)


def error_body(status: int, code: str, message: str) -> bytes:
    """The API's error object."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


class Events:
    """Cuts a stream of events into pieces that end where an event ends."""

    LONGEST = 1 << 20  # an event beyond this is passed on in parts

    def __init__(self) -> None:
        self.tail = b""

    def feed(self, data: bytes) -> bytes:
        """All whole events that were not given yet."""
        data = self.tail + data
        cut = max(data.rfind(end) + len(end) if end in data else 0 for end in (b"\n\n", b"\r\n\r\n", b"\r\r"))
        if len(data) - cut > self.LONGEST:
            cut = len(data)
        self.tail = data[cut:]
        return data[:cut]


@dataclass
class _Attempt:
    """One replica, one try. learnt: whether the breaker was told something."""

    replica: Replica
    ticket: Ticket
    timings: Timings
    learnt: bool = False
    events: bool = False  # the answer is a stream of them
    why: str = ""  # it is to be tried elsewhere, or what broke


@dataclass
class Relay:
    """Answers requests from a fleet. tolls: where everything is counted; patience: seconds that a replica may be silent."""

    fleet: Fleet
    client: httpx.AsyncClient
    tolls: Tolls
    patience: float = 300.0
    connect: float = 2.0
    under_way: int = field(default=0, init=False)

    async def serve(self, asked: Incoming, receive: Receive, send: Send) -> None:
        """Answer `asked`, unless its client goes away first. `receive` has given the whole body already."""
        self.under_way += 1
        work = asyncio.ensure_future(self._serve(asked, Reply(send)))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            self.under_way -= 1
            for task in (work, gone):
                task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await work

    async def _serve(self, asked: Incoming, reply: Reply) -> None:
        fleet, tried = self.fleet, list[str]()
        fleet.tally.arrived += 1
        fleet.budget.deposit()
        timings = Timings(fleet.clock())
        why = ""
        good: bool | None = (
            None  # None: says nothing of us (the client went away, or asked for what cannot be)
        )
        try:
            for attempt_number in range(ATTEMPTS):
                if attempt_number and fleet.available(tried) and not fleet.budget.take():
                    why += "; too many retries already"
                    break
                sent = fleet.send(asked.hashes, tried)
                if sent is None:
                    break
                replica, ticket, choice = sent
                self.tolls.chosen(choice, retry=bool(attempt_number))
                tried.append(replica.name)
                attempt = _Attempt(replica, ticket, timings)
                try:
                    done = await self._attempt(asked, reply, attempt)
                finally:
                    fleet.policy.end(ticket)
                    if not attempt.learnt:
                        replica.breaker.released()
                if done:
                    if not 400 <= reply.status < 500:
                        good = not attempt.why and reply.status < 500 and self.tolls.meets(timings)
                    return
                why = attempt.why
            self.tolls.refused()
            good = False
            said = (
                f"no replica can answer: {why}"
                if tried
                else "no replica can answer: all are down or draining"
            )
            await reply.refuse(503, "no_replica", said, retry_after=1)
        finally:
            if good is not None:
                fleet.tally.finished += 1
                fleet.tally.good += good

    async def _attempt(self, asked: Incoming, reply: Reply, attempt: _Attempt) -> bool:
        """Whether the client has its answer, or part of one; False: nothing was sent, try elsewhere."""
        replica, fleet = attempt.replica, self.fleet
        patience = httpx.Timeout(self.patience, connect=self.connect, pool=None)
        headers = [(k, v) for k, v in asked.headers if k.lower() not in HOP]
        headers.append((b"accept-encoding", b"identity"))  # events could not be told apart
        request = self.client.build_request(
            asked.method, replica.url + asked.target, headers=headers, content=asked.body, timeout=patience
        )
        outcome = "cancelled"
        try:
            response = await self.client.send(request, stream=True)
            try:
                outcome = await self._answer(response, reply, attempt)
            finally:
                await response.aclose()
        except (httpx.HTTPError, httpx.StreamError) as error:
            attempt.learnt = True
            replica.breaker.failure(fleet.clock())
            if isinstance(error, httpx.ConnectError):
                replica.healthy = False  # nobody listens there: until the next look finds somebody
            outcome = "timeout" if isinstance(error, httpx.TimeoutException) else "broken"
            attempt.why = f"{replica.name} " + (
                f"was silent for {self.patience:g} s" if outcome == "timeout" else "broke the connection"
            )
            if reply.begun and not attempt.events:
                raise  # the server cuts the connection: an answer of unknown length must not look whole
            if reply.begun:
                await reply.broke(f"{attempt.why} in mid-answer; ask again")
        finally:
            self.tolls.attempt(replica.name, outcome, attempt.timings, fleet.clock())
        return reply.begun

    async def _answer(self, response: httpx.Response, reply: Reply, attempt: _Attempt) -> str:
        """Pass it on; returns the outcome's name. Raises what the connection raises."""
        replica, fleet, status = attempt.replica, self.fleet, response.status_code
        if status in (502, 503, 504):
            if status != 503:
                attempt.learnt = True
                replica.breaker.failure(fleet.clock())
            attempt.why = f"{replica.name} answered {status}"
            others = fleet.available([replica.name])
            if others:
                return f"{status}"
        headers = [(k, v) for k, v in response.headers.raw if k.lower() not in HOP]
        headers.append((b"x-whorl-replica", replica.name.encode()))
        if "text/event-stream" in response.headers.get("content-type", ""):
            await self._stream(response, headers, reply, attempt)
        else:
            await self._gather(response, headers, reply, attempt)
        if not attempt.learnt and status != 503:
            attempt.learnt = True
            replica.breaker.success()
        return f"{status}"

    async def _stream(
        self, response: httpx.Response, headers: Headers, reply: Reply, attempt: _Attempt
    ) -> None:
        events, attempt.events = Events(), True
        async for data in response.aiter_raw():
            if whole := events.feed(data):
                if not reply.begun:
                    self._first(attempt)
                    await reply.begin(response.status_code, headers)
                attempt.timings.event(self.fleet.clock(), max(1, whole.count(b"\n\n")))
                await reply.body(whole, more=True)
        if not reply.begun:
            await reply.begin(response.status_code, headers)
        await reply.body(events.tail, more=False)

    async def _gather(
        self, response: httpx.Response, headers: Headers, reply: Reply, attempt: _Attempt
    ) -> None:
        parts, size = list[bytes](), 0
        async for data in response.aiter_raw():
            if reply.begun:
                await reply.body(data, more=True)
                continue
            parts.append(data)
            size += len(data)
            if size >= GATHERED:
                await reply.begin(response.status_code, headers)
                await reply.body(b"".join(parts), more=True)
        self._first(attempt)
        if reply.begun:
            await reply.body(b"", more=False)
        else:
            await reply.whole(response.status_code, headers, b"".join(parts))

    def _first(self, attempt: _Attempt) -> None:
        attempt.timings.first = self.fleet.clock()
        self.fleet.policy.answered(attempt.ticket)
        if not attempt.learnt:
            attempt.learnt = True
            attempt.replica.breaker.success()


async def _gone(receive: Receive) -> None:
    """Returns when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass

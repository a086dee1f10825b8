"""Request bodies under bounds: bytes and seconds of each one, and bytes of all that are in flight.

    with 32 clients that never finish 4 MB    all memory of bodies is taken, and the next large one gets status 503
    bodies of at most `FREE_BYTES`            are always read: the number of connections bounds them

The bytes of a body are counted from their arrival to the end of the response. A body that is refused is still read and
discarded, up to `DISCARD_FACTOR` times the limit: a client that gets a response while it sends would see a broken pipe.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from whorl.http.guard import Receive, RefusedError
from whorl.http.shares import Shares

DISCARD_FACTOR = 8  # times the limit of one body
IN_FLIGHT_FACTOR = 32  # times the limit of one body; one client may have half
FREE_BYTES = 1 << 16


class ClientDisconnected(Exception):
    """The client disconnected while it sent the request."""


class Bodies:
    """The bodies of a server.

    Args:
        max_bytes: of one body. seconds: within which it must arrive. in_flight: bytes of all large bodies.
    """

    def __init__(self, max_bytes: int, seconds: float, in_flight: int | None = None) -> None:
        self.max_bytes, self.seconds = max_bytes, seconds
        total = IN_FLIGHT_FACTOR * max_bytes if in_flight is None else in_flight
        self.shares = Shares(total, max(max_bytes, total // 2))

    @asynccontextmanager
    async def reading(
        self, receive: Receive, client: str, max_bytes: int | None = None
    ) -> AsyncIterator[bytes]:
        """Read the body of one request, and count its bytes until the context ends.

        Raises:
            RefusedError: 413, 408, 503. ClientDisconnected: the client disconnected.
        """
        limit = self.max_bytes if max_bytes is None else max_bytes
        parts, size, held = list[bytes](), 0, 0
        kept = more = True
        try:
            try:
                async with asyncio.timeout(self.seconds):
                    while more and size <= DISCARD_FACTOR * limit:
                        message = await receive()
                        if message["type"] == "http.disconnect":
                            raise ClientDisconnected
                        part = message.get("body", b"")
                        more, size = message.get("more_body", False), size + len(part)
                        large = size > FREE_BYTES
                        kept = kept and size <= limit and (not large or self.shares.take(client, size - held))
                        if kept:
                            held = size if large else 0
                            parts.append(part)
                        else:
                            parts.clear()
                            self.shares.give_back(client, held)
                            held = 0
            except TimeoutError:
                text = f"the request took more than {self.seconds:g} s to arrive"
                raise RefusedError(408, "timeout", text) from None
            if size > limit:
                text = f"the request is larger than {limit:,} bytes"
                raise RefusedError(413, "request_too_large", text)
            if not kept:
                text = "the bodies of other requests take all of the memory for them"
                raise RefusedError(503, "bodies_full", text, retry_after=2)
            body = b"".join(parts)
            parts.clear()
            yield body
        finally:
            self.shares.give_back(client, held)

"""Bounds on open connections: clients that never send a whole request or never read, and the limit of file descriptors.

    a connection without a whole header after `header_seconds`     closed
    a client that takes no byte of an answer for `stall_seconds`   dropped; closing would wait for it
    more connections than `max_connections`                        the one that has waited longest is closed

So a client that opens connections and sends nothing cannot use up the descriptors: it closes its own oldest ones. Bodies
have a separate time limit, set by the application. A connection is read in small portions, because a parser that gets
thousands of chunks of one byte at once holds the event loop.
"""

from __future__ import annotations

import asyncio
import resource
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 15.0
STALL_SECONDS = 60.0
RESERVED_DESCRIPTORS = 64  # for files, pipes and connections to replicas
MAX_BACKLOG = 2048
READ_BYTES = 1 << 12  # at once; asyncio's own limit is 256 KiB


def uvicorn_limits() -> dict[str, Any]:
    """Return the arguments `http` and `backlog` of `uvicorn.Config` for this process's limit of descriptors.

    The event loop accepts up to `backlog` connections before it closes any, so several times that many stay free.
    """
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    backlog = max(16, min(MAX_BACKLOG, descriptors // 16))
    limit = max(16, descriptors - RESERVED_DESCRIPTORS - 3 * backlog)
    return {"http": bounded_protocol(limit), "backlog": backlog}


def bounded_protocol(
    max_connections: int, header_seconds: float = HEADER_SECONDS, stall_seconds: float = STALL_SECONDS
) -> type[H11Protocol]:
    """Return a protocol class whose connections share these bounds."""
    # Connections without a request in progress, longest waiting first. None: kept alive, closed by uvicorn's own timer.
    waiting: dict[H11Protocol, asyncio.TimerHandle | None] = {}
    closing: set[H11Protocol] = set()  # closed here; the event loop ends them in its next turn

    class BoundedProtocol(H11Protocol):
        stall_timer: asyncio.TimerHandle | None = None  # runs while bytes wait to be sent

        def connection_made(self, transport: Any) -> None:
            with suppress(AttributeError):  # another event loop than asyncio's
                transport.max_size = READ_BYTES
            transport.set_write_buffer_limits(0)  # `pause_writing` is called for every byte that waits
            super().connection_made(transport)
            self._limit_header_time()
            if len(self.connections) - len(closing) > max_connections:
                oldest, timer = next(iter(waiting.items()))
                del waiting[oldest]  # so that the next arrival of the same turn closes another one
                if timer is not None:
                    timer.cancel()
                closing.add(oldest)
                oldest.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            self._stop_stall_timer()
            closing.discard(self)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_waiting()
            elif waiting.get(self) is None and not self.transport.is_closing():
                self._limit_header_time()  # the first bytes of the next request

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.cycle.response_complete and not self.transport.is_closing():  # no next request has begun
                waiting.setdefault(self, None)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._start_stall_timer()

        def resume_writing(self) -> None:
            self._stop_stall_timer()
            super().resume_writing()

        def _start_stall_timer(self) -> None:
            unsent = self.transport.get_write_buffer_size()
            self.stall_timer = self.loop.call_later(stall_seconds, self._drop_if_stalled, unsent)

        def _stop_stall_timer(self) -> None:
            if self.stall_timer is not None:
                self.stall_timer.cancel()
                self.stall_timer = None

        def _drop_if_stalled(self, unsent: int) -> None:
            if self.transport.get_write_buffer_size() >= unsent:
                self.transport.abort()
            else:
                self._start_stall_timer()

        def _limit_header_time(self) -> None:
            waiting.pop(self, None)
            waiting[self] = self.loop.call_later(header_seconds, self.transport.close)

        def _stop_waiting(self) -> None:
            timer = waiting.pop(self, None)
            if timer is not None:
                timer.cancel()

    return BoundedProtocol

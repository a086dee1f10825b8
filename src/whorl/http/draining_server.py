"""The server of an application that drains: uvicorn, its settings, signals.

After the first SIGTERM or Ctrl-C the server keeps its port open and drains: /health returns "draining", new requests get
503, and running ones get `drain_seconds`. Then the process exits with code 0. A second signal ends it immediately.

uvicorn alone closes its port at the signal, so a load balancer would see refused connections and mark the server as dead.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import uvicorn

from whorl.http.connections import uvicorn_limits

LOG = logging.getLogger("whorl.http")
FLUSH_SECONDS = 5  # for responses that are written but not yet sent


class Drainable(Protocol):
    """The part of an application's state that a draining server needs. draining: reject new requests."""

    draining: bool

    @property
    def in_flight(self) -> int:
        """Requests or sequences without a complete response."""

    async def wait_drained(self) -> None:
        """Wait until none is in flight."""

    def abort(self) -> None:
        """End the responses that are not complete."""


class DrainingServer(uvicorn.Server):
    """uvicorn server that drains before it closes.

    Args:
        on_ready: called once when the server listens.
        on_force_exit: called in the handler of a second signal.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        state: Drainable,
        drain_seconds: float,
        on_ready: Callable[[], None] = lambda: None,
        on_force_exit: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(config)
        self.state, self.drain_seconds = state, drain_seconds
        self._on_ready, self._on_force_exit = on_ready, on_force_exit
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start the drain. The signal is not stored: uvicorn would raise it again and change the exit code."""
        if self.state.draining or self._loop is None:
            self.should_exit = self.force_exit = True
            self._on_force_exit()
        else:
            self.state.draining = True
            self._loop.call_soon_threadsafe(self.drain)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close. At a second signal also end responses and lifespan, whose tasks uvicorn leaves to be cancelled."""
        if self.force_exit:
            self.state.abort()
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()

    def drain(self) -> None:
        """Reject new requests from now on and close when none is in flight. Called in the event loop."""
        self.state.draining = True
        if self._drain is None:
            self._drain = asyncio.get_running_loop().create_task(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        LOG.warning("draining: %d running requests get %g s", self.state.in_flight, self.drain_seconds)
        try:
            await asyncio.wait_for(self.state.wait_drained(), self.drain_seconds)
        except TimeoutError:
            LOG.warning("%d requests were aborted", self.state.in_flight)
            self.state.abort()
        self.should_exit = True


def server_config(app: Any, log_level: str = "warning", **settings: Any) -> uvicorn.Config:
    """Return uvicorn's settings: keep-alive, bounds on connections, time to flush; `settings` replace them."""
    shared = {
        "access_log": False,
        "lifespan": "on",
        "timeout_keep_alive": 75,
        "timeout_graceful_shutdown": FLUSH_SECONDS,
        "server_header": False,
    }
    return uvicorn.Config(app, log_level=log_level, **{**shared, **uvicorn_limits(), **settings})

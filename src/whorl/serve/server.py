"""The server process: uvicorn, signals, draining.

After the first SIGTERM or Ctrl-C the server keeps its port open and drains: /health returns "draining", /health/ready 503,
and new requests get 503 with retry-after. Running sequences get at most `drain_seconds`. Then the process exits with code 0.
A second signal ends it immediately.

uvicorn alone closes its port at the signal, so a load balancer would see refused connections and mark the server as dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from whorl.errors import ConfigError
from whorl.http.connections import uvicorn_limits
from whorl.http.hosts import http_address, is_loopback, print_pages
from whorl.http.server_process import prepare_server_process
from whorl.serve.api.app import create_app
from whorl.serve.app_state import LIMITS_FOLDER, AppState
from whorl.serve.config import ServeConfig
from whorl.serve.errors import ApiError
from whorl.serve.middleware.auth import KeyStore

LOG = logging.getLogger("whorl.serve")
FLUSH_SECONDS = 5  # for responses that are written but not yet sent


class DrainingServer(uvicorn.Server):
    """uvicorn server that drains before it closes."""

    def __init__(self, config: uvicorn.Config, state: AppState) -> None:
        super().__init__(config)
        self.state = state
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start the drain. The signal is not stored: uvicorn would raise it again and change the exit code."""
        if self.state.draining or self._loop is None:
            self.should_exit = self.force_exit = True
        else:
            self.state.draining = True
            self._loop.call_soon_threadsafe(self.drain)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close. At a second signal also end streams and lifespan, whose tasks uvicorn leaves to be cancelled."""
        if self.force_exit:
            self._end_streams()
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()

    def drain(self) -> None:
        """Reject new requests from now on and close when no sequence runs. Called in the event loop."""
        self.state.draining = True
        if self._drain is None:
            self._drain = asyncio.get_running_loop().create_task(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        running = len(self.state.worker.streams)
        LOG.warning("draining: %d running sequences get %g s", running, self.state.config.drain_seconds)
        try:
            await asyncio.wait_for(self.state.worker.wait_drained(), self.state.config.drain_seconds)
        except TimeoutError:
            LOG.warning("%d sequences were ended", len(self.state.worker.streams))
            self._end_streams()
        self.should_exit = True

    def _end_streams(self) -> None:
        error = ApiError(
            503, "the server shut down before the output was complete", code="shutdown", retry_after=1
        )
        for stream in list(self.state.worker.streams.values()):
            stream.end_with_error(error)


def check_auth_required(config: ServeConfig, no_auth: bool = False) -> None:
    """Check that a server which is reachable from other machines requires API keys.

    Raises:
        ConfigError: it does not and `no_auth` is False, or the key file does not exist.
    """
    if config.key_file is not None and not config.key_file.is_file():
        raise ConfigError(
            f"the key file {config.key_file} does not exist",
            expected="a file written by `whorl keys add`",
            do=f"make a key with `whorl keys add NAME --file {config.key_file}`",
        )
    if config.key_file is not None or no_auth or is_loopback(config.host):
        return
    raise ConfigError(
        f"--host {config.host} is reachable from other machines, and no keys are required",
        expected="--api-key-file FILE, or 127.0.0.1",
        do="make a key with `whorl keys add NAME`; or pass --no-auth if access is restricted elsewhere",
    )


def api_key_check(config: ServeConfig) -> Callable[[str], bool] | None:
    """Return whether a key of the server's file is valid, as a function for its router; None without keys."""
    if config.key_file is None:
        return None
    keys = KeyStore(config.key_file)
    return lambda key: keys.authenticate(key) is not None


def run_server(
    state: AppState,
    sock: socket.socket,
    on_ready: Callable[[str], None] = lambda url: None,
    log_level: str = "warning",
) -> None:
    """Serve connections of `sock` until a signal; return when all are closed.

    Calls `on_ready` with the URL, then prints the addresses of the pages. A replica prints none: its router does.
    """
    config = state.config
    port = sock.getsockname()[1]
    raise_fd_limit()
    prepare_server_process()
    server = DrainingServer(uvicorn_config(create_app(state), log_level), state)
    url = http_address(config.host, port)
    on_ready(url)
    if LIMITS_FOLDER not in os.environ:
        print_pages(url)
    server.run(sockets=[sock])


def uvicorn_config(app: FastAPI, log_level: str = "warning") -> uvicorn.Config:
    """Return the settings of a server: keep-alive, bounds on connections, time to send what is written."""
    return uvicorn.Config(
        app,
        log_level=log_level,
        access_log=False,
        lifespan="on",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=FLUSH_SECONDS,
        server_header=False,
        **uvicorn_limits(),
    )


def bind_socket(config: ServeConfig) -> socket.socket:
    """Return a socket that listens on the configured address.

    Raises:
        ConfigError: the address is in use or does not belong to this machine.
    """
    host, port = config.host, config.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # IPPROTO_TCP is explicit because asyncio sets TCP_NODELAY only then. Otherwise a client with delayed acknowledgements
    # gets each response 40 ms late.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}",
            expected="an address of this machine and a free port",
            do="choose another with --port, or 0 for any",
        ) from error
    listener.listen(4096)  # backlog: connections that may arrive at one moment
    return listener


def raise_fd_limit() -> None:
    """Raise the limit of open file descriptors to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

"""The process: uvicorn around the application, and how it ends.

SIGTERM (or Ctrl-C) once: the server goes on listening, so that whoever routes to it can hear that it stops: /health
says "draining", /health/ready is 503, whatever is new is a 503 with retry-after. What runs goes on to its end, for
`drain_seconds` at most. Then the process ends, with exit code 0. A second signal ends it at once.

uvicorn alone would close its port at the signal: a balancer would see refused connections and call it dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import resource
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from whorl.errors import ConfigError
from whorl.serve.api.app import create_app
from whorl.serve.app_state import LOOPBACK_HOSTS, AppState
from whorl.serve.config import ServeConfig

LOG = logging.getLogger("whorl.serve")
FLUSH_SECONDS = 5  # for what is written and not yet sent


class DrainingServer(uvicorn.Server):
    """uvicorn, which drains before it closes."""

    def __init__(self, config: uvicorn.Config, state: AppState) -> None:
        super().__init__(config)
        self.state = state
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal. It is not kept for later, as uvicorn does, which would raise it again and spoil the exit code."""
        if self.state.draining or self._loop is None:
            self.should_exit = self.force_exit = True
        else:
            self.state.draining = True
            self._loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Takes nothing new from now on; closes when nothing runs any more. In the event loop."""
        self.state.draining = True
        if self._drain is None:
            self._drain = asyncio.get_running_loop().create_task(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        running = len(self.state.worker.streams)
        LOG.warning("stopping: %d sequences run, given %g s", running, self.state.config.drain_seconds)
        try:
            await asyncio.wait_for(self.state.worker.wait_drained(), self.state.config.drain_seconds)
        except TimeoutError:
            LOG.warning("%d sequences were cut off", len(self.state.worker.streams))
            for stream in list(self.state.worker.streams.values()):
                stream.truncate()
        self.should_exit = True


def check_auth_required(config: ServeConfig, no_auth: bool = False) -> None:
    """That a server which others can reach asks for keys.

    Raises:
        ConfigError: it does not, and `no_auth` did not say that this is meant; or the file of keys is not there.
    """
    if config.key_file is not None and not config.key_file.is_file():
        raise ConfigError(
            f"there is no file of keys {config.key_file}",
            expected="what `whorl keys add` writes",
            do=f"make a key with `whorl keys add NAME --file {config.key_file}`",
        )
    if config.key_file is not None or no_auth or is_loopback(config.host):
        return
    raise ConfigError(
        f"--host {config.host} can be reached by others, and no keys are asked for",
        expected="--api-key-file FILE, or 127.0.0.1",
        do="make a key with `whorl keys add NAME`; or say --no-auth if something else keeps strangers out",
    )


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine can reach it."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host in LOOPBACK_HOSTS


def run_server(
    state: AppState,
    sock: socket.socket,
    on_ready: Callable[[str], None] = lambda url: None,
    log_level: str = "warning",
) -> None:
    """Serves what comes in through `listening` until a signal; returns when all is closed. `ready` is told the address."""
    config = state.config
    port = sock.getsockname()[1]
    _raise_fd_limit()
    server = DrainingServer(
        uvicorn.Config(
            create_app(state),
            log_level=log_level,
            access_log=False,
            lifespan="on",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=FLUSH_SECONDS,
            server_header=False,
        ),
        state,
    )
    shown = f"[{config.host}]" if ":" in config.host else config.host
    on_ready(f"http://{shown if shown not in ('0.0.0.0', '[::]') else '127.0.0.1'}:{port}")
    server.run(sockets=[sock])


def bind_socket(config: ServeConfig) -> socket.socket:
    """A socket that listens where `config` says.

    Raises:
        ConfigError: the address is taken, or is not ours.
    """
    host, port = config.host, config.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named as TCP: asyncio sends small writes at once (TCP_NODELAY) only where it can see that. Else a client that
    # acknowledges late would get each answer 40 ms late.
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}",
            expected="an address of this machine and a free port",
            do="choose another with --port, or 0 for any",
        ) from error
    made.listen(4096)  # as many as may arrive at one moment
    return made


def _raise_fd_limit() -> None:
    """As many open connections as the system lets us have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

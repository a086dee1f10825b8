"""The process of a server: its address, its keys, its limit of files, and its run."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from whorl.errors import ConfigError
from whorl.http.draining_server import DrainingServer, server_config
from whorl.http.hosts import http_address, is_loopback, print_pages
from whorl.http.server_process import prepare_server_process
from whorl.serve.api.app import create_app
from whorl.serve.app_state import LIMITS_FOLDER, AppState
from whorl.serve.completion_log import CompletionLog
from whorl.serve.config import EventLogConfig, ServeConfig
from whorl.serve.middleware.auth import KeyStore
from whorl.serve.worker.model_entry import Challenger, ServedEmbedder, ServedModel
from whorl.serve.worker.model_loading import SERVED, ModelLocation
from whorl.serve.worker.served_name import follow_name
from whorl.serve.worker.worker import EngineProtocol
from whorl.store import Store


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


def make_state(
    config: ServeConfig,
    events: EventLogConfig,
    places: Sequence[ModelLocation],
    models: Sequence[ServedModel | ServedEmbedder],
    engine: EngineProtocol | None,
    *,
    is_open: bool = False,
) -> AppState:
    """Return the state of a server.

    Args:
        is_open: without keys on a public address, so that no page shows texts of users.
        places, models: as of `load_models`. With a challenger, the second model is that.

    Raises:
        ConfigError, DataError, LogUnavailableError: the log cannot be opened.
    """
    log, shown = CompletionLog.open(places[0].store, events) if events.logs else None, list(models)
    second = shown.pop(1) if events.challenger else None
    state = AppState(config, shown, engine, events=log)
    state.compare = events.compare
    if log is not None and is_open:
        log.pages = None
    if isinstance(second, ServedModel):
        hidden = replace(second, name=shown[0].name, aliases=frozenset())
        state.challenger = Challenger(hidden, events.traffic)
    for place, one in zip(places, models, strict=False):
        name = SERVED + place.names[0]
        if isinstance(one, ServedModel) and place.address and (name in place.names or log is not None):
            now = place.address if name in place.names else None
            state.background.append(partial(follow_name, state.worker, one, Store(place.store), name, now))
    return state


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
    server = DrainingServer(server_config(create_app(state), log_level), state, config.drain_seconds)
    url = http_address(config.host, port)
    on_ready(url)
    if LIMITS_FOLDER not in os.environ:
        logged = state.events is not None and state.events.pages is not None
        print_pages(url, *(("feed", "loop") if logged else ()))
    server.run(sockets=[sock])


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

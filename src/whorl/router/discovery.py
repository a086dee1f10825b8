"""Replicas that come and go by themselves: a name that resolves to one address each, looked up again and again.

Kubernetes' headless services answer so, and so does any name server with several addresses of one name. Who is new is
added, and is asked once its first look found it healthy; who is gone is taken from the list, while what runs there goes on.
A look-up that fails, or finds nobody at all, changes nothing: a name server's hiccup is no reason to forget every replica.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress

from whorl.errors import ConfigError
from whorl.router.replica_pool import ReplicaPool

LOG = logging.getLogger("whorl.router")
LOOKUP_SECONDS = 2.0


def parse_host_port(name: str) -> tuple[str, int]:
    """ "host:port" -> (host, port). Raises ConfigError."""
    host, _, port = name.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--discover {name}", expected="NAME:PORT, as whorl-replica:8000")
    return host, int(port)


async def resolve_urls(host: str, port: int) -> list[str]:
    """URLs of all that the name stands for; none where it cannot be resolved."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        LOG.warning("%s cannot be resolved: %s", host, error)
        return []
    plain = {(str(to[0]), kind) for kind, _, _, _, to in found}
    return sorted(
        f"http://[{a}]:{port}" if kind == socket.AF_INET6 else f"http://{a}:{port}" for a, kind in plain
    )


def sync_replicas(pool: ReplicaPool, urls: Iterable[str]) -> None:
    """Makes the fleet those of `urls`, if there are any; a replica's name is its address."""
    wanted = {url.removeprefix("http://"): url for url in urls}
    if not wanted:
        return
    for name in [n for n in pool.replicas if n not in wanted]:
        LOG.info("replica %s is gone", name)
        pool.remove(name)
    for name, url in wanted.items():
        if name not in pool.replicas:
            pool.add(name, url)


@asynccontextmanager
async def dns_discovery(pool: ReplicaPool, name: str) -> AsyncIterator[None]:
    """The fleet follows `name` while this lasts. Raises ConfigError: it is no "host:port"."""
    host, port = parse_host_port(name)
    sync_replicas(pool, await resolve_urls(host, port))
    task = asyncio.ensure_future(poll_dns(pool, name))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def poll_dns(pool: ReplicaPool, name: str, every: float = LOOKUP_SECONDS) -> None:
    """Looks `name` ("host:port") up for ever."""
    host, port = parse_host_port(name)
    while True:
        sync_replicas(pool, await resolve_urls(host, port))
        await asyncio.sleep(every)

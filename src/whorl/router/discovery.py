"""Discovery of replicas by DNS: a name that resolves to one address per replica, resolved repeatedly.

Headless services of Kubernetes work like this, as does any DNS name with several addresses. A new address is added and gets
requests after its first successful health check. A missing address is removed from the pool, and its running requests
continue. A failed or empty lookup changes nothing, so that a DNS outage does not remove all replicas.
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
    """Parse "host:port" to (host, port). Raises ConfigError."""
    host, _, port = name.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--discover {name}", expected="NAME:PORT, for example whorl-replica:8000")
    return host, int(port)


async def resolve_urls(host: str, port: int) -> list[str]:
    """Return the URLs of all addresses of a name; an empty list if it cannot be resolved."""
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        LOG.warning("%s cannot be resolved: %s", host, error)
        return []
    addresses = {(str(address[0]), family) for family, _, _, _, address in infos}
    return sorted(
        f"http://[{a}]:{port}" if family == socket.AF_INET6 else f"http://{a}:{port}"
        for a, family in addresses
    )


def sync_replicas(pool: ReplicaPool, urls: Iterable[str]) -> None:
    """Make the pool consist of `urls`, unless `urls` is empty. The name of a replica is its address."""
    urls_by_name = {url.removeprefix("http://"): url for url in urls}
    if not urls_by_name:
        return
    for name in [n for n in pool.replicas if n not in urls_by_name]:
        LOG.info("replica %s was removed", name)
        pool.remove(name)
    for name, url in urls_by_name.items():
        if name not in pool.replicas:
            pool.add(name, url)


@asynccontextmanager
async def dns_discovery(pool: ReplicaPool, name: str) -> AsyncIterator[None]:
    """Keep the pool in sync with DNS while the context is open. Raises ConfigError if `name` is not "host:port"."""
    host, port = parse_host_port(name)
    sync_replicas(pool, await resolve_urls(host, port))
    task = asyncio.ensure_future(poll_dns(pool, name))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def poll_dns(pool: ReplicaPool, name: str, interval: float = LOOKUP_SECONDS) -> None:
    """Resolve `name` ("host:port") repeatedly and update the pool."""
    host, port = parse_host_port(name)
    while True:
        sync_replicas(pool, await resolve_urls(host, port))
        await asyncio.sleep(interval)

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
from whorl.router.replica_pool import Fleet

LOG = logging.getLogger("whorl.serve")
EVERY = 2.0


def parse(name: str) -> tuple[str, int]:
    """ "host:port" -> (host, port). Raises ConfigError."""
    host, _, port = name.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--discover {name}", expected="NAME:PORT, as whorl-replica:8000")
    return host, int(port)


async def addresses(host: str, port: int) -> list[str]:
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


def keep(fleet: Fleet, urls: Iterable[str]) -> None:
    """Makes the fleet those of `urls`, if there are any; a replica's name is its address."""
    wanted = {url.removeprefix("http://"): url for url in urls}
    if not wanted:
        return
    for name in [n for n in fleet.replicas if n not in wanted]:
        LOG.info("replica %s is gone", name)
        fleet.remove(name)
    for name, url in wanted.items():
        if name not in fleet.replicas:
            fleet.add(name, url)


@asynccontextmanager
async def followed(fleet: Fleet, name: str) -> AsyncIterator[None]:
    """The fleet follows `name` while this lasts. Raises ConfigError: it is no "host:port"."""
    host, port = parse(name)
    keep(fleet, await addresses(host, port))
    task = asyncio.ensure_future(follow(fleet, name))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def follow(fleet: Fleet, name: str, every: float = EVERY) -> None:
    """Looks `name` ("host:port") up for ever."""
    host, port = parse(name)
    while True:
        keep(fleet, await addresses(host, port))
        await asyncio.sleep(every)

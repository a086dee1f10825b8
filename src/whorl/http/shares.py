"""Bounds on what clients hold at once: places in a queue, bytes of request bodies.

    the sum of all clients    at most `limit`
    one client                at most `limit_per_client`, so that others find room

A request that finds no room is refused at once with a time to wait, and holds nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Shares:
    """The amounts that clients hold, in one event loop.

    Args:
        limit: of all clients. limit_per_client: by default `limit`.
    """

    def __init__(self, limit: int, limit_per_client: int | None = None) -> None:
        self.limit, self.limit_per_client = limit, limit if limit_per_client is None else limit_per_client
        self.held: Counter[str] = Counter()  # by client
        self.total = 0

    def take(self, client: str, amount: int = 1) -> bool:
        """Return whether there was room; `give_back` returns it."""
        if self.total + amount > self.limit or self.held[client] + amount > self.limit_per_client:
            return False
        self.total += amount
        self.held[client] += amount
        return True

    def give_back(self, client: str, amount: int = 1) -> None:
        """Return what `take` has taken."""
        self.total -= amount
        self.held[client] -= amount
        if self.held[client] <= 0:
            del self.held[client]

    @contextmanager
    def place(self, client: str) -> Iterator[bool]:
        """Hold one place, and yield whether there was one."""
        found = self.take(client)
        try:
            yield found
        finally:
            if found:
                self.give_back(client)

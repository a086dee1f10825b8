"""Work of several clients in turns: a client with many items delays another one by a single item.

Embeddings and grammars are computed one at a time, by the engine's thread and by that of grammars. In a queue that is first
in, first out, 16 grammars of one client delayed the only one of another by 5.6 s. Here the clients take turns (round robin),
and the items of one client keep their order.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from whorl.http.shares import Shares

T = TypeVar("T")


class FairQueue(Generic[T]):
    """A queue that any thread may use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: dict[str, deque[T]] = {}  # by client; the first one is next
        self._last = ""

    def put(self, client: str, item: T) -> None:
        """Append an item of a client."""
        with self._lock:
            self._items.setdefault(client, deque()).append(item)

    def pop(self) -> T | None:
        """Return the oldest item of the client that is next in turn; None if the queue is empty."""
        with self._lock:
            if (own := self._items.pop(self._last, None)) is not None:
                self._items[self._last] = own
            if not self._items:
                return None
            self._last = next(iter(self._items))
            item = self._items[self._last].popleft()
            if not self._items[self._last]:
                del self._items[self._last]
            return item

    def __bool__(self) -> bool:
        return bool(self._items)


class FairThread:
    """A thread that runs functions for the clients of one event loop, in turns.

    Args:
        name: of the thread. limit, limit_per_client: functions that may wait or run.
    """

    def __init__(self, name: str, limit: int, limit_per_client: int) -> None:
        self._places = Shares(limit, limit_per_client)
        self._queue: FairQueue[tuple[str, Future[Any], Callable[[], Any]]] = FairQueue()
        self._thread = ThreadPoolExecutor(1, name)

    async def run(self, client: str, function: Callable[[], T]) -> T:
        """Return function() or raise its exception. A place is held until the turn is over, also after a cancellation.

        Raises:
            asyncio.QueueFull: too many wait.
        """
        if not self._places.take(client):
            raise asyncio.QueueFull
        future = Future[T]()
        self._queue.put(client, (client, future, function))
        self._thread.submit(self._run_next, asyncio.get_running_loop())
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _run_next(self, loop: asyncio.AbstractEventLoop) -> None:
        item = self._queue.pop()
        assert item is not None
        client, future, function = item
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
        loop.call_soon_threadsafe(self._places.give_back, client)

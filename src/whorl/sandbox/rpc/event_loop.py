"""Event loops without sockets, in the process of a program and in that of its tests.

asyncio wakes a loop from other threads through a pair of sockets, which the sandbox forbids. A loop of one thread needs
none. A coroutine of the program runs to its end in the program's process when the tests await it, so two that the tests
gather run one after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any


class SocketlessEventLoop(asyncio.SelectorEventLoop):
    """The selector's loop without its pair of sockets."""

    def _make_self_pipe(self) -> None:
        pass

    def _close_self_pipe(self) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


class SocketlessPolicy(asyncio.DefaultEventLoopPolicy):
    """Creates the loops of `asyncio.run`."""

    _loop_factory = SocketlessEventLoop


def install_policy() -> None:
    """Let `asyncio` use these loops in this process and its forks."""
    asyncio.set_event_loop_policy(SocketlessPolicy())


async def _result(value: Awaitable[Any]) -> Any:
    return await value


_loops: list[SocketlessEventLoop] = []  # one for all calls, since queues and locks belong to a loop


def run_awaitable(value: Awaitable[Any]) -> Any:
    """Return the result of an awaitable."""
    if not _loops:
        _loops.append(SocketlessEventLoop())
    return _loops[0].run_until_complete(_result(value))

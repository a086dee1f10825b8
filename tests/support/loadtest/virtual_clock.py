"""An event loop whose clock jumps to the next timer instead of waiting for it: exact times in tests, and no waiting."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    """Never waits: time that a timer still has to wait is put on the loop's clock."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everybody waits, and for no timer")
        self.loop.moment += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Seconds since it was made, all of them imagined."""

    def __init__(self) -> None:
        self.moment = 0.0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.moment


def run(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns, in a loop of its own."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)

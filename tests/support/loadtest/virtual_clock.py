"""An event loop with a virtual clock that jumps to the next timer: exact times without waiting."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    """Adds the time until the next timer to the loop's clock instead of waiting."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("deadlock: no timer is pending")
        self.loop.moment += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time is virtual seconds since the creation."""

    def __init__(self) -> None:
        self.moment = 0.0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.moment


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in a new virtual loop and return its result."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)

"""How long callbacks hold the event loop: a heartbeat measures how late it wakes.

delay    wake-up after the planned time: a callback ran, or this thread waited for the interpreter's lock or a core
own      the part of it in which this thread computed, at most; the rest is due to other threads and processes
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

BEAT_SECONDS = 0.02
LOOP_GAUGES = {
    "delay": "Longest delay of the event loop since the start",
    "own": "Longest part of a delay in which the event loop's thread computed",
}  # for metrics


class LoopWatchdog:
    """Measures the delay of one event loop while `run` runs in it. on_beat: called with each delay in seconds."""

    def __init__(self, on_beat: Callable[[float], None] = lambda delay: None) -> None:
        self.on_beat = on_beat
        self.longest_delay = self.longest_own = 0.0  # seconds

    def reset(self) -> None:
        self.longest_delay = self.longest_own = 0.0

    async def run(self) -> None:
        """Measure until it is cancelled."""
        while True:
            planned, computed = time.perf_counter() + BEAT_SECONDS, time.thread_time()
            await asyncio.sleep(BEAT_SECONDS)
            delay = max(0.0, time.perf_counter() - planned)
            own = min(delay, time.thread_time() - computed)
            self.longest_delay, self.longest_own = max(self.longest_delay, delay), max(self.longest_own, own)
            self.on_beat(delay)

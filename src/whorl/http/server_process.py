"""Settings of a process that serves HTTP, before its event loop starts, and the return of freed memory while it runs."""

from __future__ import annotations

import asyncio
import gc
import math
import sys

import psutil

from whorl.machine.malloc import share_one_arena, trim_freed_memory

SWITCH_SECONDS = (
    0.0005  # a computing thread yields the interpreter's lock after it; by default 10 times as late
)
TRIM_SECONDS = 10.0  # how often freed memory is returned
TRIM_BYTES = 32 << 20  # and after which growth


def prepare_server_process() -> None:
    """Keep other threads and the collector from holding the event loop, and large requests from leaving fragments."""
    share_one_arena()
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()  # a full collection would hold the event loop while it walks all objects of the libraries


async def trim_memory() -> None:
    """Return memory that large requests have freed to the system. Runs until it is cancelled."""
    process, least = psutil.Process(), math.inf
    while True:
        least = min(least, process.memory_info().rss)
        await asyncio.sleep(TRIM_SECONDS)
        if process.memory_info().rss > least + TRIM_BYTES:
            await asyncio.to_thread(trim_freed_memory)

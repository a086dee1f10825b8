"""Settings of a process that serves HTTP, before its event loop starts."""

from __future__ import annotations

import gc
import sys

from whorl.machine.malloc import share_one_arena

SWITCH_SECONDS = (
    0.0005  # a computing thread yields the interpreter's lock after it; by default 10 times as late
)


def prepare_server_process() -> None:
    """Keep other threads and the collector from holding the event loop, and large requests from leaving fragments."""
    share_one_arena()
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()  # a full collection would hold the event loop while it walks all objects of the libraries

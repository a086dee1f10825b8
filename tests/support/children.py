"""The child processes of this one, by the names that `machine/process.py` gives them."""

from __future__ import annotations

from contextlib import suppress

import psutil


def children(name: str, parent: int | None = None) -> list[psutil.Process]:
    """Return the running descendants of a process whose name starts with `name`: "replica", "producer", "checkpoints"."""
    found = []
    for process in psutil.Process(parent).children(recursive=True):
        with suppress(psutil.Error):
            if process.name().startswith(name) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found

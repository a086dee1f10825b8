"""Waiting for processes."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def wait_until(ready: Callable[[], object]) -> None:
    """Return when `ready` is true; fails after a minute."""
    deadline = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def has_exited(pid: int) -> bool:
    """Whether the process is gone or a zombie."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE

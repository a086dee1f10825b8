"""Which core a replica runs on, held fast.

The kernel moves a busy process from core to core when a third one wants to run, and each time it leaves its caches
behind. Replicas that meet three times a step wait for the one that was moved. A replica that is pinned to cores of its
own stays; the helpers (loader, tokenising workers, checkpoint writer) are not pinned, so the kernel finds them a place.

The subtle part is who inherits. On Linux the set of allowed cores belongs to a *thread*; threads and processes that it
starts get a copy. A loader that was started by a pinned replica would sit on that replica's core for ever. So: pin after
the helpers are there (`pretrain` does), and start whatever comes later inside `unpinned()`.

Cores are dealt so that hyperthreads of one core, and cores of one socket, go to one replica. Nothing is pinned where
there are fewer cores than replicas need (two on one core is worse than anything the kernel does), nor where the system
has no such call. Off unless asked for: `bench/train_system.py` says what it is worth here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from whorl.runs.machine import usable_cores

TOPOLOGY = Path("/sys/devices/system/cpu")
_free: dict[int, set[int]] = {}  # of this process: the cores that it had before it was pinned, by process id


def can_pin() -> bool:
    """Whether this system lets a process choose its cores."""
    return hasattr(os, "sched_setaffinity")


def in_order(cores: set[int], topology: Path = TOPOLOGY) -> list[int]:
    """Neighbours side by side: by socket, then by core, then by number."""

    def number(core: int, name: str) -> int:
        try:
            return int((topology / f"cpu{core}" / "topology" / name).read_text())
        except (OSError, ValueError):
            return 0 if name == "physical_package_id" else core

    return sorted(cores, key=lambda c: (number(c, "physical_package_id"), number(c, "core_id"), c))


def shares(cores: Sequence[int], replicas: int, threads: int = 1) -> list[set[int]] | None:
    """The cores of each replica, all of one size; None where each cannot have one for every thread. Pure."""
    each = len(cores) // replicas
    if each < max(1, threads):
        return None
    return [set(cores[r * each : (r + 1) * each]) for r in range(replicas)]


@contextmanager
def pinned(rank: int, replicas: int, threads: int = 1, *, on: bool = True) -> Iterator[set[int] | None]:
    """This thread, and those of torch's pool if there are several a replica, on the cores of replica `rank`.

    Gives the cores, or None where nothing was pinned: off, no such call, fewer cores than threads, a container's quota below
    its cores (then the kernel's own choice is better). Afterwards all is as before.
    """
    if not on or not can_pin():
        yield None
        return
    before = os.sched_getaffinity(0)
    parts = shares(in_order(before), replicas, threads) if usable_cores() >= len(before) else None
    if parts is None:
        yield None
        return
    moved = {task: os.sched_getaffinity(task) for task in _tasks(threads)}
    _free[os.getpid()] = before
    try:
        _move(dict.fromkeys(moved, parts[rank]))
        yield parts[rank]
    finally:
        _free.pop(os.getpid(), None)
        _move(moved)


@contextmanager
def unpinned() -> Iterator[None]:
    """What is started here, process or thread, may run on all cores that were there before `pinned`."""
    free = _free.get(os.getpid())
    if free is None:
        yield
        return
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, free)
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)


def _tasks(threads: int) -> list[int]:
    """This thread alone; with several a replica all threads that there are, since the pool's cannot be told from others."""
    tasks = Path("/proc/self/task")
    return [int(t.name) for t in tasks.iterdir()] if threads > 1 and tasks.exists() else [0]


def _move(where: dict[int, set[int]]) -> None:
    for task, cores in where.items():
        with suppress(ProcessLookupError):  # a thread that has ended since
            os.sched_setaffinity(task, cores)

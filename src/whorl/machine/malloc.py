"""Settings of glibc's allocator; without effect on other systems."""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Any

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD, ARENA_MAX = -1, -2, -3, -8  # malloc.h


def keep_freed_memory() -> None:
    """Configure the allocator to reuse freed memory.

    By default it returns large blocks to the kernel, and every new page costs a fault. A training step allocates the
    same few hundred tensors each time; a quickstart step lost 4 of 52 ms to that.
    """
    if (mallopt := _libc("mallopt")) is not None:
        mallopt(MMAP_THRESHOLD, 1 << 30)
        mallopt(TRIM_THRESHOLD, 2**31 - 1)
        mallopt(TOP_PAD, 1 << 26)


def request_huge_pages() -> None:
    """Let torch allocate large tensors in huge pages, here and in child processes. Call it before torch is imported.

    Linux by default gives huge pages only where they are requested. A training step of 4 x 192 on two cores with AMX took
    49.3 ms with them and 56.7 without. `THP_MEM_ALLOC_ENABLE=0` in the environment disables them.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def share_one_arena() -> None:
    """Let all threads that start from now on allocate from one arena.

    By default each thread gets a separate arena, which keeps fragments of the large requests that it processed. Four
    waves of attacks (`bench/serve/attack.py`) left 230 MB in them, and 43 MB in one arena.
    """
    if (mallopt := _libc("mallopt")) is not None:
        mallopt(ARENA_MAX, 1)


def trim_freed_memory() -> None:
    """Return freed memory to the system, between jobs; the counterpart of `keep_freed_memory`."""
    if (trim := _libc("malloc_trim")) is not None:
        trim(0)


def _libc(name: str) -> Any:
    """Return a function of glibc, or None."""
    return getattr(ctypes.CDLL(None), name, None) if platform.system() == "Linux" else None

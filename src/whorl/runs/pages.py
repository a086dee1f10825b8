"""Huge pages: 2 MB of memory behind one entry of the processor's page table, instead of 512.

A step walks through hundreds of megabytes of weights, gradients, moments and activations; each 4 kB page of them needs an
entry, and the processor remembers a few thousand. Linux gives huge pages of itself (`always`), to memory that asks
(`madvise`, what most systems have), or to none (`never`). Three ways to ask, none taken unless asked for:

- `advise_huge(tensors)`: for memory that is there already, such as weights and gradients. Memory that replicas *share*
  is a file in memory, with a switch of its own (`shmem_enabled`, `never` on most systems), where it is then not asked for.
- `HUGE_ALLOCATIONS`: an environment variable that torch's CPU allocator reads when it first allocates: it asks for every
  block of 2 MB and more, so for activations too. Set before torch is used; replicas inherit it.
- `glibc.malloc.hugetlb=1` in GLIBC_TUNABLES: the C library asks, for all that it allocates. Set before the process starts.

`bench/train_system.py` says what each is worth here.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from pathlib import Path

from torch import Tensor

HUGE = 2 << 20
HUGE_ALLOCATIONS = {"THP_MEM_ALLOC_ENABLE": "1"}
GLIBC_HUGE = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
SYSTEM = Path("/sys/kernel/mm/transparent_hugepage")
_MADV_HUGEPAGE = 14  # asm-generic/mman-common.h


def setting(name: str = "enabled", system: Path = SYSTEM) -> str:
    """What the kernel has been told: always, madvise (advise) or never; "" where it knows no such thing.

    name: `enabled` for a process's own memory, `shmem_enabled` for what processes share.
    """
    try:
        chosen = re.search(r"\[(\w+)\]", (system / name).read_text())
    except OSError:
        return ""
    return chosen[1] if chosen else ""


def advise_huge(*tensors: Tensor) -> int:
    """Asks for huge pages for the whole 2 MB pieces of these tensors' memory; bytes for which the kernel took the advice.

    The bits stay. The kernel gives huge pages as it touches new memory or, in its own time, to what is in use.
    """
    if platform.system() != "Linux":
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    taken = 0
    for one in {t.untyped_storage().data_ptr(): t for t in tensors if t.device.type == "cpu"}.values():
        whole = one.untyped_storage()
        start = -(-whole.data_ptr() // HUGE) * HUGE
        size = (whole.data_ptr() + whole.nbytes()) // HUGE * HUGE - start
        shared = bool(one.is_shared())  # type: ignore[no-untyped-call]
        allowed = setting("shmem_enabled" if shared else "enabled") not in ("never", "deny", "")
        if size > 0 and allowed:
            refused = libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_HUGEPAGE)
            taken += 0 if refused else size
    return taken


def huge_bytes(pid: int | None = None) -> int:
    """Bytes of a process (this one) that lie on huge pages; 0 where the system does not tell."""
    try:
        text = Path(f"/proc/{pid or os.getpid()}/smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(
        int(kb) * 1024
        for kb in re.findall(r"^(?:AnonHugePages|ShmemPmdMapped): +(\d+) kB", text, re.MULTILINE)
    )

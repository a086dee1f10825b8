"""Staging: the only part of a checkpoint that a training step waits for, a copy from memory to memory.

A checkpoint is a consistent picture of the weights, so nothing may change while it is taken; hashing and writing take
ten times as long as a copy and can be done from the copy (CheckFreq, Mohan et al., FAST 2021, calls the two halves
snapshot and persist). What makes the copy cheap:

- *One flat area, laid out as the file.* The area holds the very bytes that go to the disk, header and all. The writer
  gathers nothing, and hands whole pages to the kernel.
- *Preallocated.* The first touch of a fresh page costs a fault and its zeroing: two to six times what the copy itself
  does. The area is touched once, when training begins, and asked for in huge pages.
- *Several threads.* One core cannot saturate memory. Tensors are cut into pieces of 4 MB, which threads copy with
  `memmove`; it runs outside the interpreter's lock, and from a few MB on it writes past the caches, whereas a
  compute kernel (`Tensor.copy_`) first reads each line that it then overwrites.

The area is an anonymous file in memory (memfd), so that a writer in a process of its own maps the same pages. Where the
system has none, it is this process's own memory, and the writer is a thread.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from whorl.errors import CheckpointError
from whorl.machine.device_probe import usable_cores

PAGE = 4096
CHUNK_BYTES = 4 << 20  # bytes that a thread copies at a time
MAX_THREADS = 8  # memory is saturated long before

# The names that safetensors gives to types.
DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.uint16: "U16",
    torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL",
}  # fmt: skip
DTYPES_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in the file: `offset` from its first byte."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


@dataclass(frozen=True)
class Layout:
    """A safetensors file of given tensors: its header, filled with spaces to whole pages, and where each tensor lies."""

    header: bytes
    entries: dict[str, Entry]
    n_bytes: int

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Layout:
        """The widest types first, so that each tensor is aligned without holes, which the format forbids."""
        order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        described, sizes, at = {}, {}, 0
        for name in order:
            t = tensors[name]
            sizes[name] = (at, t.numel() * t.element_size())
            end = at + sizes[name][1]
            described[name] = {
                "dtype": DTYPE_NAMES[t.dtype],
                "shape": list(t.shape),
                "data_offsets": [at, end],
            }
            at = end
        text = json.dumps(described, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % PAGE)
        header = len(text).to_bytes(8, "little") + text
        entries = {
            n: Entry(DTYPE_NAMES[tensors[n].dtype], tuple(tensors[n].shape), len(header) + start, size)
            for n, (start, size) in sizes.items()
        }
        return cls(header, entries, len(header) + at)

    def matches(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether it is the layout of `tensors`."""
        return len(tensors) == len(self.entries) and all(
            (e := self.entries.get(n)) is not None and e.shape == t.shape and e.dtype == DTYPE_NAMES[t.dtype]
            for n, t in tensors.items()
        )


class StagingBuffer:
    """Memory that is allocated once and holds the bytes of files. `fd` can be mapped by another process; -1: it cannot."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("whorl-checkpoint") if hasattr(os, "memfd_create") else -1
        self.size = 0
        self.memory: mmap.mmap | None = None
        self.flat = torch.empty(0, dtype=torch.uint8)  # the same bytes as a tensor
        self.pinned = False

    def ensure_capacity(self, n_bytes: int) -> None:
        """At least so many bytes, all of them touched. What it held stays; views that were made before stay valid."""
        wanted = -(-n_bytes // PAGE) * PAGE
        if wanted <= self.size:
            return
        try:
            if self.fd >= 0:
                os.ftruncate(self.fd, wanted)
            self.memory = mmap.mmap(self.fd, wanted)
        except OSError as error:
            raise CheckpointError(
                f"no memory for the copy that checkpoints are written from, {wanted / 1e6:,.0f} MB ({error})",
                do="train a smaller model, or on a machine with more memory",
            ) from error
        self.size, self.pinned = wanted, False
        self.flat = torch.frombuffer(self.memory, dtype=torch.uint8)
        for name in (
            "MADV_HUGEPAGE",
            "MADV_POPULATE_WRITE",
        ):  # advice: a kernel that has not heard of it goes without
            self._advise({"MADV_POPULATE_WRITE": 23}.get(name, getattr(mmap, name, -1)))

    def _advise(self, advice: int) -> None:
        advise = getattr(ctypes.CDLL(None), "madvise", None) if os.name == "posix" else None
        if advise is not None and advice >= 0:  # through ctypes, which lets other threads run meanwhile
            advise(ctypes.c_void_p(self.flat.data_ptr()), ctypes.c_size_t(self.size), advice)

    def pin(self) -> None:
        """For copies from a GPU that run by themselves: they need memory that the system never moves."""
        if not self.pinned:
            torch.cuda.cudart().cudaHostRegister(self.flat.data_ptr(), self.size, 0)  # type: ignore[no-untyped-call]
            self.pinned = True

    def view(self, start: int, n_bytes: int) -> memoryview:
        """Bytes from `start` on."""
        assert self.memory is not None
        return memoryview(self.memory)[start : start + n_bytes]

    def tensor(self, entry: Entry, start: int = 0) -> Tensor:
        """The tensor that lies there; `start` is where its file begins. It shares the area's memory."""
        begin = start + entry.offset
        return self.flat[begin : begin + entry.n_bytes].view(DTYPES_BY_NAME[entry.dtype]).view(entry.shape)

    def close(self) -> None:
        """Gives the memory back as soon as no view of it is left."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd, self.memory, self.size = -1, None, 0
        self.flat = torch.empty(0, dtype=torch.uint8)


def copy_pool() -> ThreadPoolExecutor:
    """Threads for `copy_all`."""
    return ThreadPoolExecutor(min(MAX_THREADS, usable_cores()), thread_name_prefix="copy")


def read_pool() -> ThreadPoolExecutor:
    """Threads that mostly wait for a disk, which wants several requests at once."""
    return ThreadPoolExecutor(min(MAX_THREADS, 2 * usable_cores()), thread_name_prefix="read")


def copy_to_staging(
    staging: StagingBuffer, layout: Layout, tensors: Mapping[str, Tensor], pool: Executor
) -> None:
    """Copies `tensors` into `area` as `layout` says; when this returns, they may change."""
    staging.ensure_capacity(layout.n_bytes)
    if any(t.is_cuda for t in tensors.values()):
        staging.pin()
    staging.view(0, len(layout.header))[:] = layout.header
    copy_all([(staging.tensor(entry), tensors[name]) for name, entry in layout.entries.items()], pool)


@torch.no_grad()
def copy_all(pairs: Iterable[tuple[Tensor, Tensor]], pool: Executor) -> None:
    """target <- source for every pair of the same shape, whatever their types and devices."""
    work: list[list[tuple[int, int, int]]] = [[]]
    filled, waits = 0, False
    for target, source in pairs:
        plain = source.device.type == target.device.type == "cpu" and source.dtype == target.dtype
        if not (plain and source.is_contiguous() and target.is_contiguous()):
            target.copy_(source, non_blocking=True)
            waits |= source.is_cuda or target.is_cuda
            continue
        to, origin, left = target.data_ptr(), source.data_ptr(), source.numel() * source.element_size()
        while left:
            n = min(left, CHUNK_BYTES - filled)
            work[-1].append((to, origin, n))
            to, origin, left, filled = to + n, origin + n, left - n, filled + n
            if filled == CHUNK_BYTES:
                work.append([])
                filled = 0
    for _ in pool.map(_memmove, work):
        pass
    if waits:
        torch.cuda.synchronize()


def _memmove(pieces: Sequence[tuple[int, int, int]]) -> None:
    for to, origin, n in pieces:
        ctypes.memmove(to, origin, n)

"""Staging: a memory-to-memory copy, the only part of a checkpoint that stalls training.

A checkpoint is a consistent snapshot, so the weights may not change during the copy. Hashing and writing take ten times
as long and use the copy (CheckFreq, Mohan et al., FAST 2021: snapshot and persist). The copy is fast because of:

- *One flat buffer with the file's layout.* The buffer holds exactly the bytes of the file, header included. The writer
  gathers nothing and passes whole pages to the kernel.
- *Preallocation.* The first access to a page costs a fault and zeroing, two to six times the copy. The buffer is touched
  once, when training starts, and uses huge pages.
- *Several threads.* One core cannot saturate memory bandwidth. Threads copy pieces of 4 MB with `memmove`, outside the
  GIL. From a few MB on, `memmove` bypasses the caches; `Tensor.copy_` would first read each line that it overwrites.

The buffer is an anonymous file in memory (memfd), so a writer process maps the same pages. On systems without memfd it
is private memory, and the writer is a thread.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from whorl.errors import CheckpointError
from whorl.machine.device_probe import usable_cores

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

PAGE = 4096
CHUNK_BYTES = 4 << 20  # bytes that a thread copies at a time
MAX_THREADS = 8  # more threads do not increase memory bandwidth

# Names of dtypes in safetensors.
DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.uint16: "U16",
    torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL",
}  # fmt: skip
DTYPES_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class Entry:
    """Location of a tensor in the file: `offset` from the first byte."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


@dataclass(frozen=True)
class FileLayout:
    """Layout of a safetensors file: the header, padded to whole pages, and the location of each tensor."""

    header: bytes
    entries: dict[str, Entry]
    n_bytes: int

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> FileLayout:
        """Return the layout of these tensors.

        Wide types come first, so that tensors are aligned without gaps, which the format forbids.
        """
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
        """Whether this is the layout of `tensors`."""
        return len(tensors) == len(self.entries) and all(
            (e := self.entries.get(n)) is not None and e.shape == t.shape and e.dtype == DTYPE_NAMES[t.dtype]
            for n, t in tensors.items()
        )


class StagingBuffer:
    """A buffer for file contents, allocated once. Another process can map `fd`, unless it is -1."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("whorl-checkpoint") if hasattr(os, "memfd_create") else -1
        self.size = 0
        self.memory: mmap.mmap | None = None
        self.flat = torch.empty(0, dtype=torch.uint8)  # the same bytes as a tensor
        self.pinned = False

    def ensure_capacity(self, n_bytes: int) -> None:
        """Grow to at least `n_bytes` and touch all pages. Contents and existing views stay valid."""
        wanted = -(-n_bytes // PAGE) * PAGE
        if wanted <= self.size:
            return
        try:
            if self.fd >= 0:
                os.ftruncate(self.fd, wanted)
            self.memory = mmap.mmap(self.fd, wanted)
        except OSError as error:
            raise CheckpointError(
                f"no memory for the checkpoint staging buffer, {wanted / 1e6:,.0f} MB ({error})",
                do="train a smaller model, or use a machine with more memory",
            ) from error
        self._unpin()
        self.size = wanted
        self.flat = torch.frombuffer(self.memory, dtype=torch.uint8)
        for name in (
            "MADV_HUGEPAGE",
            "MADV_POPULATE_WRITE",
        ):  # hints: older kernels ignore them
            self._advise({"MADV_POPULATE_WRITE": 23}.get(name, getattr(mmap, name, -1)))

    def _advise(self, advice: int) -> None:
        advise = getattr(ctypes.CDLL(None), "madvise", None) if os.name == "posix" else None
        if advise is not None and advice >= 0:  # through ctypes, which releases the GIL
            advise(ctypes.c_void_p(self.flat.data_ptr()), ctypes.c_size_t(self.size), advice)

    def pin(self) -> None:
        """Pin the memory, for asynchronous copies from a GPU; without it copies are correct, and slower."""
        if not self.pinned:
            self.pinned = _pin(self.flat.data_ptr(), self.size)

    def _unpin(self) -> None:
        """A mapping that is freed while it is pinned leaves its addresses pinned, and a later buffer cannot have them."""
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.flat.data_ptr())  # type: ignore[no-untyped-call]
            self.pinned = False

    def view(self, start: int, n_bytes: int) -> memoryview:
        """The bytes from `start` on."""
        assert self.memory is not None
        return memoryview(self.memory)[start : start + n_bytes]

    def tensor(self, entry: Entry) -> Tensor:
        """A view of the tensor at this entry."""
        content = self.flat[entry.offset : entry.offset + entry.n_bytes]
        return content.view(DTYPES_BY_NAME[entry.dtype]).view(entry.shape)

    def close(self) -> None:
        """Free the memory as soon as no view is left."""
        self._unpin()
        if self.fd >= 0:
            os.close(self.fd)
        self.fd, self.memory, self.size = -1, None, 0
        self.flat = torch.empty(0, dtype=torch.uint8)


def _pin(address: int, size: int) -> bool:
    """Return whether CUDA pinned the memory."""
    if int(torch.cuda.cudart().cudaHostRegister(address, size, 0)) == 0:  # type: ignore[no-untyped-call]
        return True
    with suppress(RuntimeError):
        torch.cuda.synchronize()  # CUDA reports the error once more, and clears it
    return False


def copy_pool() -> ThreadPoolExecutor:
    """Threads for `copy_all`."""
    return ThreadPoolExecutor(min(MAX_THREADS, usable_cores()), thread_name_prefix="copy")


def read_pool() -> ThreadPoolExecutor:
    """Threads for reading: they mostly wait, and a disk needs several requests in flight."""
    return ThreadPoolExecutor(min(MAX_THREADS, 2 * usable_cores()), thread_name_prefix="read")


def copy_to_staging(
    staging: StagingBuffer, layout: FileLayout, tensors: Mapping[str, Tensor], pool: Executor
) -> None:
    """Copy `tensors` into the buffer in this layout; on return, they may change."""
    staging.ensure_capacity(layout.n_bytes)
    if any(t.is_cuda for t in tensors.values()):
        staging.pin()
    staging.view(0, len(layout.header))[:] = layout.header
    copy_all([(staging.tensor(entry), tensors[name]) for name, entry in layout.entries.items()], pool)


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor, without its import, which takes a second."""
    return hasattr(tensor, "device_mesh")


def first_position(tensor: DTensor) -> tuple[int, ...]:
    """Return the position of the local part's first element in the whole."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(
        compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1]
    )


def local_part(target: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tensor to copy into and its part of `whole`."""
    if is_sharded(target):
        local = target.to_local()
        begins = zip(first_position(target), local.shape, strict=True)
        return local, whole[tuple(slice(begin, begin + n) for begin, n in begins)]
    return target, whole


@torch.no_grad()
def copy_all(pairs: Iterable[tuple[Tensor, Tensor]], pool: Executor) -> None:
    """target <- source for every pair of equal shape, with any dtypes and devices."""
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

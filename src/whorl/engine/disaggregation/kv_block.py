"""A prompt's KV pages as one block of shared memory (`kv_transfer.py`).

It has 8 bytes of magic, the header's length (u32), the block's length (u64), a checksum (xxh3-128 of the rest), the
header, and the tensors' pages at multiples of 64 bytes. The header is JSON: fingerprint and version of the weights, page
size, page hashes; for each layer group its window, first page, and dtypes and shapes of its tensors.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import weakref
from collections.abc import Sequence as SequenceABC
from contextlib import suppress
from types import TracebackType
from typing import Any

import torch
import xxhash
from torch import Tensor

from whorl.errors import DataError

MAGIC = b"WHORLKV1"
HEAD = struct.Struct("<8sIQ16s")
_ALIGNMENT = 64
DTYPES = {
    str(t).removeprefix("torch."): t for t in (torch.float32, torch.bfloat16, torch.float16, torch.int8)
}


class KVBlock:
    """The pages of one prompt's prefix, in shared memory.

    Args:
        fd: of the memory; the block owns it and closes it.
        verify_checksum: verify now; otherwise `verify` must return True before the contents are used.

    Raises:
        DataError: the memory holds no complete block.
    """

    header: dict[str, Any]

    def __init__(self, fd: int, verify_checksum: bool = True) -> None:
        self.fd = fd
        self._finalizer = weakref.finalize(self, os.close, fd)
        self.n_bytes = os.fstat(fd).st_size
        self._memory: mmap.mmap | None = None
        if self.n_bytes < HEAD.size:
            self._reject(f"it has {self.n_bytes} bytes", f"at least {HEAD.size}")
        self._memory = memory = mmap.mmap(fd, self.n_bytes)
        magic, n_header, n_bytes, checksum = HEAD.unpack_from(memory)
        if magic != MAGIC:
            self._reject(f"it starts with {magic!r}", repr(MAGIC))
        if n_bytes != self.n_bytes or HEAD.size + n_header > n_bytes:
            self._reject(
                f"its header gives {n_bytes:,} bytes, and it has {self.n_bytes:,}", "a complete block"
            )
        self._payload = align(HEAD.size + n_header)
        self._n_header, self._expected_checksum = n_header, checksum
        self._digest, self._verified_bytes = start_checksum(memory, n_header), HEAD.size
        if verify_checksum:
            self.verify()

    def verify(self, max_bytes: int | None = None) -> bool:
        """Continue the checksum by at most `max_bytes`; returns whether it is complete. Raises DataError on a mismatch."""
        assert self._memory is not None
        stop = self.n_bytes if max_bytes is None else min(self.n_bytes, self._verified_bytes + max_bytes)
        with memoryview(self._memory) as view, view[self._verified_bytes : stop] as part:
            self._digest.update(part)
        self._verified_bytes = stop
        if stop < self.n_bytes:
            return False
        if self._digest.digest() != self._expected_checksum:
            self._reject("its checksum does not match", "the checksum of its contents")
        self.header = json.loads(self._memory[HEAD.size : HEAD.size + self._n_header])
        return True

    @property
    def n_pages(self) -> int:
        """Pages of the prefix."""
        return len(self.header["names"])

    @property
    def n_positions(self) -> int:
        return self.n_pages * int(self.header["page_size"])

    def tensors(self, group: int) -> list[Tensor]:
        """Pages [n, ...] of each tensor of the group, as views of the shared memory."""
        assert self._memory is not None
        offset, out = self._payload, list[Tensor]()
        for number, group_fields in enumerate(self.header["groups"]):
            for dtype_name, shape in group_fields["tensors"]:
                dtype, shape_of_pages = DTYPES[dtype_name], (group_fields["pages"], *shape)
                if number == group:
                    out.append(view_of(self._memory, offset, dtype, shape_of_pages))
                offset = align(offset + n_bytes_of(dtype, shape_of_pages))
        return out

    def close(self) -> None:
        """Release the memory or, if views of it still exist, the descriptor alone."""
        self._finalizer()
        if self._memory is not None:
            with suppress(BufferError):
                self._memory.close()

    def __enter__(self) -> KVBlock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _reject(self, what: str, expected: str) -> None:
        self.close()
        raise DataError(
            f"a block of KV pages: {what}",
            expected=expected,
            do="compute the prompt in the decode engine; the sender may have died during the write",
        )


def align(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def n_bytes_of(dtype: torch.dtype, shape: SequenceABC[int]) -> int:
    n = dtype.itemsize
    for size in shape:
        n *= size
    return n


def view_of(memory: mmap.mmap, offset: int, dtype: torch.dtype, shape: SequenceABC[int]) -> Tensor:
    count = n_bytes_of(dtype, shape) // dtype.itemsize
    if not count:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(tuple(shape))


def start_checksum(memory: mmap.mmap, n_header: int) -> Any:
    """Start the checksum with the two lengths; the caller adds the rest."""
    return xxhash.xxh3_128(struct.pack("<IQ", n_header, len(memory)))

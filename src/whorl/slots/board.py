"""The board: the current weights in shared memory, with a version number.

One writer (the learner), any number of readers, and no lock, so a process may die at any time. It is a seqlock (Lameter
2005, "Effective synchronization on Linux/NUMA systems"). The writer makes a counter odd, copies, and makes it even. A
reader copies between two reads of the counter and retries if they differ or are odd. So a reader never sees a partial
update, and the writer never waits. x86 keeps the order of one process's stores; elsewhere the system calls between
records order them.

Weights are copied as bytes, without pickling or allocation. They may come from any device: the board is host memory,
and a copy returns when its bytes are in place.
"""

from __future__ import annotations

import mmap
import os
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from whorl.errors import ProducerError
from whorl.slots.ring import anonymous_memory
from whorl.slots.spec import ALIGNMENT

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_READ_TIMEOUT = 10.0  # seconds a reader waits for the writer; copies take milliseconds
BoardLayout = tuple[tuple[str, tuple[int, ...]], ...]


class Board:
    """Named fp32 tensors with a version.

    Args:
        layout: (name, shape) of each tensor.
        fd: attach to another board's memory (its `fd`) instead of allocating.
    """

    def __init__(self, layout: BoardLayout, *, fd: int | None = None) -> None:
        import torch

        self.layout = layout
        sizes = [int(np.prod(shape, dtype=np.int64)) for _, shape in layout]
        n_bytes = ALIGNMENT + 4 * sum(sizes)
        self.fd = anonymous_memory(n_bytes, "whorl-board") if fd is None else fd
        weakref.finalize(self, os.close, self.fd)
        memory = mmap.mmap(self.fd, n_bytes)
        self._header = np.frombuffer(memory, np.int64, 2)  # sequence, version
        flat = torch.from_numpy(np.frombuffer(memory, np.float32, offset=ALIGNMENT))
        self._flat = {"": flat}
        self._views: dict[str, Tensor] = {}
        for (name, shape), part in zip(layout, torch.split(flat, sizes), strict=True):
            self._views[name] = part.view(shape)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Board:
        """Return a board of these names and shapes that holds the tensors as version 0."""
        board = cls(tuple((name, tuple(t.shape)) for name, t in tensors.items()))
        board.publish(tensors, 0)
        return board

    @property
    def version(self) -> int:
        """The version of the current weights."""
        return int(self._header[1])

    def publish(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Replace the current weights, or those of them that are given."""
        self._write(tensors, self._views, version)

    def publish_flat(self, weights: NDArray[np.float32], version: int) -> None:
        """Replace the weights from one flat array in layout order (`read_flat` of another board)."""
        import torch

        self._write({"": torch.tensor(weights)}, self._flat, version)

    def add_unlocked(self, deltas: Mapping[str, Tensor]) -> None:
        """Add to the weights from any process, without a lock: of two additions at one moment, parts may be lost."""
        for name, delta in deltas.items():
            self._views[name].add_(delta)
        self._header[1] += 1

    def tensor(self, name: str) -> Tensor:
        """Return weights themselves, for a process that reads or moves parts of them without a lock."""
        return self._views[name]

    def read(self, into: Mapping[str, Tensor]) -> int:
        """Copy current weights into tensors of their names and shapes; return their version.

        Raises:
            ProducerError: the writer died during a `publish`.
        """
        return self._read(into, self._views)

    def read_flat(self) -> tuple[NDArray[np.float32], int]:
        """Return (a copy of all weights in one array, their version)."""
        import torch

        into = torch.empty_like(self._flat[""])
        version = self._read({"": into}, self._flat)
        return into.numpy(), version

    def _write(self, tensors: Mapping[str, Tensor], views: Mapping[str, Tensor], version: int) -> None:
        self._header[0] += 1
        for name in views.keys() & tensors.keys():
            views[name].copy_(tensors[name].detach())
        self._header[1] = version
        self._header[0] += 1

    def _read(self, into: Mapping[str, Tensor], views: Mapping[str, Tensor]) -> int:
        deadline = time.monotonic() + _READ_TIMEOUT
        while time.monotonic() < deadline:
            before = int(self._header[0])
            if before % 2 == 0:
                for name in views.keys() & into.keys():
                    into[name].copy_(views[name])
                version = self.version
                if int(self._header[0]) == before:
                    return version
            time.sleep(0)
        raise ProducerError(
            f"the board's writer has been publishing for {_READ_TIMEOUT:g} s",
            expected="a copy within milliseconds",
            do="check whether the learner died",
        )


class BoardReader:
    """A producer's view of the board: updates a module and stores the version in use."""

    def __init__(self, board: Board) -> None:
        self.board, self.version = board, -1

    def load_into(self, module: torch.nn.Module) -> int:
        """Load the current weights into `module` by parameter name, unless it has them; return their version."""
        import torch

        if self.board.version != self.version:
            with torch.no_grad():
                self.version = self.board.read(dict(module.named_parameters()))
        return self.version

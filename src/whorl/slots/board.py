"""The board: the newest weights, in shared memory, under a version number. How producers learn what to act with.

One writer (the learner), any number of readers, no lock that either could hold while it dies. It is a seqlock: the
writer makes a counter odd, copies, makes it even; a reader copies between two looks at the counter and starts over
when they differ or are odd. So a reader never sees half of an update, and the writer never waits. (Lameter 2005,
"Effective synchronization on Linux/NUMA systems", section on seqlocks. Stores of one process are seen in their
order on x86; elsewhere the kernel calls between two records order them.)

Weights are copied as bytes, field by field, through a `Spec`-like layout: no pickle, no allocation. They may come from any
device, and go to any: the board is host memory, and a copy returns when the bytes are there, so that the order holds.
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

_READ_TIMEOUT = 10.0  # seconds that a reader waits for a writer to finish: copies take milliseconds
BoardLayout = tuple[tuple[str, tuple[int, ...]], ...]


class Board:
    """Named fp32 tensors with a version.

    Args:
        layout: (name, shape) of each tensor.
        fd: attach to another board's memory (its `fd`) rather than making new.
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
        """A board with room for these, holding them as version 0."""
        board = cls(tuple((name, tuple(t.shape)) for name, t in tensors.items()))
        board.publish(tensors, 0)
        return board

    @property
    def version(self) -> int:
        """Of the newest weights."""
        return int(self._header[1])

    def publish(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Make these the newest weights."""
        self._write(tensors, self._views, version)

    def publish_flat(self, weights: NDArray[np.float32], version: int) -> None:
        """The same from one array with all of them, in the order of the layout (`read_flat` of another board)."""
        import torch

        self._write({"": torch.tensor(weights)}, self._flat, version)

    def read(self, into: Mapping[str, Tensor]) -> int:
        """Copy the newest weights into tensors of the same names and shapes; returns their version.

        Raises:
            ProducerError: the writer died in the middle of a `publish`.
        """
        return self._read(into, self._views)

    def read_flat(self) -> tuple[NDArray[np.float32], int]:
        """(all weights in one array of its own, their version)."""
        import torch

        into = torch.empty_like(self._flat[""])
        version = self._read({"": into}, self._flat)
        return into.numpy(), version

    def _write(self, tensors: Mapping[str, Tensor], views: Mapping[str, Tensor], version: int) -> None:
        self._header[0] += 1
        for name, view in views.items():
            view.copy_(tensors[name].detach())
        self._header[1] = version
        self._header[0] += 1

    def _read(self, into: Mapping[str, Tensor], views: Mapping[str, Tensor]) -> int:
        deadline = time.monotonic() + _READ_TIMEOUT
        while time.monotonic() < deadline:
            before = int(self._header[0])
            if before % 2 == 0:
                for name, view in views.items():
                    into[name].copy_(view)
                version = self.version
                if int(self._header[0]) == before:
                    return version
            time.sleep(0)
        raise ProducerError(
            f"the board's writer has been publishing for {_READ_TIMEOUT:g} s",
            expected="a copy of milliseconds",
            do="look whether the learner died",
        )


class BoardReader:
    """A producer's view of the board: brings a module up to date, and remembers with what version it acts."""

    def __init__(self, board: Board) -> None:
        self.board, self.version = board, -1

    def load_into(self, module: torch.nn.Module) -> int:
        """Load the newest weights into `module`, by parameter name, if it does not have them yet; returns their version."""
        import torch

        if self.board.version != self.version:
            with torch.no_grad():
                self.version = self.board.read(dict(module.named_parameters()))
        return self.version

"""Bytes of live tensors while a function runs, uncompiled."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from whorl.models.activation_checkpointing import tensors


class LiveTensorTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, counts the bytes of live storages that operations created, and their peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak = 0
        self.tracked: set[int] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._track((args, kwargs), 0)  # existing storages: size 0
        out = op(*args, **(kwargs or {}))
        self._track(out, 1)
        return out

    def _track(self, found: Any, counts: int) -> None:
        for t in tensors(found):
            if t.layout != torch.strided:
                continue
            storage = t.untyped_storage()
            if id(storage) not in self.tracked:
                size = counts * storage.nbytes()
                self.tracked.add(id(storage))
                self.bytes += size
                self.peak = max(self.peak, self.bytes)
                weakref.finalize(storage, self._release, id(storage), size)

    def _release(self, key: int, size: int) -> None:
        self.tracked.discard(key)
        self.bytes -= size


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the peak bytes of live tensors created while `run()` ran, uncompiled."""
    with LiveTensorTracker() as alive:
        run()
    return int(alive.peak)

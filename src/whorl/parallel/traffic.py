"""Counts what a rank sends: every collective of a region, by axis of the layout, with its bytes and its time.

    with Traffic({mesh.group("tp").group_name: "tp"}) as traffic:
        step()
    traffic.totals()       {("tp", "all_gather"): Total(calls=8, payload=65536, sent=32768.0)}
    traffic.timeline(24)   [(0.0, ""), (0.4, "tp"), ...]: the share that this rank waits in each part, and for which axis

All calls pass torch's dispatcher, those of FSDP2, pipelines and autograd too. The payload is the whole tensor of a call:
what an all-reduce sums, an all-gather returns, an all-to-all or a send takes. By the payload P and the ranks R, a rank
sends (Thakur et al. 2005, doi:10.1177/1094342005051521; rings):

    all_reduce 2 P (R - 1) / R      all_gather, all_to_all, reduce_scatter P (R - 1) / R      send, broadcast P

Receiving is not counted. A call's time lasts until the rank computes again: the rank waits for so long.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operation, and the argument with its payload, by torch's name.
_OPERATIONS = {
    "allreduce_": ("all_reduce", 0), "allgather_": ("all_gather", 0), "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1), "alltoall_base_": ("all_to_all", 1), "alltoall_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0), "send": ("send", 0), "all_reduce": ("all_reduce", 0),
    "all_gather_into_tensor": ("all_gather", None), "all_to_all_single": ("all_to_all", 0),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
}  # fmt: skip
_NAMESPACES = ("c10d", "_c10d_functional")


def sent_share(operation: str, size: int) -> float:
    """Return what a rank of `size` sends of the payload of an operation (see the top of this file)."""
    if operation in ("send", "broadcast"):
        return 1.0
    return (2.0 if operation == "all_reduce" else 1.0) * (size - 1) / size


@dataclass
class CollectiveCall:
    """One collective of this rank; times in seconds of `time.perf_counter`."""

    axis: str
    operation: str
    payload: int
    size: int
    started: float
    ended: float


class Total(NamedTuple):
    """Calls, and bytes, of one operation on one axis."""

    calls: int
    payload: int
    sent: float


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the collectives of this rank. axes: name of a process group -> axis; other groups are "world"."""

    def __init__(self, axes: Mapping[str, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.axes, self.calls = axes, list[CollectiveCall]()
        self._open: CollectiveCall | None = None  # until the rank computes again

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled code compiled: a counted step has the bits of any other."""
        return True

    def __enter__(self) -> Self:
        self.started = time.perf_counter()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.seconds = time.perf_counter() - self.started

    def timeline(self, parts: int) -> list[tuple[float, str]]:
        """Return, for each of so many equal parts of the region, the share of waiting and the axis of most of it."""
        found, width = [], self.seconds / parts
        for low in (self.started + n * width for n in range(parts)):
            waits: dict[str, float] = {}
            for call in self.calls:
                overlap = min(call.ended, low + width) - max(call.started, low)
                waits[call.axis] = waits.get(call.axis, 0.0) + max(0.0, overlap) / width
            share = min(1.0, sum(waits.values()))
            found.append((share, max(waits, key=waits.__getitem__) if share > 0 else ""))
        return found

    def totals(self) -> dict[tuple[str, str], Total]:
        """Return the sums by axis and operation."""
        found: dict[tuple[str, str], Total] = {}
        for call in self.calls:
            n, payload, sent = found.get((call.axis, call.operation), Total(0, 0, 0.0))
            own = call.payload * sent_share(call.operation, call.size)
            found[call.axis, call.operation] = Total(n + 1, payload + call.payload, sent + own)
        return found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        waits = func.namespace in _NAMESPACES
        if self._open is not None and not waits:
            self._open.ended, self._open = time.perf_counter(), None
        began = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        operation, place = _OPERATIONS.get(func._opname, ("", None)) if waits else ("", None)
        if operation:
            name, size = _group(args)
            payload = _bytes(result if place is None else args[place])
            self._open = CollectiveCall(
                self.axes.get(name, "world"), operation, payload, size, began, time.perf_counter()
            )
            self.calls.append(self._open)
        return result


def _group(args: tuple[Any, ...]) -> tuple[str, int]:
    """Return name and size of the group among the arguments of a call."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            group = dist.ProcessGroup.unbox(arg)
            return group.group_name, group.size()
    name = args[-1]
    return name, torch._C._distributed_c10d._resolve_process_group(name).size()


def _bytes(value: Any) -> int:
    return value.nbytes if isinstance(value, Tensor) else sum(map(_bytes, value))

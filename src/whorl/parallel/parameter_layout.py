"""Where each rank's parameters lie in those of the whole model.

All ranks compute the same from the layout and the shapes alone, for any rank. Gradients are summed over the axes on which
a parameter has copies, and the norm counts one copy (`counts`). Matrices go whole to one rank and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from whorl.parallel.tensor_parallel import FIRST, Shard

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Place:
    """How one parameter of the whole model is held.

    shape: of the whole. stages: coordinates on pp that hold it, the first of which counts. expert: the rank of ep with it,
    None: all. sharded: over fsdp along dim 0.
    """

    shape: torch.Size
    shard: Shard
    stages: tuple[int, ...]
    expert: int | None = None
    sharded: bool = True

    @property
    def sums(self) -> tuple[str, ...]:
        """Axes over which the gradient of a backward is summed, apart from fsdp."""
        axes: tuple[str, ...] = ("dp", "cp") if self.expert is not None else ("dp", "ep", "cp")
        axes += () if self.sharded else ("fsdp",)
        return (*axes, "tp") if self.shard.partial else axes

    def holds(self, at: Mapping[str, int]) -> bool:
        """Return whether the rank at these coordinates has a part."""
        first = self.shard.dim != FIRST or at["tp"] == 0
        return first and at["pp"] in self.stages and self.expert in (None, at["ep"])

    def counts(self, at: Mapping[str, int]) -> bool:
        """Return whether the part of a rank is the one of its copies that is counted."""
        zero = [axis for axis in self.sums if axis != "tp"] + (
            [] if isinstance(self.shard.dim, int) else ["tp"]
        )
        return self.holds(at) and at["pp"] == self.stages[0] and all(at[axis] == 0 for axis in zero)

    def pieces(self, at: Mapping[str, int], sizes: Mapping[str, int]) -> list[tuple[Slices, Slices]]:
        """Return (place in this rank's tensor, place in the whole) of each piece of its part."""
        if not self.holds(at):
            return []
        dim = self.shard.dim if isinstance(self.shard.dim, int) else None
        ranges = (
            [(0, self.shape[0])] if dim is None else self.shard.ranges(self.shape[dim], at["tp"], sizes["tp"])
        )
        rows = self._rows(sizes)
        own = (0, rows)
        if self.sharded and sizes["fsdp"] > 1:
            step = -(-rows // sizes["fsdp"])
            own = (min(step * at["fsdp"], rows), min(step * (at["fsdp"] + 1), rows))
        others = [slice(0, n) for n in self.shape]
        found, start = [], 0
        for a, b in ranges:
            local, whole = list(others), list(others)
            if dim in (None, 0):  # both axes split the rows
                low, high = max(own[0], start), min(own[1], start + b - a)
                local[0] = slice(low - own[0], high - own[0])
                whole[0] = slice(a + low - start, a + high - start)
                empty = high <= low
            else:
                assert dim is not None
                local[dim], whole[dim] = slice(start, start + b - a), slice(a, b)
                local[0], whole[0] = slice(0, own[1] - own[0]), slice(*own)
                empty = b <= a or own[1] <= own[0]
            start += b - a
            if not empty:
                found.append((tuple(local), tuple(whole)))
        return found

    def _rows(self, sizes: Mapping[str, int]) -> int:
        """Return the rows of a tensor rank's part, padding included."""
        dim = self.shard.dim
        if dim != 0:
            return self.shape[0]
        return sum(-(-n // sizes["tp"]) for n in self.shard.sections or (self.shape[0],))


class ParameterLayout:
    """The places of all parameters of a model.

    at: coordinates of each rank. groups: of the torch ranks that differ on some axes.
    """

    def __init__(self, places: Mapping[str, Place], layout: object, axes: tuple[str, ...], rank: int) -> None:
        self.places, self.rank = places, rank
        self.sizes = dict(zip(axes, layout.shape, strict=True))  # type: ignore[attr-defined]
        self.at = [layout.at(r) for r in range(layout.ranks)]  # type: ignore[attr-defined]

    def counted(self, name: str) -> bool:
        """Return whether this rank's part of a parameter is counted."""
        return self.places[name].counts(self.at[self.rank])

    def take(self, name: str, whole: Tensor, like: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor; padding is zero. like: the part's shape."""
        part = torch.zeros_like(like)
        for local, piece in self.places[name].pieces(self.at[self.rank], self.sizes):
            part[local] = whole[piece]
        return part

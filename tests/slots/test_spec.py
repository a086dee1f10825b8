"""Specs: memory layout of a dataclass, and errors that name the field."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

import numpy as np
import pytest
from numpy.typing import NDArray

from whorl.errors import ConfigError
from whorl.slots import SlotRing, Spec


@dataclass(frozen=True)
class Mixed:
    flags: Annotated[NDArray[np.bool_], "T"]
    table: Annotated[NDArray[np.float32], "B", "T", 3]
    one: NDArray[np.int64]


@dataclass
class Thawed:
    values: Annotated[NDArray[np.float32], "N"]


@dataclass(frozen=True)
class Empty:
    pass


@dataclass(frozen=True)
class NotArrays:
    name: str


def test_spec_fields_keep_order_shape_and_dtype() -> None:
    spec = Spec.from_dataclass(Mixed, B=2, T=5)
    assert [(n, f.shape, f.dtype) for n, f in spec.fields.items()] == [
        ("flags", (5,), np.dtype(np.bool_)),
        ("table", (2, 5, 3), np.dtype(np.float32)),
        ("one", (), np.dtype(np.int64)),
    ]


def test_spec_fields_are_aligned_and_disjoint() -> None:
    record = Spec.from_dataclass(Mixed, B=2, T=5).allocate()
    arrays = [getattr(record, f.name) for f in fields(record)]
    for number, array in enumerate(arrays, start=1):
        array[...] = number
    assert [set(array.flatten().tolist()) for array in arrays] == [{True}, {2.0}, {3}]
    base = arrays[0].ctypes.data
    assert [(array.ctypes.data - base) % 64 for array in arrays] == [0, 0, 0]


def test_ring_slots_are_disjoint() -> None:
    ring = SlotRing(Spec.from_dataclass(Mixed, B=2, T=5), 3)
    for slot in ring.slots:
        slot.data.table[:] = slot.index
        slot.data.one[...] = slot.index
    assert [(set(s.data.table.flatten().tolist()), int(s.data.one)) for s in ring.slots] == [
        ({0.0}, 0),
        ({1.0}, 1),
        ({2.0}, 2),
    ]


@pytest.mark.parametrize(
    ("record", "sizes", "words"),
    [
        (Thawed, {"N": 2}, "Thawed cannot describe a slot"),
        (NotArrays, {}, r"NotArrays\.name"),
        (Mixed, {"B": 2}, "'T' without a value"),
        (Mixed, {"B": 2, "T": 5, "K": 1}, "no size 'K'"),
        (Mixed, {"B": 2, "T": -5}, r"Mixed\.flags has shape \(-5,\).*(\n.*)*positive"),
        (int, {}, "frozen dataclass"),
        (Empty, {}, "Empty has no fields"),
    ],
)
def test_spec_from_dataclass_invalid_raises(record: type, sizes: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Spec.from_dataclass(record, **sizes)


def test_ring_without_slots_raises() -> None:
    with pytest.raises(ConfigError, match="0 slots"):
        SlotRing(Spec.from_dataclass(Mixed, B=1, T=1), 0)

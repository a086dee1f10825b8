"""Specs and slots: memory layout of a dataclass, checked assignments and transitions, errors that name the field."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.support.slots import examples
from typing_extensions import TypeAliasType, TypeVar

from whorl.errors import ConfigError, ProducerError
from whorl.slots import SlotRing, SlotState, Spec
from whorl.slots.spec import FieldArray


@dataclass(frozen=True)
class Mixed:
    flags: Annotated[NDArray[np.bool_], "T"]
    table: Annotated[NDArray[np.float32], "B", "T", 3]
    one: NDArray[np.int64]


SPEC = Spec.from_dataclass(Mixed, B=2, T=5)


@dataclass
class Thawed:
    values: Annotated[NDArray[np.float32], "N"]


Number = TypeVar("Number")
Alias = TypeAliasType("Alias", np.ndarray[Any, np.dtype[Number]], type_params=(Number,))


@dataclass(frozen=True)
class Aliased:
    """As NDArray is from numpy 2.5 on."""

    values: Annotated[Alias[np.int64], "T"]


@dataclass(frozen=True)
class Empty:
    pass


@dataclass(frozen=True)
class NotArrays:
    name: str


def test_spec_fields_keep_order_shape_and_dtype() -> None:
    found = [(name, field.shape, field.dtype) for name, field in SPEC.fields.items()]
    assert found == [("flags", (5,), np.bool_), ("table", (2, 5, 3), np.float32), ("one", (), np.int64)]


def test_spec_reads_aliases_of_arrays() -> None:
    field = Spec.from_dataclass(Aliased, T=3).fields["values"]
    assert (field.shape, field.dtype) == ((3,), np.int64)


def test_spec_fields_are_aligned_and_disjoint() -> None:
    record = SPEC.allocate()
    arrays = [getattr(record, f.name) for f in fields(record)]
    for number, array in enumerate(arrays, start=1):
        array[...] = number
    assert [set(array.flatten().tolist()) for array in arrays] == [{True}, {2.0}, {3}]
    base = arrays[0].ctypes.data
    assert [(array.ctypes.data - base) % 64 for array in arrays] == [0, 0, 0]


def test_ring_slots_are_disjoint() -> None:
    ring = SlotRing(SPEC, 3)
    for slot in ring.slots:
        slot.data.table[:] = slot.index
        slot.data.one[...] = slot.index
    found = [(set(s.data.table.flatten().tolist()), int(s.data.one)) for s in ring.slots]
    assert found == [({0.0}, 0), ({1.0}, 1), ({2.0}, 2)]


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
        SlotRing(SPEC, 0)


@pytest.mark.parametrize("value", [np.ones(3), 1.5, [0.5, 1.0, 2.0], torch.ones(3)])
def test_field_array_rejects_lossy_assignment(value: Any) -> None:
    numbers = np.zeros(6, np.int64).view(FieldArray)
    with pytest.raises(TypeError, match="cannot be stored as int64"):
        numbers[2:5] = value
    with pytest.raises(TypeError, match="cannot be stored as int64"):
        numbers[:4][1:] = value  # views are checked too
    numbers[2:5] = np.arange(3, dtype=np.int32)
    numbers[0], numbers[5] = 7, True
    assert numbers.tolist() == [7, 0, 0, 1, 2, 1]


def test_slot_transitions_are_checked() -> None:
    slot = SlotRing(examples.SPEC, 1, poison=True).slots[0]
    assert np.isnan(slot.data.values).all() and int(slot.data.label) == -1
    with pytest.raises(ProducerError, match="slot 0 is FREE"):
        slot.transition(SlotState.READY, SlotState.READING)


def test_slot_tensors_share_memory() -> None:
    slot = SlotRing(examples.SPEC, 1).slots[0]
    slot.data.values[:] = 3.0
    assert slot.tensors()["values"].tolist() == [3.0] * 5

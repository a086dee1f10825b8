"""Spec: the contents of a record, as ordered fields with shape and dtype.

It is made from a frozen dataclass of numpy arrays; sizes may be names:

    @dataclass(frozen=True)
    class Batch:
        tokens: Annotated[NDArray[np.int64], "B", "T"]
        single_segment: NDArray[np.bool_]                 # no sizes: one value, an array of shape ()

    Spec.from_dataclass(Batch, B=8, T=256)

So one definition serves the type checker, the memory layout, the check of writes, and the documentation. The dataclass
must be frozen, since `batch.tokens = x` would rebind the name and leave the shared memory unchanged. Write *into* the
arrays: `batch.tokens[:] = x`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from whorl.errors import ConfigError

Record = TypeVar("Record")

ALIGNMENT = 64  # bytes: a cache line, good for vector instructions


@dataclass(frozen=True)
class FieldSpec:
    """Shape and dtype of one array of a record."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class WriteError(TypeError):
    """A producer wrote an invalid value into the field memory `array`."""

    def __init__(self, array: FieldArray, what: str) -> None:
        super().__init__(what)
        self.array = array


_assign = np.ndarray.__setitem__


class FieldArray(np.ndarray[Any, np.dtype[Any]]):
    """A field's memory. numpy would truncate floats on assignment to integers; here that raises."""

    def __setitem__(self, where: Any, value: Any) -> None:
        given = getattr(value, "dtype", None)
        if given is not self.dtype and type(value) not in (int, bool):
            if not isinstance(given, np.dtype):
                given = np.asarray(value).dtype  # a float, a list, a tensor
            if not np.can_cast(given, self.dtype, "same_kind"):
                raise WriteError(self, f"{given} values cannot be stored as {self.dtype}")
        try:
            _assign(self, where, value)
        except ValueError as error:
            raise WriteError(self, str(error)) from error


@dataclass(frozen=True)
class Spec(Generic[Record]):
    """Ordered fields, and the dataclass that gives access to a record."""

    record: type[Record]
    fields: Mapping[str, FieldSpec]

    @classmethod
    def from_dataclass(cls, record: type[Record], **sizes: int) -> Spec[Record]:
        """Return the Spec of a frozen dataclass; named sizes come from `sizes`.

        Raises:
            ConfigError: not a frozen dataclass, a field that is not an array, a size without a value, or a value
                without a size.
        """
        parameters = getattr(record, "__dataclass_params__", None)
        if parameters is None or not parameters.frozen:
            raise ConfigError(
                f"{record.__name__} cannot describe a slot", expected="a frozen dataclass of arrays"
            )
        hints = get_type_hints(record, include_extras=True)
        used: set[str] = set()
        fields = {}
        for field in dataclasses.fields(record):  # type: ignore[arg-type]  # checked above to be a dataclass
            hint: Any = hints[field.name]
            names: list[str | int] = []
            if get_origin(hint) is Annotated:
                hint, *names = get_args(hint)
            if hasattr(get_origin(hint), "__value__"):  # NDArray, from numpy 2.5 on
                hint = get_origin(hint).__value__[get_args(hint)]
            if get_origin(hint) is not np.ndarray:
                raise ConfigError(
                    f"{record.__name__}.{field.name} is {hint}",
                    expected="an array: NDArray[np.float32], or Annotated[NDArray[np.float32], 'B', 3] with sizes",
                )
            missing = [n for n in names if isinstance(n, str) and n not in sizes]
            if missing:
                raise ConfigError(
                    f"{record.__name__}.{field.name} has a size {missing[0]!r} without a value",
                    do=f"pass it: Spec.from_dataclass({record.__name__}, {missing[0]}=...)",
                )
            used.update(n for n in names if isinstance(n, str))
            shape = tuple(sizes[n] if isinstance(n, str) else int(n) for n in names)
            if any(size < 1 for size in shape):
                raise ConfigError(
                    f"{record.__name__}.{field.name} has shape {shape}", expected="positive sizes"
                )
            fields[field.name] = FieldSpec(shape, np.dtype(get_args(get_args(hint)[1])[0]))
        if not fields:
            raise ConfigError(f"{record.__name__} has no fields", expected="at least one array")
        if unknown := set(sizes) - used:
            raise ConfigError(
                f"{record.__name__} has no size {min(unknown)!r}", expected=f"among {sorted(used)}"
            )
        return cls(record, fields)

    @property
    def n_bytes(self) -> int:
        """Bytes of one record, each field aligned to a cache line."""
        return sum(_aligned(field.n_bytes) for field in self.fields.values())

    def view(self, memory: memoryview | bytearray) -> Record:
        """Return a record whose arrays are views of `memory` (`n_bytes` long)."""
        arrays, at = {}, 0
        for name, field in self.fields.items():
            flat = np.frombuffer(memory, field.dtype, math.prod(field.shape), at)
            arrays[name] = flat.reshape(field.shape).view(FieldArray)
            at += _aligned(field.n_bytes)
        return self.record(**arrays)

    def allocate(self) -> Record:
        """Return a record in new, zeroed memory, for tests and use without slots."""
        return self.view(bytearray(self.n_bytes))


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT

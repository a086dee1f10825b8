"""Parts of an optimizer's step in C++ (`update.cpp`), each in one pass over memory; fp32 on a CPU.

`train/optim` has the same in torch and describes the mathematics. `choose_update` times both; under torch's deterministic
algorithms torch's operations run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from whorl.machine.kernel_choice import fastest
from whorl.nn.cpu.library import native_library, short_name


def sum_parts(parts: Sequence[Tensor], sums: Sequence[Tensor]) -> list[float]:
    """Sum each of `parts` [n, ...] over its first dimension into `sums`; return the squared norm of each sum.

    All parts have the same n, and all tensors are contiguous.
    """
    table = [n for part, into in zip(parts, sums, strict=True) for n in _addresses(part, into, into.numel())]
    squares = (ctypes.c_double * len(sums))()
    if sums:
        _library().whorl_sum_parts(
            _array(table), ctypes.c_int64(len(sums)), ctypes.c_int64(len(parts[0])), squares
        )
    return list(squares)


def momentum_(momentum: Tensor, gradient: Tensor, mu: float, direction: Tensor | None) -> None:
    """Average a gradient [rows, columns] into the momentum, and write Nesterov's direction.

    direction: [rows, columns] in bf16 or fp32, or [columns, rows] for the transpose; None leaves it out.
    """
    rows, columns = gradient.shape
    _library().whorl_momentum(
        *map(_pointer, (gradient, momentum)),
        ctypes.c_int64(rows),
        ctypes.c_int64(columns),
        ctypes.c_float(mu),
        None if direction is None else _pointer(direction),
        ctypes.c_int32(direction is not None and direction.dtype == torch.float32),
        ctypes.c_int32(direction is not None and direction.shape != gradient.shape),
    )


def add_update_(weight: Tensor, update: Tensor, keep: float, factor: float) -> None:
    """Set weight to weight * keep + update * factor.

    update: bf16 or fp32, in the shape of the weight or of its transpose.
    """
    _library().whorl_add_update(
        *map(_pointer, (weight, update)),
        *(ctypes.c_int64(n) for n in weight.shape),
        ctypes.c_float(keep),
        ctypes.c_float(factor),
        ctypes.c_int32(update.dtype == torch.float32),
        ctypes.c_int32(update.shape != weight.shape),
    )


def row_adagrad_(
    table: Tensor,
    squares: Tensor,
    ids: Sequence[Tensor],
    gradients: Sequence[Tensor],
    part: int,
    divisor: float,
    rate: float,
    eps: float,
) -> None:
    """Update the rows r of a table [rows, d] with r mod the number of lists = part.

    squares: [rows] accumulators. ids, gradients: lists of [n] rows with repeats, and [n, d]; the sum of a row's gradients is
    divided by `divisor`.
    """
    _library().whorl_row_adagrad(
        *map(_pointer, (table, squares)),
        ctypes.c_int64(table.shape[1]),
        _array([t.data_ptr() for t in ids]),
        _array([t.data_ptr() for t in gradients]),
        _array([len(t) for t in ids]),
        ctypes.c_int64(len(ids)),
        ctypes.c_int64(part),
        *(ctypes.c_float(x) for x in (divisor, rate, eps)),
    )


def choose_update(rows: int, columns: int, dtype: torch.dtype) -> bool:
    """Time the passes of Muon's step over one matrix on a CPU; return whether C++ is the fastest.

    dtype: of the products of the orthogonalization, bf16 or fp32.
    """
    gradient, momentum, weight = torch.full((3, rows, columns), 0.5)
    direction = torch.zeros(columns, rows, dtype=dtype)

    def plain() -> None:
        momentum.lerp_(gradient, 0.05)
        direction.copy_(gradient.lerp(momentum, 0.95).mT)
        weight.mul_(1.0).add_(direction.mT, alpha=-0.0)

    def native() -> None:
        momentum_(momentum, gradient, 0.95, direction)
        add_update_(weight, direction, 1.0, 0.0)

    candidates: dict[str, Callable[[], object]] = {"torch": plain}
    if native_library("update") is not None:
        candidates["native"] = native
    return fastest(f"update {rows}x{columns} {short_name(dtype)}", candidates) == "native"


def _library() -> ctypes.CDLL:
    found = native_library("update")
    assert found is not None  # or it would not have been chosen
    return found


def _pointer(t: Tensor) -> ctypes.c_void_p:
    assert t.is_contiguous()
    return ctypes.c_void_p(t.data_ptr())


def _addresses(part: Tensor, into: Tensor, count: int) -> tuple[int, int, int]:
    assert part.is_contiguous() and into.is_contiguous()
    return part.data_ptr(), into.data_ptr(), count


def _array(numbers: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(numbers))(*numbers)

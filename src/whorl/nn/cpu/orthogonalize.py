"""Muon's orthogonalization of matrices of bf16 or fp32 in C++ (`orthogonalize.cpp`); in torch: `train/optim/optimizers.py`.

Of the symmetric products only one half is computed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from whorl.machine.kernel_choice import fastest
from whorl.nn.cpu.library import product_library, short_name

Coefficients = Sequence[tuple[float, float, float]]


def supports(rows: int, columns: int, dtype: torch.dtype) -> bool:
    """Return whether the kernel runs here for matrices [rows, columns]."""
    if rows % 32 or columns % 32 or dtype not in (torch.bfloat16, torch.float32):
        return False
    return product_library("orthogonalize", dtype) is not None


def orthogonalize_(matrices: Tensor, coefficients: Coefficients) -> Tensor:
    """Overwrite matrices [n, rows, columns], rows <= columns, with the result of the iteration, and return them.

    matrices: bf16 or fp32.
    coefficients: (a, b, c) of each round: X <- a X + (b G + c G^2) X, G = X X^T.

    Raises:
        MemoryError: there is no memory for the products of one matrix.
    """
    library = product_library("orthogonalize", matrices.dtype)
    assert library is not None and matrices.is_contiguous()
    numbers = [x for each in coefficients for x in each]
    failed = library.whorl_orthogonalize(
        ctypes.c_void_p(matrices.data_ptr()),
        *(ctypes.c_int64(n) for n in matrices.shape),
        (ctypes.c_float * len(numbers))(*numbers),
        ctypes.c_int64(len(coefficients)),
        ctypes.c_int32(torch.get_num_threads()),
    )
    if failed:
        raise MemoryError(f"orthogonalization of {list(matrices.shape)}: no memory")
    return matrices


def choose_orthogonalize(
    shape: tuple[int, int, int],
    coefficients: Coefficients,
    dtype: torch.dtype,
    reference: Callable[[Tensor], Tensor],
) -> bool:
    """Time the ways for matrices [n, rows, columns] of bf16 or fp32 on a CPU; return whether C++ is the fastest."""
    n, rows, columns = shape
    matrices = torch.arange(n * rows * columns).remainder(97).sub(48).div(48).to(dtype).view(shape)
    candidates: dict[str, Callable[[], object]] = {"torch": lambda: reference(matrices)}
    if supports(rows, columns, dtype):
        candidates["native"] = lambda: orthogonalize_(matrices, coefficients)
    flops = 2.0 * len(coefficients) * n * rows * rows * (2 * columns + rows)
    name = f"orthogonalize {n}x{rows}x{columns} {short_name(dtype)}"
    return fastest(name, candidates, flops=flops) == "native"

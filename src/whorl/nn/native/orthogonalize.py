"""Muon's orthogonalization of bf16 matrices in C++ (`orthogonalize.cpp`); in torch: `train/optim/optimizers.py`.

Of the symmetric products only one half is computed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from whorl.machine.kernel_choice import fastest
from whorl.nn.native.library import product_library

Coefficients = Sequence[tuple[float, float, float]]


def supports(rows: int, columns: int) -> bool:
    """Return whether the kernel runs here for matrices [rows, columns]."""
    if rows % 32 or columns % 32:
        return False
    return product_library("orthogonalize") is not None


def orthogonalize_(matrices: Tensor, coefficients: Coefficients) -> Tensor:
    """Overwrite bf16 matrices [n, rows, columns], rows <= columns, with the result of the iteration, and return them.

    coefficients: (a, b, c) of each round: X <- a X + (b G + c G^2) X, G = X X^T.

    Raises:
        MemoryError: there is no memory for the products of one matrix.
    """
    library = product_library("orthogonalize")
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
    shape: tuple[int, int, int], coefficients: Coefficients, reference: Callable[[Tensor], Tensor]
) -> bool:
    """Time the ways for bf16 matrices [n, rows, columns] on a CPU; return whether C++ is the fastest."""
    n, rows, columns = shape
    matrices = torch.arange(n * rows * columns).remainder(97).sub(48).div(48).bfloat16().view(shape)
    candidates: dict[str, Callable[[], object]] = {"torch": lambda: reference(matrices)}
    if supports(rows, columns):
        candidates["native"] = lambda: orthogonalize_(matrices, coefficients)
    flops = 2.0 * len(coefficients) * n * rows * rows * (2 * columns + rows)
    return fastest(f"orthogonalize {n}x{rows}x{columns} bf16", candidates, flops=flops) == "native"

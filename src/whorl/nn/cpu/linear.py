"""The weight gradient of a linear layer in C++ (`weight_gradient.cpp`), in fp32, from rows of bf16 or fp32.

`choose_weight_gradient` times it for one shape and one thread, before a step is compiled. The other products are torch's.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from whorl.machine.kernel_choice import fastest
from whorl.nn.cpu.library import choice_table, is_supported, product_library, short_name

Shape = tuple[int, int, int]  # rows, inner, outer

_chosen: dict[tuple[torch.dtype, Shape], bool] = choice_table()  # whether the kernel was the fastest


def library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return the compiled kernel, or None, as `product_library`."""
    return product_library("weight_gradient", dtype)


def supports(shape: Shape, dtype: torch.dtype) -> bool:
    """Return whether the kernel runs here for this shape and type of rows; it has one thread."""
    return not any(n % 32 for n in shape) and torch.get_num_threads() == 1 and library(dtype) is not None


def select(shape: Shape, dtype: torch.dtype, use: bool) -> None:
    """Set whether weight gradients of this shape, from rows of this type, are computed here."""
    _chosen[dtype, shape] = use


def is_chosen(x: Tensor, weight: Tensor) -> bool:
    """Return whether a layer should run here. x: [..., inner]; weight: [outer, inner] fp32."""
    rows = x.numel() // x.shape[-1]
    return weight.dtype == torch.float32 and _is_chosen(x, (rows, x.shape[-1], len(weight)))


def _is_chosen(x: Tensor, shape: Shape) -> bool:
    return is_supported(x) and _chosen.get((x.dtype, shape), False)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x weight^T, [..., outer] in the type of x, with the kernel in its backward.

    x: [..., inner]; weight: [outer, inner].
    """
    y: Tensor = _Linear.apply(x, weight)  # type: ignore[no-untyped-call]
    return y


def weight_gradient(d_y: Tensor, x: Tensor) -> Tensor:
    """Return d_y^T x, [outer, inner] fp32, by the kernel if it was chosen. d_y: [rows, outer]; x: [rows, inner]."""
    if _is_chosen(x, (len(x), x.shape[1], d_y.shape[1])):
        out: Tensor = weight_gradient_kernel(d_y, x)
        return out
    return (d_y.t() @ x).float()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        narrow = weight.to(x.dtype)
        ctx.save_for_backward(x, narrow)
        return F.linear(x, narrow)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (d_y,) = gradients
        x, narrow = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad
        return (
            d_y @ narrow if of_x else None,
            weight_gradient_kernel(d_y.flatten(0, -2), x.flatten(0, -2)) if of_weight else None,
        )


@torch.library.custom_op("whorl::weight_gradient", mutates_args=())
def weight_gradient_kernel(d_y: Tensor, x: Tensor) -> Tensor:
    """Return d_y^T x, [outer, inner] fp32; all sizes are multiples of 32.

    Raises:
        MemoryError: there is no memory for the packed rows.
    """
    found, d_y, x = library(x.dtype), d_y.contiguous(), x.contiguous()
    assert found is not None  # or it would not have been chosen
    out = torch.empty(d_y.shape[1], x.shape[1])
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in (d_y, x, out))
    if found.whorl_weight_gradient(*pointers, *(ctypes.c_int64(n) for n in (*x.shape, len(out)))):
        raise MemoryError(f"weight gradient {list(out.shape)}: no memory for the packed rows")
    return out


@weight_gradient_kernel.register_fake
def _(d_y: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(d_y.shape[1], x.shape[1], dtype=torch.float32)


def choose_weight_gradient(shape: Shape, dtype: torch.dtype) -> str:
    """Time the ways for rows [rows, inner] and [rows, outer] of bf16 or fp32 on a CPU. Returns "direct" or "native"."""
    rows, inner, outer = shape
    x = torch.arange(rows * inner).remainder(97).sub(48).div(48).to(dtype).view(rows, inner)
    d_y = torch.arange(rows * outer).remainder(89).sub(44).div(44).to(dtype).view(rows, outer)
    candidates = {"direct": lambda: (d_y.t() @ x).float()}
    if supports(shape, dtype):
        candidates["native"] = lambda: weight_gradient_kernel(d_y, x)
    name = f"linear {rows}x{inner}x{outer} {short_name(dtype)}"
    chosen = fastest(name, candidates, flops=2.0 * rows * inner * outer)
    select(shape, dtype, chosen == "native")
    return chosen

"""The MLP with squared ReLU in C++ for bf16 and fp32 (`mlp.cpp`), with gradients.

The activation runs between the two products while a block is in cache, and weight gradients are summed in fp32 without a
transposed copy. `choose_mlp` times it for one shape and one thread, before a step is compiled.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from whorl.machine.kernel_choice import fastest
from whorl.nn.cpu.library import choice_table, is_supported, product_library, short_name

MAX_WEIGHTS = 1 << 22  # numbers of a matrix; larger ones were not measured
Forward = Callable[[Tensor, Tensor, Tensor], Tensor]

_chosen: dict[tuple[torch.dtype, int, int, int], bool] = (
    choice_table()
)  # (type, rows, d, hidden) -> whether it was the fastest


def library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return the compiled kernel, or None, as `product_library`."""
    return product_library("mlp", dtype)


def is_chosen(x: Tensor, up: Tensor) -> bool:
    """Return whether an MLP should run here. x: [..., d]; up: [hidden, d] fp32."""
    hidden, d = up.shape
    rows = x.numel() // x.shape[-1]
    if up.dtype != torch.float32 or (torch.is_grad_enabled() and not up.requires_grad):
        return False  # the backward computes the gradients of all weights
    return is_supported(x) and _chosen.get((x.dtype, rows, d, hidden), False)


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return relu(x up^T)^2 down^T, [..., d] in the type of x. x: [..., d]; up: [hidden, d] and down: [d, hidden] in fp32.

    Raises:
        MemoryError: there is no memory for the packed weights.
    """
    out: Tensor = mlp_forward(x.reshape(-1, x.shape[-1]), up, down)[0]
    return out.view(x.shape)


@torch.library.custom_op("whorl::mlp", mutates_args=())
def mlp_forward(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Return y [rows, d] and relu(x up^T) [rows, hidden] in blocks, both in the type of x. x: [rows, d]."""
    y, kept = torch.empty(x.shape, dtype=x.dtype), x.new_empty(len(x), len(up))
    _call("whorl_mlp", (x, up, down, kept, y), kept)
    return y, kept


@torch.library.custom_op("whorl::mlp_backward", mutates_args=())
def mlp_backward(
    d_y: Tensor, x: Tensor, kept: Tensor, up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x (in its type), up and down (fp32)."""
    d_x, d_up, d_down = torch.empty(x.shape, dtype=x.dtype), torch.empty(up.shape), torch.empty(down.shape)
    _call("whorl_mlp_backward", (d_y, x, kept, up, down, d_x, d_up, d_down), kept)
    return d_x, d_up, d_down


@mlp_forward.register_fake
def _(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(len(x), len(up))


@mlp_backward.register_fake
def _(d_y: Tensor, x: Tensor, kept: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), up.new_empty(up.shape), down.new_empty(down.shape)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    x, up, down = inputs
    ctx.save_for_backward(x, output[1], up, down)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, d_y: Tensor, _d_kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor, Tensor] = mlp_backward(d_y, *ctx.saved_tensors)
    return gradients


mlp_forward.register_autograd(_backward, setup_context=_save)


def _call(name: str, matrices: tuple[Tensor, ...], kept: Tensor) -> None:
    adjacent = [t.contiguous() for t in matrices]  # outputs always are
    rows, hidden = kept.shape
    failed = getattr(library(kept.dtype), name)(
        *(ctypes.c_void_p(t.data_ptr()) for t in adjacent),
        *(ctypes.c_int64(n) for n in (rows, matrices[1].shape[1], hidden)),
    )
    if failed:
        raise MemoryError(f"MLP of {hidden} hidden units: no memory for the packed weights")


def choose_mlp(rows: int, d: int, hidden: int, dtype: torch.dtype, reference: Forward) -> str:
    """Time the ways for rows [rows, d] of bf16 or fp32 on a CPU, forward and backward. Returns "torch" or "native".

    reference: (x, up, down) -> y in torch. The kernel has one thread, and needs multiples of 32 and small weights.
    """
    weights = [
        torch.arange(d * hidden).remainder(n).sub(n // 2).div(2000).view(shape).requires_grad_()
        for n, shape in ((97, (hidden, d)), (89, (d, hidden)))
    ]
    x = torch.arange(rows * d).remainder(97).sub(48).div(48).to(dtype).view(rows, d).requires_grad_()

    def run(forward: Forward) -> Callable[[], object]:
        def both() -> tuple[Tensor, ...]:
            with torch.enable_grad():
                y = forward(x, *weights)
                return torch.autograd.grad(y, (x, *weights), x.detach())

        return both

    candidates = {"torch": run(reference)}
    fits = not (rows % 32 or d % 32 or hidden % 32) and d * hidden <= MAX_WEIGHTS
    if fits and torch.get_num_threads() == 1 and library(dtype) is not None:
        candidates["native"] = run(mlp)
    chosen = fastest(
        f"mlp {rows}x{d}x{hidden} {short_name(dtype)}", candidates, flops=12.0 * rows * d * hidden
    )
    _chosen[dtype, rows, d, hidden] = chosen == "native"
    return chosen

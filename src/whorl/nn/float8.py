"""Products in fp8: eight bits a number, and a scale for each tensor.

    forward    y  = x W^T     x and W in E4M3 (4 bits of exponent, 3 of mantissa; the largest number is 448)
    backward   dx = g W       g in E5M2 (5 and 2; 57,344): gradients need reach more than they need digits
               dW = g^T x

(Micikevicius et al. 2022, arXiv:2209.05433, tables 1 and 2, section 3: E4M3 for weights and activations, E5M2 for gradients,
sums and everything between products wider.) A tensor is first divided by its scale, max |t| / largest number, so that it
fills the range; the product is multiplied by both scales. The scale is that of the tensor at hand ("current" scaling):
a pass over it more than reusing the last steps' maxima costs, and no state that could be stale when a batch is odd or that a
checkpoint would have to keep.

What stays wide: the embedding, the head and routers, whose errors go straight into probabilities; norms, softmax,
residual stream (bf16); experts' matrices, which have a path of their own (`nn/experts`); mixers that use a weight otherwise
than through `Linear.forward`. Operands are kept for the backward in eight bits: half of what bf16 keeps.

The subtle part is that there are two paths. On a GPU that has it, `torch._scaled_mm` multiplies the eight bits; it wants
the second operand column by column and every extent a multiple of 16. Elsewhere the numbers are rounded to eight bits and
multiplied in fp32: the same rounding of the operands, sums in fp32, so what fp8 costs in bits per byte can be seen without
such a GPU (it is slower than not doing it). A test holds the emulation to a reference that rounds number by number. The
GPU's path is written against the documentation and has NOT been run on a GPU.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from whorl.nn.linear import Linear

FORWARD_DTYPE, BACKWARD_DTYPE = torch.float8_e4m3fn, torch.float8_e5m2
ALIGNMENT = 16  # of every extent of a product, on a GPU
MIN_SCALE = 1e-30  # of a scale: a tensor of zeros has none


def use_float8(model: nn.Module, prefix: str = "blocks.") -> list[str]:
    """Lets the matrices of `model` under `prefix` multiply in fp8; returns the names of those layers.

    Weights stay as they are: rounding happens at each product. Layers with an extent that is no multiple of 16 are left out
    (gates, small routers), here as on a GPU, so that both compute the same.
    """
    names = []
    for name, module in model.named_modules():
        if isinstance(module, Linear) and name.startswith(prefix):
            if any(extent % ALIGNMENT for extent in module.weight.shape):
                continue
            module.matmul = float8_linear
            names.append(name)
    return names


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x: [..., d_in]; weight: [d_out, d_in]; bias: [d_out] or None -> [..., d_out] in the type of x.

    Rows that do not fit (their number is no multiple of 16: a sampler's) are multiplied in the type of x.
    """
    flat = x.reshape(-1, x.shape[-1])
    if flat.shape[0] % ALIGNMENT or not flat.shape[0]:
        y = nn.functional.linear(flat, weight.to(x.dtype))
    else:
        y = _Float8Matmul.apply(flat, weight)  # type: ignore[no-untyped-call]
    y = y.view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


def quantize(t: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(t / scale rounded to `dtype`, scale []), with the largest number of t at the end of the range.

    What is NaN or infinite stays so, for the guard to see: an infinite maximum makes the quotients NaN.
    """
    scale = (t.abs().amax().float() / torch.finfo(dtype).max).clamp(min=MIN_SCALE)
    return (t.float() / scale).to(dtype), scale


class _Float8Matmul(torch.autograd.Function):
    """x W^T and its gradients, as at the top of this file. x: [n, d_in]; weight: [d_out, d_in]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, x_scale = quantize(x, FORWARD_DTYPE)
        w8, w_scale = quantize(weight, FORWARD_DTYPE)
        ctx.save_for_backward(x8, x_scale, w8, w_scale)
        ctx.x_dtype, ctx.w_dtype = x.dtype, weight.dtype
        return _scaled_matmul(x8, x_scale, w8, w_scale, x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        g8, g_scale = quantize(gradients[0], BACKWARD_DTYPE)
        d_x = d_w = None
        if ctx.needs_input_grad[0]:
            d_x = _scaled_matmul(g8, g_scale, w8.t(), w_scale, ctx.x_dtype)
        if ctx.needs_input_grad[1]:
            d_w = _scaled_matmul(g8.t(), g_scale, x8.t(), x_scale, ctx.w_dtype)
        return d_x, d_w


def _scaled_matmul(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """a b^T times both scales, in `dtype`.  a: [n, k], b: [m, k], both in eight bits -> [n, m].

    fast: a GPU may add up in fewer bits, which forward products bear.
    """
    if is_native(a):
        # The second operand is read column by column: the transpose of a matrix that lies row by row.
        found: Tensor = torch._scaled_mm(
            a.contiguous(), b.contiguous().t(), scale_a=a_scale, scale_b=b_scale, out_dtype=dtype, use_fast_accum=fast
        )  # fmt: skip
        return found
    return ((a.float() @ b.float().t()) * (a_scale * b_scale)).to(dtype)


def is_native(t: Tensor) -> bool:
    """Whether products of `t` are multiplied in eight bits, not emulated."""
    return t.is_cuda and _has_float8()


@cache
def _has_float8() -> bool:
    """Whether this GPU multiplies fp8 (capability 8.9: Ada, Hopper and later) and this torch lets it."""
    return (
        torch.cuda.is_available()
        and torch.cuda.get_device_capability() >= (8, 9)
        and hasattr(torch, "_scaled_mm")
    )

"""Matrix products in fp8, with one scale per tensor.

    forward    y  = x W^T     x and W in E4M3 (4 exponent bits, 3 mantissa bits; the largest number is 448)
    backward   dx = g W       g in E5M2 (5 and 2; 57,344): gradients need range more than precision
               dW = g^T x

Source: Micikevicius et al. 2022, arXiv:2209.05433, tables 1 and 2, section 3. A tensor is divided by its scale,
max |t| / largest number, and the product is multiplied by both scales. The scale is computed from the current tensor
("current" scaling). This costs one pass more than delayed scaling, but has no state to go stale or to save.

Not in fp8: embedding, head, routers, norms, softmax, the residual stream, experts' matrices (`nn/experts`), and mixers
that use a weight without `Linear.forward`. Operands are kept for the backward in eight bits: half the bytes of bf16.

The subtle part is that there are two paths. On a GPU with fp8, `torch._scaled_mm` multiplies; it requires the second
operand in column-major order and all sizes to be multiples of 16. Elsewhere operands are rounded to fp8 and multiplied
in fp32, which gives the same rounding but is slow. A test compares this emulation with a reference. The GPU path
follows the documentation and has NOT been run on a GPU.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from whorl.nn.linear import Linear

FORWARD_DTYPE, BACKWARD_DTYPE = torch.float8_e4m3fn, torch.float8_e5m2
ALIGNMENT = 16  # of every size of a product, on a GPU
MIN_SCALE = 1e-30  # the smallest scale, for a tensor of zeros


def use_float8(model: nn.Module, prefix: str = "blocks.") -> list[str]:
    """Make the linear layers of `model` under `prefix` multiply in fp8; return their names.

    Weights stay unchanged and are rounded at each product. Layers with a size that is not a multiple of 16 (gates, small
    routers) are skipped on every device, so that all devices compute the same.
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
    """Return x W^T + bias by fp8 products, [..., d_out], in the type of x.

    x: [..., d_in]; weight: [d_out, d_in]; bias: [d_out] or None. If the number of rows is not a multiple of 16 (as in
    sampling), the product runs in the type of x.
    """
    flat = x.reshape(-1, x.shape[-1])
    if flat.shape[0] % ALIGNMENT or not flat.shape[0]:
        y = nn.functional.linear(flat, weight.to(x.dtype))
    else:
        y = _Float8Matmul.apply(flat, weight)  # type: ignore[no-untyped-call]
    y = y.view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


def quantize(t: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return t / scale rounded to `dtype`, and the scale [], which maps the largest number of t to the end of the range.

    NaN and infinity stay visible for the spike guard: an infinite maximum makes the quotients NaN.
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
    """Return a b^T times both scales, [n, m] in `dtype`. a: [n, k], b: [m, k], both fp8.

    fast: a GPU may accumulate in fewer bits, which forward products tolerate.
    """
    if is_native(a):
        # The second operand must be column-major: the transpose of a row-major matrix.
        product: Tensor = torch._scaled_mm(
            a.contiguous(), b.contiguous().t(), scale_a=a_scale, scale_b=b_scale, out_dtype=dtype, use_fast_accum=fast
        )  # fmt: skip
        return product
    return ((a.float() @ b.float().t()) * (a_scale * b_scale)).to(dtype)


def is_native(t: Tensor) -> bool:
    """Return whether products of `t` run in fp8, not emulated."""
    return t.is_cuda and _has_float8()


@cache
def _has_float8() -> bool:
    """Return whether this GPU multiplies fp8 (capability 8.9 or higher: Ada, Hopper) and this torch supports it."""
    return (
        torch.cuda.is_available()
        and torch.cuda.get_device_capability() >= (8, 9)
        and hasattr(torch, "_scaled_mm")
    )

"""Softmax over rows of any width: one program per row, and two readings of the row instead of five.

    y_j = exp(x_j - m) / d,     m = max_k x_k,     d = sum_k exp(x_k - m)

The plain form reads x for m, x for d, x again for y. The online form (Milakov & Gimelshein 2018, arXiv:1805.02867,
algorithm 3) computes m and d in one reading. After x_1..x_n with the maximum m_n, a block b is added by

    m' = max(m_n, max b),     d' = d_n exp(m_n - m') + sum_b exp(b - m')

because the factor exp(m_n - m') <= 1 changes the reference of the sum from m_n to m'. Attention (`attention.py`) uses
the same recurrence and carries the output vector along with d.

The backward pass needs y only: with c = sum_k dy_k y_k, dx_j = y_j (dy_j - c).

The subtle part is -inf. While all values so far are -inf, m is -inf and m_n - m' is NaN, so the subtracted offset is 0
as long as m is -inf. A row of only -inf gives NaN, as in torch.

Shapes: x [..., d] -> y [..., d], of x's type; sums in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from whorl.nn.kernels.autotune import next_power_of_2
from whorl.nn.kernels.triton_support import jit, on_device, require_triton, tl

MAX_BLOCK = 4096  # columns per block


def softmax_reference(x: Tensor) -> Tensor:
    """Return the softmax by the definition. x: [..., d]."""
    return x.float().softmax(dim=-1).to(x.dtype)


@jit
def _forward(x, y, d, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * d
    largest = float("-inf")
    total = 0.0
    for start in range(0, d, BLOCK):
        at = start + tl.arange(0, BLOCK)
        b = tl.load(x + row + at, mask=at < d, other=float("-inf")).to(tl.float32)
        new = tl.maximum(largest, tl.max(b, axis=0))
        offset = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(largest - offset) + tl.sum(tl.exp(b - offset), axis=0)
        largest = new
    for start in range(0, d, BLOCK):
        at = start + tl.arange(0, BLOCK)
        b = tl.load(x + row + at, mask=at < d, other=float("-inf")).to(tl.float32)
        tl.store(y + row + at, tl.exp(b - largest) / total, mask=at < d)


@jit
def _backward(y, dy, dx, d, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * d
    c = 0.0
    for start in range(0, d, BLOCK):
        at = start + tl.arange(0, BLOCK)
        p = tl.load(y + row + at, mask=at < d, other=0.0).to(tl.float32)
        c += tl.sum(p * tl.load(dy + row + at, mask=at < d, other=0.0).to(tl.float32), axis=0)
    for start in range(0, d, BLOCK):
        at = start + tl.arange(0, BLOCK)
        p = tl.load(y + row + at, mask=at < d, other=0.0).to(tl.float32)
        g = tl.load(dy + row + at, mask=at < d, other=0.0).to(tl.float32)
        tl.store(dx + row + at, p * (g - c), mask=at < d)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: int) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        if x.numel():
            with on_device(x):
                _forward[(x.numel() // x.shape[-1],)](x, y, x.shape[-1], BLOCK=block)
        ctx.save_for_backward(y)
        ctx.block = block
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        dy = gradients[0].contiguous()
        dx = torch.empty_like(y)
        if y.numel():
            with on_device(y):
                _backward[(y.numel() // y.shape[-1],)](y, dy, dx, y.shape[-1], BLOCK=ctx.block)
        return dx, None


def softmax(x: Tensor, max_block: int = MAX_BLOCK) -> Tensor:
    """Return the softmax of x [..., d], same type, with a gradient.

    Args:
        max_block: columns per block, a power of 2; wider rows take several.

    Raises:
        ConfigError: no Triton, or x is not on a GPU.
    """
    require_triton(x)
    y: Tensor = _Softmax.apply(x, min(max_block, next_power_of_2(x.shape[-1])))
    return y

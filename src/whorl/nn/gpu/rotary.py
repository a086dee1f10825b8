"""Rotary positions in one reading and one writing (Su et al. 2021, arXiv:2104.09864, eq. 34).

    y_i = x_i cos_i + x_p(i) sin_i

p(i) is the other feature of i's pair: i +- dim / 2 in the layout "half", i xor 1 in "interleaved". The tables carry the
signs (`nn/rotary.py`, the reference). As tensor operations this is a flip, two products and a sum, each with
a separate tensor.

The backward pass is the transposed map, dx_i = dy_i cos_i + dy_p(i) sin_p(i): the same kernel with the sine of the
partner. (For a plain rotation that is -sin_i; this form also holds where tables are scaled.)

The subtle part: the partner of a feature is loaded again from memory, not exchanged between threads. It is in the same
cache line, so memory traffic does not grow. Features beyond the table's width use cos = 1 and sin = 0, the defaults of
a masked load.

Shapes: x [B, T, H, head_dim]; cos, sin [T, 1, dim] or [B, T, 1, dim] -> [B, T, H, head_dim], of x's type.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from whorl.nn.gpu.autotune import next_power_of_2
from whorl.nn.gpu.triton_support import jit, on_device, require_triton, tl

TILE = 2048  # elements per tile


def supports(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether the tables match the rows of x as above and are contiguous."""
    fits = x.dim() == 4 and cos.shape == sin.shape and cos.shape[-1] <= x.shape[-1] and x.numel() > 0
    places = x.shape[1:2] if cos.dim() == 3 else x.shape[:2]
    return fits and cos.dim() in (3, 4) and cos.shape[:-1] == (*places, 1)


@jit
def _turn(
    x, cos, sin, y, n, places, heads, sb, st, sh, length,
    width, dim, HALF: tl.constexpr, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # of [B, T, H]
    at = tl.arange(0, WIDTH)
    partner = (at + dim // 2) % dim if HALF else at ^ 1
    partner = tl.where(at < dim, partner, at)
    inside = (row < n)[:, None] & (at < width)[None, :]
    position = row // heads
    source = x + ((position // length) * sb + (position % length) * st + (row % heads) * sh)[:, None]
    entry = ((position % places) * dim)[
        :, None
    ]  # places: T of one table for all rows, B * T of one table per row
    turning = inside & (at < dim)[None, :]
    c = tl.load(cos + entry + at[None, :], mask=turning, other=1.0).to(tl.float32)
    s = tl.load(sin + entry + (partner if TRANSPOSED else at)[None, :], mask=turning, other=0.0).to(
        tl.float32
    )
    own = tl.load(source + at[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(source + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row[:, None] * width + at[None, :], own * c + other * s, mask=inside)


def _launch(x: Tensor, cos: Tensor, sin: Tensor, half: bool, transposed: bool) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, length, heads, width = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tile = next_power_of_2(width)
    rows = max(1, TILE // tile)
    n, places = batch * length * heads, cos.numel() // cos.shape[-1]
    with on_device(x):
        _turn[(-(-n // rows),)](
            x, cos, sin, y, n, places, heads, x.stride(0), x.stride(1), x.stride(2), length, width, cos.shape[-1],
            HALF=half, TRANSPOSED=transposed, ROWS=rows, WIDTH=tile,
        )  # fmt: skip
    return y


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, half: bool) -> Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.half = half
        return _launch(x, cos, sin, half, transposed=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _launch(gradients[0], cos, sin, ctx.half, transposed=True), None, None, None


def rotary(x: Tensor, cos: Tensor, sin: Tensor, layout: str = "half") -> Tensor:
    """Return `apply_rotary` of `nn/rotary.py`, with a gradient for x; the tables are constants.

    Raises:
        ConfigError: no Triton, or x is not on a GPU.
    """
    require_triton(x)
    y: Tensor = _Rotary.apply(x, cos, sin, layout == "half")
    return y

"""RMSNorm, forward and backward, each in one reading (Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4).

    r = (mean_k x_k^2 + eps)^(-1/2),     y_j = x_j r g_j

Backward, with n_j = x_j r (the normalized row) and u_j = dy_j g_j:

    dx_j = r (u_j - n_j mean_k(u_k n_k)),     dg_j = sum over rows of dy_j n_j

The forward keeps r, one number per row; n is recomputed, which costs less than storing it.

The gain is one number per feature ([d]) or, for the norms of queries and keys, one per head ([heads, 1]): row i of
x [..., heads, d] uses head i mod heads.

The subtle part is dg, a sum over all rows, which different programs hold. Atomic additions would have a different order
in each run. Here a fixed number of programs stride over the rows. Each keeps a sum [d] in registers and writes it once,
and torch adds the sums: the same bits in every run.

Tiles are [ROWS, d rounded up to a power of 2], so that the 64 features of a head do not leave a program idle. All
arithmetic is fp32. The reference is `rms_norm_reference` in `nn/norm.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from whorl.nn.gpu.autotune import next_power_of_2
from whorl.nn.gpu.triton_support import jit, on_device, require_triton, tl

MAX_WIDTH = 16_384  # features: a row has to fit into the registers of a program
TILE = 4096  # elements per tile
NONE, FEATURE, HEAD = 0, 1, 2  # shapes of the gain
PROGRAMS = 528  # of the backward pass: four for each of the 132 processors of an H100; more would add rows of dg to sum


def supports(x: Tensor, gain: Tensor | None) -> bool:
    """Return whether the kernel supports this gain and this width."""
    return 0 < x.shape[-1] <= MAX_WIDTH and x.numel() > 0 and _gain_kind(x, gain) is not None


def _gain_kind(x: Tensor, gain: Tensor | None) -> int | None:
    if gain is None:
        return NONE
    if gain.shape == x.shape[-1:]:
        return FEATURE
    return HEAD if x.dim() > 1 and gain.shape == (x.shape[-2], 1) else None


@jit
def _forward(
    x, gain, y, rs, n, d, heads, eps,
    KIND: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, WIDTH)
    inside = (row < n)[:, None] & (at < d)[None, :]
    place = row.to(tl.int64)[:, None] * d + at[None, :]
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)  # [ROWS, WIDTH]
    r = 1.0 / tl.sqrt(tl.sum(values * values, axis=1) / d + eps)
    values = values * r[:, None]
    if KIND == 1:
        values = values * tl.load(gain + at, mask=at < d, other=0.0).to(tl.float32)[None, :]
    if KIND == 2:
        values = values * tl.load(gain + row % heads).to(tl.float32)[:, None]
    tl.store(y + place, values, mask=inside)
    tl.store(rs + row, r, mask=row < n)


@jit
def _backward(
    x, gain, rs, dy, dx, dg, n, d, heads,
    KIND: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, WIDTH)
    if KIND == 1:
        g = tl.load(gain + at, mask=at < d, other=0.0).to(tl.float32)[None, :]
        sums = tl.zeros([WIDTH], tl.float32)
    for start in range(tl.program_id(0) * ROWS, n, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < n)[:, None] & (at < d)[None, :]
        place = row.to(tl.int64)[:, None] * d + at[None, :]
        r = tl.load(rs + row, mask=row < n, other=0.0)
        normed = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * r[:, None]
        upstream = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        if KIND == 1:
            sums += tl.sum(upstream * normed, axis=0)
            upstream = upstream * g
        if KIND == 2:
            tl.store(dg + row, tl.sum(upstream * normed, axis=1), mask=row < n)
            upstream = upstream * tl.load(gain + row % heads).to(tl.float32)[:, None]
        mean = tl.sum(upstream * normed, axis=1) / d
        tl.store(dx + place, (upstream - normed * mean[:, None]) * r[:, None], mask=inside)
    if KIND == 1:
        tl.store(dg + tl.program_id(0) * d + at, sums, mask=at < d)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor | None, eps: float, programs: int) -> Tensor:
        kind = _gain_kind(x, gain)
        x = x.contiguous()
        g = x if gain is None else gain.contiguous()  # without a gain, an unused pointer
        n, d = x.numel() // x.shape[-1], x.shape[-1]
        width = next_power_of_2(d)
        rows = max(1, TILE // width)
        y, rs = torch.empty_like(x), torch.empty(n, device=x.device, dtype=torch.float32)
        heads = 1 if gain is None else gain.shape[0]
        with on_device(x):
            grid = (-(-n // rows),)
            _forward[grid](x, g, y, rs, n, d, heads, eps, KIND=kind, ROWS=rows, WIDTH=width)
        ctx.save_for_backward(x, g, rs)
        ctx.sizes = kind, n, d, heads, rows, width, min(programs, -(-n // rows))
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, rs = ctx.saved_tensors
        kind, n, d, heads, rows, width, programs = ctx.sizes
        dy, dx = gradients[0].contiguous(), torch.empty_like(x)
        parts = (programs, d) if kind == FEATURE else (n // heads, heads, 1)
        dg = rs if kind == NONE else torch.empty(parts, device=x.device, dtype=torch.float32)
        with on_device(x):
            _backward[(programs,)](x, gain, rs, dy, dx, dg, n, d, heads, KIND=kind, ROWS=rows, WIDTH=width)
        return dx, None if kind == NONE else dg.sum(dim=0).to(gain.dtype), None, None


def rms_norm(x: Tensor, gain: Tensor | None = None, eps: float = 1e-6, programs: int = PROGRAMS) -> Tensor:
    """Return the RMS norm of x [..., d], same type, with gradients. gain: [d], or [heads, 1] for x [..., heads, d], or None.

    Args:
        eps: added to the mean square.
        programs: maximum in the backward pass; the last bits of `gain`'s gradient depend on it.

    Raises:
        ConfigError: no Triton, or x is not on a GPU.
    """
    require_triton(x)
    y: Tensor = _RMSNorm.apply(x, gain, eps, programs)
    return y

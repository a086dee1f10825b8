"""FlashAttention-2 in torch: the algorithm of `attention.py` for any `Mask` and device (Dao 2023, arXiv:2307.08691).

    S = scale Q K^T,   L = log sum exp S over the allowed keys,   P = exp(S - L),   O = P V

The forward keeps O and L of each query and no scores, so memory grows with the length and not with its square. The
backward computes P again, tile by tile:

    D = rowsum(dO * O),   dS = P * (dO V^T - D + dL)
    dV = P^T dO,   dQ = scale dS K,   dK = scale dS^T Q

It is for reading, for long rows on a CPU, and for a log-sum-exp in nats, with which parts of the keys that were
attended to separately are joined. For short rows `attention/causal.py` is faster.

The subtle part is a query without any allowed key: L = -inf, and S - L is NaN. L = +inf is used in place of it, so that
P, O and all gradients of the query are 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from whorl.nn.attention.mask import Mask

Tile = tuple[slice, slice, Tensor]  # queries, keys, scores [B, H, queries, keys], -inf where not allowed


def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    scale: float | None = None,
    blocks: tuple[int, int] = (128, 128),
) -> tuple[Tensor, Tensor]:
    """Return (attention [B, H, Tq, dv] in q's type, log-sum-exp [B, H, Tq] in nats, at least fp32), with gradients.

    Args:
        q: [B, H, Tq, d]; k: [B, KV, Tk, d]; v: [B, KV, Tk, dv]; H is a multiple of KV.
        mask: None allows all keys. The log-sum-exp of a query without any allowed key is -inf.
        scale: of the products; None is d^-0.5.
        blocks: queries and keys of a tile.

    Raises:
        ConfigError: a mask of another size.
    """
    mask = Mask(causal=False) if mask is None else mask
    mask.check(q.shape[2], k.shape[2])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    result: tuple[Tensor, Tensor] = _Tiled.apply(q, k, v, mask, scale, blocks)
    return result


def _tiles(q: Tensor, k: Tensor, mask: Mask, scale: float, blocks: tuple[int, int]) -> Iterator[Tile]:
    """Yield the tiles with an allowed pair, all keys of a block of queries in turn. q: [B, H, Tq, d]; k: [B, H, Tk, d]."""
    allows = mask.mask_mod()
    row = torch.arange(mask.batch_size or 1, device=q.device)[:, None, None, None]
    head = torch.arange(mask.n_heads or 1, device=q.device)[:, None, None]
    queries, keys = (torch.arange(t.shape[2], device=q.device) for t in (q, k))
    for a in range(0, len(queries), blocks[0]):
        for b in range(0, len(keys), blocks[1]):
            at, to = slice(a, a + blocks[0]), slice(b, b + blocks[1])
            allowed = allows(row, head, queries[at, None], keys[to])
            if allowed.any():
                scores = q[:, :, at] @ k[:, :, to].transpose(-1, -2) * scale
                yield at, to, scores.masked_fill(~allowed, float("-inf"))


def _widen(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return all in fp32 (fp64 stays), with the keys and values of each query head."""
    dtype, group = torch.promote_types(q.dtype, torch.float32), q.shape[1] // k.shape[1]
    k, v = (t.to(dtype).repeat_interleave(group, dim=1) for t in (k, v))
    return q.to(dtype), k, v


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, blocks: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        wide_q, wide_k, wide_v = _widen(q, k, v)
        out = wide_q.new_zeros(*q.shape[:3], v.shape[-1])
        top = wide_q.new_full(q.shape[:3], float("-inf"))  # m, the maximum of the scores so far
        total = torch.zeros_like(top)  # l, the sum of exp(S - m)
        for at, to, scores in _tiles(wide_q, wide_k, mask, scale, blocks):
            new = torch.maximum(top[:, :, at], scores.amax(dim=-1))
            base = new.masked_fill(new == float("-inf"), 0.0)
            p, shrink = (scores - base[..., None]).exp(), (top[:, :, at] - base).exp()
            total[:, :, at] = total[:, :, at] * shrink + p.sum(dim=-1)
            out[:, :, at] = out[:, :, at] * shrink[..., None] + p @ wide_v[:, :, to]
            top[:, :, at] = new
        out = (out / total.masked_fill(total == 0, 1.0)[..., None]).to(q.dtype)
        lse = top + total.log()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = mask, scale, blocks
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_out, d_lse = gradients
        q, k, v, out, lse = ctx.saved_tensors
        mask, scale, blocks = ctx.settings
        wide_q, wide_k, wide_v = _widen(q, k, v)
        d_out = d_out.to(wide_q.dtype)
        constant = (d_out * out).sum(dim=-1) - d_lse  # D - dL
        lse = lse.masked_fill(lse == float("-inf"), float("inf"))
        d_q, d_k, d_v = torch.zeros_like(wide_q), torch.zeros_like(wide_k), torch.zeros_like(wide_v)
        for at, to, scores in _tiles(wide_q, wide_k, mask, scale, blocks):
            p = (scores - lse[:, :, at, None]).exp()
            d_scores = p * (d_out[:, :, at] @ wide_v[:, :, to].transpose(-1, -2) - constant[:, :, at, None])
            d_v[:, :, to] += p.transpose(-1, -2) @ d_out[:, :, at]
            d_q[:, :, at] += scale * d_scores @ wide_k[:, :, to]
            d_k[:, :, to] += scale * d_scores.transpose(-1, -2) @ wide_q[:, :, at]
        d_k, d_v = (t.unflatten(1, (k.shape[1], -1)).sum(dim=2) for t in (d_k, d_v))
        return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), None, None, None

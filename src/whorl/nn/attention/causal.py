"""Causal softmax attention in blocks of queries, with a hand-written backward.

torch's fused attention on a CPU computes all T^2 products, and its backward is far slower than matrix products. For
short rows, batched products over blocks of queries are 3 times as fast (bench/nn/causal_attention.py). The scores have
the compute type, and the softmax sums them in fp32. In bf16 a score of 64 is rounded by up to 0.25, which the
definition would keep. `causal_attention_reference` is the definition.

`choose_path` may select a C++ kernel for one shape and type (`nn/cpu/attention.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from whorl.machine.kernel_choice import fastest
from whorl.nn.attention.mask import Mask
from whorl.nn.cpu import attention as native
from whorl.nn.cpu.library import short_name
from whorl.nn.gpu import dispatch

QUERY_BLOCK = 256  # queries per block; 128 skips more masked products, but ran 20 % slower


def causal_attention_reference(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None = None) -> Tensor:
    """Return attention by the definition: softmax over allowed keys of q k^T, in fp32, times v. -> [B, H, T, d].

    q: [B, H, T, d], already scaled; k, v: [B, H, Tk, d], where the last T positions belong to the queries; segments:
    [B, Tk] or None. Position i may attend to j when j <= i and both are in the same segment.
    """
    length, n_keys = q.shape[2], k.shape[2]
    allowed = torch.ones(length, n_keys, dtype=torch.bool, device=q.device).tril(n_keys - length)
    if segments is not None:
        query_segments = segments[:, n_keys - length :]
        allowed = allowed & (query_segments[:, None, :, None] == segments[:, None, None, :])
    scores = (q.float() @ k.float().transpose(-1, -2)).masked_fill(~allowed, float("-inf"))
    return (scores.softmax(dim=-1) @ v.float()).to(q.dtype)


def _block_bias(start: int, stop: int, segments: Tensor | None, like: Tensor, heads: int) -> Tensor:
    """Return the mask, as 0 or -inf to add to the scores, of the queries at start..stop against keys 0..stop.

    Shape: [stop-start, stop] or, with segments, [B * heads, stop-start, stop].
    """
    # int32: in a compiled kernel, comparisons of int64 cost more than the exponentials.
    queries = torch.arange(start, stop, dtype=torch.int32, device=like.device)
    keys = torch.arange(stop, dtype=torch.int32, device=like.device)
    allowed = keys[None, :] <= queries[:, None]
    if segments is not None:
        allowed = allowed & (segments[:, start:stop, None] == segments[:, None, :stop])
        allowed = allowed[:, None].expand(-1, heads, -1, -1).flatten(0, 1)
    zero = torch.zeros((), dtype=like.dtype, device=like.device)
    return torch.where(allowed, zero, zero - float("inf"))


class _BlockedAttention(torch.autograd.Function):
    """Attention over query blocks; keeps the probabilities for the backward. q: [N, T, d]; k, v: [N, Tk, d], N = B * H."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, heads: int) -> Tensor:
        length, before = q.shape[1], k.shape[1] - q.shape[1]
        out, probabilities = [], []
        for start in range(0, length, QUERY_BLOCK):
            end = min(start + QUERY_BLOCK, length)
            stop = before + end
            scores = torch.bmm(q[:, start:end], k[:, :stop].transpose(1, 2))
            scores = scores + _block_bias(before + start, stop, segments, scores, heads)
            p = torch.softmax(scores, dim=-1)
            probabilities.append(p)
            out.append(torch.bmm(p, v[:, :stop]))
        ctx.save_for_backward(q, k, v, *probabilities)
        return torch.cat(out, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (d_out,) = gradients
        q, k, v, *probabilities = ctx.saved_tensors
        length, before = q.shape[1], k.shape[1] - q.shape[1]
        d_q, d_k, d_v = [], torch.zeros_like(k), torch.zeros_like(v)
        for block, p in enumerate(probabilities):
            start = block * QUERY_BLOCK
            end = min(start + QUERY_BLOCK, length)
            stop = before + end
            d_o = d_out[:, start:end]
            d_p = torch.bmm(d_o, v[:, :stop].transpose(1, 2))
            d_s = torch._softmax_backward_data(d_p, p, -1, p.dtype)
            d_q.append(torch.bmm(d_s, k[:, :stop]))
            d_v[:, :stop] += torch.bmm(p.transpose(1, 2), d_o)
            d_k[:, :stop] += torch.bmm(d_s.transpose(1, 2), q[:, start:end])
        return torch.cat(d_q, dim=1), d_k, d_v, None, None


def causal_attention(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None = None) -> Tensor:
    """Return causal attention by the fastest path for the device, equal to `causal_attention_reference`. -> [B, H, T, dv].

    q: [B, H, T, d], already scaled. k: [B, H, Tk, d]; v: [B, H, Tk, dv]. The last T positions belong to the queries.
    segments: [B, Tk], each segment in one piece, or None where each row is one segment.
    """
    if q.is_cuda and not torch.compiler.is_compiling():
        before = k.shape[2] - q.shape[2]
        query_segments = None if segments is None else segments[:, before:]
        seen = Mask(query_segments=query_segments, key_segments=segments, offset=before)
        return dispatch.attention(q, k, v, seen, 1.0, lambda q, k, v: _sdpa(q, k, v, segments))
    if q.is_cuda:
        return _sdpa(q, k, v, segments)
    if native.is_chosen(q, k, v):
        return native.causal_attention(q, k, v, segments)
    return _blocked(q, k, v, segments)


def _blocked(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None) -> Tensor:
    batch, heads, length, _ = q.shape
    flat = (t.reshape(batch * heads, *t.shape[2:]) for t in (q, k, v))
    out: Tensor = _BlockedAttention.apply(*flat, segments, heads)  # type: ignore[no-untyped-call]
    return out.view(batch, heads, length, v.shape[-1])


def choose_path(batch: int, heads: int, length: int, head_dim: int, dtype: torch.dtype) -> str:
    """Time the paths of attention on a CPU for one shape, forward and backward; `causal_attention` takes the fastest.

    dtype: bf16 or fp32. Call it before the step is compiled. Returns "blocked" or "native".
    """
    shape = (batch, heads, length, head_dim)

    def run(attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], None]:
        return lambda: _forward_and_backward(attention, shape, dtype)

    candidates = {"blocked": run(lambda q, k, v: _blocked(q, k, v, None))}
    if native.supports(head_dim, dtype):
        candidates["native"] = run(native.causal_attention)
    flops = 7.0 * batch * heads * length * length * head_dim  # 7 products of half of the pairs
    name = f"attention {batch}x{heads}x{length}x{head_dim} {short_name(dtype)}"
    chosen = fastest(name, candidates, flops=flops)
    native.select(shape, dtype, chosen == "native")
    return chosen


def _forward_and_backward(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor],
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
) -> None:
    batch, heads, length, head_dim = shape
    # Not random: a measurement must not change the state of any generator.
    values = torch.arange(batch * length * heads * head_dim).remainder(97).sub(48).div(48).to(dtype)
    q, k, v = (
        values.view(batch, length, heads, head_dim).transpose(1, 2).detach().requires_grad_() for _ in "qkv"
    )
    with torch.enable_grad():
        y = attention(q, k, v)
    y.backward(v.detach())  # type: ignore[no-untyped-call]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None) -> Tensor:
    """Return torch's fused attention. Without documents it needs no mask; with documents the mask is dense."""
    length, n_keys = q.shape[2], k.shape[2]
    if segments is None and length == n_keys:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
    mask = torch.ones(length, n_keys, dtype=torch.bool, device=q.device).tril(n_keys - length)
    if segments is not None:
        mask = mask & (segments[:, None, n_keys - length :, None] == segments[:, None, None, :])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)

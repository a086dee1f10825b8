"""Causal self-attention: grouped queries, QK-norm, rotary positions, smeared keys; the KV cache is an argument.

Differences from multi-head attention (Vaswani et al. 2017, arXiv:1706.03762):

- grouped queries (Ainslie et al. 2023, arXiv:2305.13245): `n_kv_heads` key/value heads serve `n_heads` query heads;
- QK-norm (Henry et al. 2020, arXiv:2010.04245): queries and keys are RMS-normalized over head_dim. One learned
  temperature per query head replaces 1/sqrt(head_dim), which bounds the logits at any learning rate;
- smeared keys (Olsson et al. 2022, In-context Learning and Induction Heads): each key is mixed with the previous
  position's key, by one learned weight per head. Induction heads then form in one layer and thousands of steps
  earlier. Keys are mixed before norm and rotation, and never across a document border.

torch's fused attention on a CPU computes all T^2 products, and its backward is far slower than matrix products. For
short rows, batched products over blocks of queries are 3 times as fast (bench/nn/causal_attention.py). The scores have
the compute type, and the softmax sums them in fp32. In bf16 a score of 64 is rounded by up to 0.25, which the
definition would keep. `causal_attention` has a hand-written backward; `causal_attention_reference` is the definition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.nn.attention.mask import Mask
from whorl.nn.attention.paged import PagedState
from whorl.nn.kernels import dispatch
from whorl.nn.linear import Linear
from whorl.nn.norm import rms_norm
from whorl.nn.positions.rotary import apply_rotary

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
    segments: [B, Tk], or None where each row is one segment.
    """
    if q.is_cuda and not torch.compiler.is_compiling():
        before = k.shape[2] - q.shape[2]
        query_segments = None if segments is None else segments[:, before:]
        seen = Mask(query_segments=query_segments, key_segments=segments, offset=before)
        return dispatch.attention(q, k, v, seen, 1.0, lambda q, k, v: _sdpa(q, k, v, segments))
    if q.is_cuda:
        return _sdpa(q, k, v, segments)
    batch, heads, length, _ = q.shape
    flat = (t.reshape(batch * heads, *t.shape[2:]) for t in (q, k, v))
    out: Tensor = _BlockedAttention.apply(*flat, segments, heads)  # type: ignore[no-untyped-call]
    return out.view(batch, heads, length, v.shape[-1])


def _sdpa(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None) -> Tensor:
    """Return torch's fused attention. Without documents it needs no mask; with documents the mask is dense."""
    length, n_keys = q.shape[2], k.shape[2]
    if segments is None and length == n_keys:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
    mask = torch.ones(length, n_keys, dtype=torch.bool, device=q.device).tril(n_keys - length)
    if segments is not None:
        mask = mask & (segments[:, None, n_keys - length :, None] == segments[:, None, None, :])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)


@dataclass
class LayerState:
    """KV cache of one layer, preallocated for `capacity` positions, of which `length` are filled.

    k, v: [B, n_kv_heads, capacity, head_dim], keys smeared, normalized and rotated; last_key: [B, 1, n_kv_heads,
    head_dim], the newest key before smearing, which the next position mixes in.
    """

    k: Tensor
    v: Tensor
    last_key: Tensor
    length: int = 0


class Attention(nn.Module):
    """Causal self-attention layer: x [B, T, d_model] -> [B, T, d_model]. One matrix computes queries, keys and values."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        *,
        smear_keys: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if n_heads % n_kv_heads:
            raise ConfigError(
                f"n_heads is {n_heads} and n_kv_heads is {n_kv_heads}",
                expected="n_heads a multiple of n_kv_heads",
            )
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, head_dim
        width = (n_heads + 2 * n_kv_heads) * head_dim
        self.qkv = Linear(d_model, width, std=0.6 * d_model**-0.5, generator=generator)
        self.out = Linear(n_heads * head_dim, d_model, std=0.0)
        # Unit-RMS queries and keys have products of up to head_dim; 1.2 starts attention mildly peaked.
        self.temperature = nn.Parameter(torch.full((n_heads, 1), 1.2))
        self.smear = nn.Parameter(torch.zeros(n_kv_heads, 1)) if smear_keys else None  # sigmoid(0) = 1/2

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        segments: Tensor | None = None,
        state: LayerState | PagedState | None = None,
    ) -> Tensor:
        """Return attention over x and the cache. segments: [B, T] or None.

        rotary: tables for the positions of x; state: extended in place by x.
        """
        batch, length, _ = x.shape
        heads = [self.n_heads, self.n_kv_heads, self.n_kv_heads]
        q, k, v = self.qkv(x).view(batch, length, sum(heads), self.head_dim).split(heads, dim=2)
        if self.smear is not None:
            k = self._smear_keys(k, segments, state)
        # The temperature is applied in fp32, before the norm casts back.
        q = apply_rotary(rms_norm(q, self.temperature), *rotary)
        k = apply_rotary(rms_norm(k), *rotary)
        if state is None:
            group = self.n_heads // self.n_kv_heads
            if group > 1:
                k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
            y = causal_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), segments)
        elif isinstance(state, PagedState):
            state.write(k.transpose(1, 2), v.transpose(1, 2))
            y = state.attend(q.transpose(1, 2), Mask(), 1.0)
        else:
            y = self._attend_cached(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), state)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, -1))
        return out

    def _smear_keys(
        self, k: Tensor, segments: Tensor | None, state: LayerState | PagedState | None
    ) -> Tensor:
        """Return k [B, T, n_kv_heads, head_dim], each key mixed with its predecessor in the same segment."""
        assert self.smear is not None
        share = torch.sigmoid(self.smear).to(k.dtype)  # [n_kv_heads, 1]
        if isinstance(state, PagedState):
            return k + share * (state.predecessors(k) - k)
        previous = (
            k[:, :1] if state is None or state.length == 0 else state.last_key
        )  # its own predecessor at first
        if k.shape[1] > 1:
            previous = torch.cat([previous, k[:, :-1]], dim=1)
        if state is not None:
            state.last_key = k[:, -1:].clone()
        mixed = k + share * (previous - k)
        if segments is not None:
            same = F.pad(segments[:, 1:] == segments[:, :-1], (1, 0), value=False)
            mixed = torch.where(same[:, :, None, None], mixed, k)
        return mixed

    def _attend_cached(self, q: Tensor, k: Tensor, v: Tensor, state: LayerState) -> Tensor:
        """Return attention of new positions over the cache and themselves. q: [B, H, T, d]; k, v: [B, KV, T, d]."""
        batch, heads, length, d = q.shape
        stop = state.length + length
        state.k[:, :, state.length : stop] = k
        state.v[:, :, state.length : stop] = v
        grouped = q.reshape(batch, self.n_kv_heads, -1, d)  # [B, KV, group * T, d]
        scores = (grouped @ state.k[:, :, :stop].transpose(-1, -2)).float()
        if length > 1:
            queries = torch.arange(state.length, stop, device=q.device).repeat(heads // self.n_kv_heads)
            hidden = torch.arange(stop, device=q.device)[None, :] > queries[:, None]
            scores = scores.masked_fill(hidden, float("-inf"))
        state.length = stop
        y = scores.softmax(dim=-1).to(v.dtype) @ state.v[:, :, :stop]
        return y.view(batch, heads, length, d)

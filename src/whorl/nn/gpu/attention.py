"""FlashAttention-2, forward: attention that never stores scores (Dao 2023, arXiv:2307.08691, algorithm 1).

    S = scale Q K^T,   P = softmax(S) over the allowed keys,   O = P V

S and P have Tq x Tk entries per head. A program holds a block of queries and loops over blocks of keys and values. Per
query it keeps the running maximum m, the sum l of exponentials, and the output O. For a block of keys with scores S_b:

    m' = max(m, rowmax S_b),   a = exp(m - m'),   P_b = exp(S_b - m')
    l' = a l + rowsum P_b,     O' = a O + P_b V_b

This is the online softmax of `softmax.py` with O. At the end O is divided by l (algorithm 1, line 12), and L = m + log l
is stored per query, from which the backward (`attention_backward.py`) recomputes P. Exponentials are to the base 2, with
log2 e in the scale, because GPUs have that instruction. `mask_bounds.py` decides which blocks are skipped.

Grouped queries (arXiv:2305.13245): query head h reads key head h // (H / KV), without copies.

The subtle part is a query without any allowed key so far: m = -inf, and m - m' is NaN. So 0 is subtracted instead of
-inf. Its exponentials and output are then exactly 0, and its L is +inf, with which the backward gets P = 0.

Shapes: q [B, H, Tq, d], k [B, KV, Tk, d], v [B, KV, Tk, dv] -> [B, H, Tq, dv]; d and dv up to 256. Any strides with
contiguous features; the output's memory is [B, Tq, H, dv], so that joining its heads needs no copy.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from whorl.errors import ConfigError
from whorl.nn.attention.mask import Mask
from whorl.nn.compiler import eager_only
from whorl.nn.gpu.attention_backward import launch_backward
from whorl.nn.gpu.autotune import next_power_of_2
from whorl.nn.gpu.mask_bounds import allowed, keys_of, make_mask_bounds
from whorl.nn.gpu.triton_support import (
    INTERPRETED,
    dot,
    dot_precision,
    jit,
    on_device,
    require_triton,
    tl,
)

MAX_HEAD_DIM = 256  # features per head
LOG2_E = math.log2(math.e)


def supports(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> bool:
    """Return whether the kernel supports these shapes, this type and this mask."""
    narrow = max(q.shape[-1], v.shape[-1]) <= MAX_HEAD_DIM
    plain = mask.stride is None and mask.block is None and mask.allowed is None
    known = q.dtype in (torch.float16, torch.bfloat16, torch.float32) and q.dtype == k.dtype == v.dtype
    return narrow and plain and known and min(q.numel(), k.numel(), v.numel()) > 0


@jit
def _walk(
    q, m, total, out, k, v, k_documents, start, stop, query, ours, n_keys, stride_k, stride_v, scale, window,
    MASKED: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Algorithm 1, lines 7 to 10, over the keys start .. stop."""
    feature, feature_v = tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
    for at in range(start, stop, BLOCK_K):
        key = at + tl.arange(0, BLOCK_K)
        there = key < n_keys
        k_part = tl.load(
            k + key[None, :] * stride_k + feature[:, None],
            mask=(feature < D)[:, None] & there[None, :],
            other=0.0,
        )  # [WIDTH, BLOCK_K]
        s = dot(q, k_part, PRECISION, UPCAST) * scale  # in fp32: a scaled query would be rounded again
        if MASKED:
            theirs = key
            if DOCUMENTS:
                theirs = tl.load(k_documents + key, mask=there, other=0)
            ok = allowed(
                query[:, None],
                key[None, :],
                n_keys,
                ours[:, None],
                theirs[None, :],
                window,
                CAUSAL,
                WINDOW,
                DOCUMENTS,
            )
            s = tl.where(ok, s, float("-inf"))
        new = tl.maximum(m, tl.max(s, axis=1))
        base = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(m - base)
        v_part = tl.load(
            v + key[:, None] * stride_v + feature_v[None, :],
            mask=there[:, None] & (feature_v < DV)[None, :],
            other=0.0,
        )  # [BLOCK_K, WIDTH_V]
        total = total * shrink + tl.sum(p, axis=1)
        out = out * shrink[:, None] + dot(p.to(v_part.dtype), v_part, PRECISION, UPCAST)
        m = new
    return m, total, out


@jit
def _forward(
    q, k, v, o, logs, q_documents, k_documents, bounds, scale, offset, window, heads, group, n_queries, n_keys,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, documents_q, documents_k,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    # The last block first: under a causal mask it has the longest loop and should not start last.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    row, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    row, head = row.to(tl.int64), head.to(tl.int64)
    q += row * q_b + head * q_h
    k += row * k_b + head // group * k_h
    v += row * v_b + head // group * v_h
    o += row * o_b + head * o_h
    place = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    there = place < n_queries
    feature, feature_v = tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
    q_part = tl.load(
        q + place[:, None] * q_t + feature[None, :], mask=there[:, None] & (feature < D)[None, :], other=0.0
    )
    ours = place
    if DOCUMENTS:
        ours = tl.load(q_documents + row * documents_q + place, mask=there, other=0)
        k_documents += row * documents_k
    query = place + offset
    first = block * BLOCK_Q + offset
    last = tl.minimum(block * BLOCK_Q + BLOCK_Q, n_queries) - 1 + offset
    start, full, stop = keys_of(
        first, last, n_keys, window, bounds + (row * tl.num_programs(0) + block) * 2,
        BLOCK_K, CAUSAL, WINDOW, DOCUMENTS,
    )  # fmt: skip
    m = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    out = tl.zeros([BLOCK_Q, WIDTH_V], tl.float32)
    m, total, out = _walk(
        q_part, m, total, out, k, v, k_documents, start, full, query, ours, n_keys, k_t, v_t, scale, window,
        False, BLOCK_K, D, DV, WIDTH, WIDTH_V, CAUSAL, WINDOW, DOCUMENTS, PRECISION, UPCAST,
    )  # fmt: skip
    m, total, out = _walk(
        q_part, m, total, out, k, v, k_documents, tl.maximum(start, full), stop, query, ours, n_keys, k_t, v_t,
        scale, window, True, BLOCK_K, D, DV, WIDTH, WIDTH_V, CAUSAL, WINDOW, DOCUMENTS, PRECISION, UPCAST,
    )  # fmt: skip
    nothing = total == 0.0
    out = out / tl.where(nothing, 1.0, total)[:, None]
    log_sum = tl.where(nothing, float("inf"), m + tl.log2(tl.where(nothing, 1.0, total)))
    tl.store(
        o + place[:, None] * o_t + feature_v[None, :], out, mask=there[:, None] & (feature_v < DV)[None, :]
    )
    tl.store(logs + tl.program_id(1).to(tl.int64) * n_queries + place, log_sum, mask=there)


def launch_settings(q: Tensor, v: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (compile-time constants of all kernels, launch options)."""
    d, dv = q.shape[-1], v.shape[-1]
    wide = max(d, dv) > 64
    fixed = {
        "D": d, "DV": dv, "WIDTH": next_power_of_2(d, 16), "WIDTH_V": next_power_of_2(dv, 16),
        "PRECISION": dot_precision(q.dtype), "UPCAST": INTERPRETED,
    }  # fmt: skip
    return fixed, {"num_warps": 8 if wide else 4, "num_stages": 1 if q.dtype == torch.float32 or wide else 2}


def block_sizes(q: Tensor, v: Tensor) -> tuple[int, int]:
    """Return (queries, keys) per block, which fit 99 KB of shared memory, the minimum of recent GPUs."""
    bytes_of_row = max(q.shape[-1], v.shape[-1]) * q.element_size()
    size = 64 if bytes_of_row <= 256 else 32 if bytes_of_row <= 512 else 16
    return size, size


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, blocks: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        batch, heads, n_queries, _ = q.shape
        seen = make_mask_bounds(mask, q, k, blocks)
        o = empty_bthd(q, v.shape[-1])
        logs = torch.empty(batch * heads, n_queries, device=q.device, dtype=torch.float32)  # base 2
        fixed, launch = launch_settings(q, v)
        documents_q, documents_k, bounds, *rows = seen.tensors(logs, seen.key_bounds)
        with on_device(q):
            _forward[(-(-n_queries // blocks[0]), batch * heads)](
                q, k, v, o, logs, documents_q, documents_k, bounds, scale * LOG2_E, seen.offset, seen.window, heads,
                heads // k.shape[1], n_queries, k.shape[2], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
                *o.stride()[:3], *rows, BLOCK_Q=blocks[0], BLOCK_K=blocks[1], **fixed, **seen.flags, **launch,
            )  # fmt: skip
        ctx.save_for_backward(q, k, v, o, logs)
        ctx.seen, ctx.scale, ctx.blocks = seen, scale, blocks
        ctx.mark_non_differentiable(logs)
        return o, logs

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, logs = ctx.saved_tensors
        d_o = upstream[0] if upstream[0].stride(-1) == 1 else upstream[0].contiguous()
        out = empty_bthd(q, q.shape[-1]), empty_bthd(k, k.shape[-1]), empty_bthd(v, v.shape[-1])
        with on_device(q):
            launch_backward(
                q, k, v, o, logs, d_o, out, ctx.seen, ctx.scale, ctx.blocks, *launch_settings(q, v)
            )
        return *out, None, None, None


def empty_bthd(like: Tensor, features: int) -> Tensor:
    """Return an empty [B, H, T, features] whose memory is [B, T, H, features]. like: [B, H, T, ...]."""
    batch, heads, length = like.shape[:3]
    return torch.empty(batch, length, heads, features, dtype=like.dtype, device=like.device).transpose(1, 2)


@eager_only  # a graph cannot contain a launch, so an explicit request inside a compiled region breaks the graph
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, blocks: tuple[int, int] | None = None
) -> Tensor:
    """Return attention [B, H, Tq, dv] of q's type, with gradients. q: [B, H, Tq, d]; k: [B, KV, Tk, d]; v: [B, KV, Tk, dv].

    Args:
        mask: without stride, block and allowed; see `supports`.
        scale: of the products.
        blocks: queries and keys per block, powers of 2 from 16; None for sizes that fit.

    Raises:
        ConfigError: a mask or shapes that the kernel does not support, no Triton, or no GPU.
    """
    return _checked_attention(q, k, v, mask, scale, blocks)[0]


@eager_only
def attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, blocks: tuple[int, int] | None = None
) -> tuple[Tensor, Tensor]:
    """Return (attention [B, H, Tq, dv], its log-sum-exp [B, H, Tq] in nats, fp32, without a gradient).

    The log-sum-exp of a query without any allowed key is -inf. Arguments and errors as of `attention`.
    """
    y, logs = _checked_attention(q, k, v, mask, scale, blocks)
    lse = torch.where(logs == float("inf"), float("-inf"), logs * math.log(2))
    return y, lse.view(q.shape[:3])


def _checked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, blocks: tuple[int, int] | None
) -> tuple[Tensor, Tensor]:
    """Return the attention and the kernel's logarithms to the base 2, [B * H, Tq]."""
    require_triton(q)
    if not supports(q, k, v, mask):
        raise ConfigError(
            f"Triton attention of q {list(q.shape)} {q.dtype} and v {list(v.shape)}",
            expected=f"one type of 16 or 32 bits, up to {MAX_HEAD_DIM} features, no stride, block or allowed in the mask",
            do='backend = "auto" selects a backend that can',
        )
    result: tuple[Tensor, Tensor] = _Attention.apply(q, k, v, mask, scale, blocks or block_sizes(q, v))
    return result

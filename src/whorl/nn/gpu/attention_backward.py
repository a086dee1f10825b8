"""FlashAttention-2, backward: gradients without stored probabilities (Dao 2023, arXiv:2307.08691, algorithm 2).

With S = scale Q K^T, P = softmax(S), O = P V and the upstream gradient dO:

    D_i  = sum_c dO_ic O_ic                                       (line 4; = sum_j P_ij dP_ij)
    P    = exp(S - L)                                              (line 11; L from the forward pass: no second softmax)
    dV   = P^T dO,   dP = dO V^T,   dS = P * (dP - D)               (lines 12 to 14)
    dQ   = scale dS K,   dK = scale dS^T Q                          (lines 15, 16)

D makes one loop sufficient: the softmax's backward needs sum_j P_ij dP_ij over all keys before the first dS_ij, and
since O_i = sum_j P_ij V_j, that sum is the product of dO_i and O_i.

Difference from algorithm 2: there a program holds a block of keys and adds to dQ by atomics, in any order. Here one
kernel holds keys and computes dK and dV over all query heads of its group. Another one holds queries and computes dQ.
S and dP are computed twice, seven products instead of five, and every run gives the same bits.

The subtle part is the edge. A query beyond the row has L = +inf, so P = exp2(S - inf) = 0. A key beyond the row has
scores of 0, and exp2(0 - L) may be infinite; times a key of zeros that is NaN. So the kernel that holds queries always
masks the last block. In the kernel that holds keys, such a row of dK is not stored.

Shapes: as in `attention.py`; L and D [B * H, Tq] fp32. Scores are to the base 2: L is m + log2 l.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from whorl.nn.gpu.mask_bounds import MaskBounds, allowed, keys_of, queries_of
from whorl.nn.gpu.triton_support import dot, jit, tl


@jit
def _products(
    o, d_o, sums, heads, n_queries, o_b, o_h, o_t, g_b, g_h, g_t,
    BLOCK_Q: tl.constexpr, DV: tl.constexpr, WIDTH_V: tl.constexpr,
):  # fmt: skip
    """D of one block of queries."""
    row, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    row, head = row.to(tl.int64), head.to(tl.int64)
    place = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    feature = tl.arange(0, WIDTH_V)
    inside = (place < n_queries)[:, None] & (feature < DV)[None, :]
    a = tl.load(o + row * o_b + head * o_h + place[:, None] * o_t + feature[None, :], mask=inside, other=0.0)
    b = tl.load(
        d_o + row * g_b + head * g_h + place[:, None] * g_t + feature[None, :], mask=inside, other=0.0
    )
    products = tl.sum(a.to(tl.float32) * b.to(tl.float32), axis=1)
    tl.store(sums + tl.program_id(1).to(tl.int64) * n_queries + place, products, mask=place < n_queries)


@jit
def _walk_keys(
    d_q, q, d_o, log, product, k, v, k_documents, start, stop, query, ours, n_keys, stride_k, stride_v, scale, window,
    MASKED: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    feature, feature_v = tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
    for at in range(start, stop, BLOCK_K):
        key = at + tl.arange(0, BLOCK_K)
        there = key < n_keys
        k_part = tl.load(
            k + key[:, None] * stride_k + feature[None, :],
            mask=there[:, None] & (feature < D)[None, :],
            other=0.0,
        )  # [BLOCK_K, WIDTH]
        v_part = tl.load(
            v + key[:, None] * stride_v + feature_v[None, :],
            mask=there[:, None] & (feature_v < DV)[None, :],
            other=0.0,
        )  # [BLOCK_K, WIDTH_V]
        p = tl.exp2(dot(q, tl.trans(k_part), PRECISION, UPCAST) * scale - log[:, None])
        if MASKED:
            theirs = key
            if DOCUMENTS:
                theirs = tl.load(k_documents + key, mask=there, other=0)
            ok = allowed(
                query[:, None], key[None, :], n_keys, ours[:, None], theirs[None, :], window, CAUSAL, WINDOW, DOCUMENTS
            )  # fmt: skip
            p = tl.where(ok, p, 0.0)
        d_p = dot(d_o, tl.trans(v_part), PRECISION, UPCAST)
        d_s = p * (d_p - product[:, None])
        d_q += dot(d_s.to(k_part.dtype), k_part, PRECISION, UPCAST)
    return d_q


@jit
def _queries(
    q, k, v, d_o, logs, sums, d_q, q_documents, k_documents, bounds, scale, offset, window, heads, group, n_queries,
    n_keys, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, dq_b, dq_h, dq_t, documents_q, documents_k,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """dQ of one block of queries: a loop over keys, as in the forward pass."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest loop first
    row, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    row, head = row.to(tl.int64), head.to(tl.int64)
    k += row * k_b + head // group * k_h
    v += row * v_b + head // group * v_h
    place = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    there = place < n_queries
    feature, feature_v = tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
    inside = there[:, None] & (feature < D)[None, :]
    q_part = tl.load(
        q + row * q_b + head * q_h + place[:, None] * q_t + feature[None, :], mask=inside, other=0.0
    )
    g_part = tl.load(
        d_o + row * g_b + head * g_h + place[:, None] * g_t + feature_v[None, :],
        mask=there[:, None] & (feature_v < DV)[None, :],
        other=0.0,
    )
    entry = tl.program_id(1).to(tl.int64) * n_queries + place
    log = tl.load(logs + entry, mask=there, other=float("inf"))
    product = tl.load(sums + entry, mask=there, other=0.0)
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
    found = tl.zeros([BLOCK_Q, WIDTH], tl.float32)
    found = _walk_keys(
        found, q_part, g_part, log, product, k, v, k_documents, start, full, query, ours, n_keys, k_t, v_t,
        scale * 1.4426950408889634, window,
        False, BLOCK_K, D, DV, WIDTH, WIDTH_V, CAUSAL, WINDOW, DOCUMENTS, PRECISION, UPCAST,
    )  # fmt: skip
    found = _walk_keys(
        found, q_part, g_part, log, product, k, v, k_documents, tl.maximum(start, full), stop, query, ours, n_keys,
        k_t, v_t, scale * 1.4426950408889634, window,
        True, BLOCK_K, D, DV, WIDTH, WIDTH_V, CAUSAL, WINDOW, DOCUMENTS, PRECISION, UPCAST,
    )  # fmt: skip
    tl.store(
        d_q + row * dq_b + head * dq_h + place[:, None] * dq_t + feature[None, :], found * scale, mask=inside
    )


@jit
def _walk_queries(
    d_k, d_v, k, v, q, d_o, logs, sums, q_documents, start, stop, key, theirs, offset, n_queries, n_keys,
    stride_q, stride_g, scale, window,
    MASKED: tl.constexpr, BLOCK_Q: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Algorithm 2, lines 8 to 16, over the queries start .. stop; scores are transposed, [BLOCK_K, BLOCK_Q]."""
    feature, feature_v = tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
    for at in range(start, stop, BLOCK_Q):
        place = at + tl.arange(0, BLOCK_Q)
        there = place < n_queries
        q_part = tl.load(
            q + place[:, None] * stride_q + feature[None, :],
            mask=there[:, None] & (feature < D)[None, :],
            other=0.0,
        )  # [BLOCK_Q, WIDTH]
        g_part = tl.load(
            d_o + place[:, None] * stride_g + feature_v[None, :],
            mask=there[:, None] & (feature_v < DV)[None, :],
            other=0.0,
        )  # [BLOCK_Q, WIDTH_V]
        log = tl.load(logs + place, mask=there, other=float("inf"))
        product = tl.load(sums + place, mask=there, other=0.0)
        p = tl.exp2(dot(k, tl.trans(q_part), PRECISION, UPCAST) * scale - log[None, :])
        if MASKED:
            ours = place
            if DOCUMENTS:
                ours = tl.load(q_documents + place, mask=there, other=0)
            ok = allowed(
                place[None, :] + offset, key[:, None], n_keys, ours[None, :], theirs[:, None], window,
                CAUSAL, WINDOW, DOCUMENTS,
            )  # fmt: skip
            p = tl.where(ok, p, 0.0)
        d_v += dot(p.to(g_part.dtype), g_part, PRECISION, UPCAST)
        d_p = dot(v, tl.trans(g_part), PRECISION, UPCAST)
        d_s = p * (d_p - product[None, :])
        d_k += dot(d_s.to(q_part.dtype), q_part, PRECISION, UPCAST)
    return d_k, d_v


@jit
def _keys(
    q, k, v, d_o, logs, sums, d_k, d_v, q_documents, k_documents, bounds, scale, offset, window, kv_heads, group,
    n_queries, n_keys, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    documents_q, documents_k,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of keys: for each query head of the group, a loop over queries."""
    block = tl.program_id(0)
    row, head = tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads
    row, head = row.to(tl.int64), head.to(tl.int64)
    key = block * BLOCK_K + tl.arange(0, BLOCK_K)
    there = key < n_keys
    feature, feature_v = tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
    inside, inside_v = there[:, None] & (feature < D)[None, :], there[:, None] & (feature_v < DV)[None, :]
    k_part = tl.load(
        k + row * k_b + head * k_h + key[:, None] * k_t + feature[None, :], mask=inside, other=0.0
    )
    v_part = tl.load(
        v + row * v_b + head * v_h + key[:, None] * v_t + feature_v[None, :], mask=inside_v, other=0.0
    )
    theirs = key
    if DOCUMENTS:
        theirs = tl.load(k_documents + row * documents_k + key, mask=there, other=0)
        q_documents += row * documents_q
    start, full, stop = queries_of(
        block * BLOCK_K, tl.minimum(block * BLOCK_K + BLOCK_K, n_keys) - 1, n_queries, n_keys, offset, window,
        bounds + (row * tl.num_programs(0) + block) * 2, BLOCK_Q, CAUSAL, WINDOW, DOCUMENTS,
    )  # fmt: skip
    found_k = tl.zeros([BLOCK_K, WIDTH], tl.float32)
    found_v = tl.zeros([BLOCK_K, WIDTH_V], tl.float32)
    for member in range(group):
        its = head * group + member
        entry = (row * kv_heads * group + its) * n_queries
        found_k, found_v = _walk_queries(
            found_k, found_v, k_part, v_part, q + row * q_b + its * q_h, d_o + row * g_b + its * g_h, logs + entry,
            sums + entry, q_documents, start, full, key, theirs, offset, n_queries, n_keys, q_t, g_t,
            scale * 1.4426950408889634, window,
            True, BLOCK_Q, D, DV, WIDTH, WIDTH_V, CAUSAL, WINDOW, DOCUMENTS, PRECISION, UPCAST,
        )  # fmt: skip
        found_k, found_v = _walk_queries(
            found_k, found_v, k_part, v_part, q + row * q_b + its * q_h, d_o + row * g_b + its * g_h, logs + entry,
            sums + entry, q_documents, full, stop, key, theirs, offset, n_queries, n_keys, q_t, g_t,
            scale * 1.4426950408889634, window,
            False, BLOCK_Q, D, DV, WIDTH, WIDTH_V, CAUSAL, WINDOW, DOCUMENTS, PRECISION, UPCAST,
        )  # fmt: skip
    tl.store(
        d_k + row * dk_b + head * dk_h + key[:, None] * dk_t + feature[None, :], found_k * scale, mask=inside
    )
    tl.store(
        d_v + row * dv_b + head * dv_h + key[:, None] * dv_t + feature_v[None, :], found_v, mask=inside_v
    )


def launch_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    logs: Tensor,
    d_o: Tensor,
    out: tuple[Tensor, Tensor, Tensor],
    mask_bounds: MaskBounds,
    scale: float,
    blocks: tuple[int, int],
    fixed: dict[str, Any],
    launch: dict[str, Any],
) -> None:
    """Fill `out`, (dQ, dK, dV), from the tensors that the forward pass kept and the upstream gradient d_o: [B, H, Tq, dv].

    fixed, launch: from `launch_settings` in `attention.py`.
    """
    (batch, heads, n_queries, _), (kv_heads, n_keys) = q.shape, k.shape[1:3]
    d_q, d_k, d_v = out
    sums = torch.empty_like(logs)
    sizes = {"BLOCK_Q": blocks[0], "BLOCK_K": blocks[1], **fixed, **mask_bounds.flags}
    of_queries = (-(-n_queries // blocks[0]), batch * heads)
    _products[of_queries](
        o, d_o, sums, heads, n_queries, *o.stride()[:3], *d_o.stride()[:3],
        BLOCK_Q=blocks[0], DV=fixed["DV"], WIDTH_V=fixed["WIDTH_V"],
    )  # fmt: skip
    strides = *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *d_o.stride()[:3]
    documents_q, documents_k, bounds, *rows = mask_bounds.tensors(logs, mask_bounds.query_bounds)
    _keys[(-(-n_keys // blocks[1]), batch * kv_heads)](
        q, k, v, d_o, logs, sums, d_k, d_v, documents_q, documents_k, bounds, scale, mask_bounds.offset, mask_bounds.window,
        kv_heads, heads // kv_heads, n_queries, n_keys, *strides, *d_k.stride()[:3], *d_v.stride()[:3], *rows,
        **sizes, **launch,
    )  # fmt: skip
    documents_q, documents_k, bounds, *rows = mask_bounds.tensors(logs, mask_bounds.key_bounds)
    _queries[of_queries](
        q, k, v, d_o, logs, sums, d_q, documents_q, documents_k, bounds, scale, mask_bounds.offset, mask_bounds.window,
        heads, heads // kv_heads, n_queries, n_keys, *strides, *d_q.stride()[:3], *rows, **sizes, **launch,
    )  # fmt: skip

"""Softmax attention, softmax(q k^T * scale + bias) v under a `Mask`, by several backends with equal results.

- "reference": the definition with fp32 scores; supports every option.
- "sdpa": torch's scaled_dot_product_attention, fused where the device has a kernel (Dao et al. 2022, FlashAttention,
  arXiv:2205.14135). Causal rows need no mask; any other mask is passed as a dense one.
- "flex": torch's flex_attention (Dong et al. 2024, arXiv:2412.05496). The mask stays a function, and fully masked
  blocks are skipped. It is compiled on CUDA. On a CPU only the forward pass exists.
- "blocked": causal rows on a CPU, with gradients, in blocks of queries (`nn/attention/causal.py`).
- "tiled": FlashAttention-2 in torch (`nn/gpu/tiled_attention.py`): any mask, memory linear in the length.
- "triton": FlashAttention-2 as a Triton kernel (`nn/gpu/attention.py`) on a GPU. It supports causal, window, document
  and padding masks; no bias, softcap or sink. "auto" uses it where it was measured to be faster than "sdpa".

Scores are computed in this order:

    s = q k^T * scale
    s = softcap * tanh(s / softcap)         Gemma 2 (arXiv:2408.00118, sec. 2)
    s = s + bias                            slopes [H] stand for -slope * |i - j|, ALiBi (arXiv:2108.12409, sec. 3)
    p = exp(s) / (exp(sink) + sum exp(s))   a learned logit per head without a value (Xiao et al. 2023, arXiv:2309.17453;
                                            learned as in gpt-oss, arXiv:2508.10925)

The subtle part is a query without any allowed key: padding, or a bias of -inf at each key. Its softmax is 0 / 0, and a
NaN that is overwritten in the output still reaches the gradient. Such a row therefore attends to every key, and its
output is set to 0 afterwards. Every backend returns 0 for it, with zero gradients.

Grouped queries (arXiv:2305.13245): KV heads divide H; query head h uses key head h // (H / KV).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from whorl.errors import ConfigError, one_of
from whorl.nn.attention.causal import causal_attention
from whorl.nn.attention.mask import Mask
from whorl.nn.gpu import dispatch

BACKENDS = ("auto", "reference", "sdpa", "flex", "blocked", "tiled", "triton")
MAX_BLOCKED_LENGTH = 2048  # positions; the blocked path keeps all probabilities for its backward


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Tensor | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    backend: str | Callable[..., Tensor] = "auto",
) -> Tensor:
    """Return softmax attention of q over k and v, [B, H, Tq, dv], in the type of q.

    q: [B, H, Tq, d]; k: [B, KV, Tk, d]; v: [B, KV, Tk, dv].

    Args:
        mask: which keys each query may attend to: a `Mask`, or a bool tensor that broadcasts to [B, H, Tq, Tk], True =
            attend. None allows all.
        scale: factor of the products; None is d^-0.5.
        bias: added to the scores: [H] slopes, or a tensor that broadcasts to [H, Tq, Tk] or [B, H, Tq, Tk]. -inf excludes
            a key.
        softcap: bound of the scores.
        sink: [H] logits.
        backend: "auto" selects the fastest backend that supports all options; or a function of the other arguments, for
            keys on several ranks (`parallel/ring_attention.py`).

    Raises:
        ConfigError: shapes that do not fit; an unknown backend; a backend that does not support the options.
    """
    if not isinstance(mask, Mask):
        mask = Mask(causal=False, allowed=mask)
    _check(q, k, v, bias, softcap, sink)
    if mask.n_heads not in (None, q.shape[1]):
        raise ConfigError(f"the mask has {mask.n_heads} heads", expected=f"1 or {q.shape[1]}, as q")
    if callable(backend):
        return backend(q, k, v, mask, q.shape[-1] ** -0.5 if scale is None else scale, bias, softcap, sink)
    if backend not in BACKENDS:
        raise ConfigError(f"backend is {backend!r}", expected=one_of(backend, BACKENDS))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if backend == "auto":
        backend = _select_backend(q, k, mask, bias, softcap, sink)
        if backend == "sdpa" and bias is None and q.is_cuda and not torch.compiler.is_compiling():
            return dispatch.attention(q, k, v, mask, scale, lambda q, k, v: _sdpa(q, k, v, mask, scale, None))
    if backend in ("tiled", "triton"):
        if bias is not None or softcap is not None or sink is not None:
            raise ConfigError(
                f'backend is "{backend}"',
                expected="attention without bias, softcap and sink",
                do='backend = "auto" selects a backend that can',
            )
        return _triton(q, k, v, mask, scale) if backend == "triton" else _tiled(q, k, v, mask, scale)
    if backend == "sdpa":
        for name, option in (("softcap", softcap), ("sink", sink)):
            if option is not None:
                raise ConfigError(
                    f'backend is "sdpa" and {name} is given, which torch\'s fused attention does not support',
                    expected='"reference" or "flex"',
                    do='backend = "auto" selects a backend that can',
                )
        return _sdpa(q, k, v, mask, scale, bias)
    if backend == "flex":
        with_grad = torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (q, k, v, bias, sink)
        )
        if q.device.type == "cpu" and with_grad:
            raise ConfigError(
                'backend is "flex" on a CPU, with gradients: torch has no backward for it on a CPU',
                expected='"reference" or "sdpa", a GPU, or torch.no_grad()',
                do='backend = "auto" selects a backend that can',
            )
        return _flex(q, k, v, mask, scale, bias, softcap, sink)
    if backend == "blocked":
        if bias is not None or softcap is not None or sink is not None or not _can_be_blocked(q, k, mask):
            raise ConfigError(
                'backend is "blocked"',
                expected="causal queries at the end of their row, without bias, softcap and sink",
            )
        return _blocked(q, k, v, mask, scale)
    return _reference(q, k, v, mask, scale, bias, softcap, sink)


def _select_backend(
    q: Tensor, k: Tensor, mask: Mask, bias: Tensor | None, softcap: float | None, sink: Tensor | None
) -> str:
    """Return the backend that was measured to be fastest. "flex" has no GPU measurement and is used only on request."""
    if softcap is not None or sink is not None:
        return "reference"
    short = (
        q.shape[2] > 1
        and k.shape[2] <= MAX_BLOCKED_LENGTH
        and q.device.type == "cpu"
        and torch.is_grad_enabled()
    )
    return "blocked" if short and bias is None and _can_be_blocked(q, k, mask) else "sdpa"


def _can_be_blocked(q: Tensor, k: Tensor, mask: Mask) -> bool:
    last = mask.offset == k.shape[2] - q.shape[2]  # the queries are the newest positions
    plain = replace(mask, query_segments=None, key_segments=None).is_causal_only
    return last and mask.causal and plain and _queries_end_the_keys(mask)


def _queries_end_the_keys(mask: Mask) -> bool:
    """Whether the documents of the queries are those of the last keys. Layers pass one tensor or slices of one."""
    queries, keys = mask.query_segments, mask.key_segments
    if queries is None or keys is None or queries is keys or torch.compiler.is_compiling():
        return True
    return torch.equal(queries, keys[:, mask.offset :])


def _blocked(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
    """Return causal attention in blocks of queries: 3 times as fast as sdpa on a CPU with gradients."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        # Repeated in the layout [B, T, H, d] of the projections, so that gradients have that layout too.
        k, v = (t.transpose(1, 2).repeat_interleave(group, dim=2).transpose(1, 2) for t in (k, v))
    return causal_attention(q if scale == 1.0 else q * scale, k, v, mask.key_segments)


def _triton(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
    from whorl.nn.gpu.attention import attention

    y: Tensor = attention(q, k, v, mask, scale)
    return y


def _tiled(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
    from whorl.nn.gpu.tiled_attention import tiled_attention

    return tiled_attention(q, k, v, mask, scale)[0]


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float,
    bias: Tensor | None,
    softcap: float | None,
    sink: Tensor | None,
) -> Tensor:
    """Return attention by the definition."""
    k, v = (t.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = q.float() @ k.transpose(-1, -2) * scale  # [B, H, Tq, Tk]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + _dense_bias(bias, scores, mask)
    n_queries, n_keys = scores.shape[-2:]
    allowed = mask.dense(n_queries, n_keys, q.device)
    if bias is not None and bias.dim() != 1:
        allowed = allowed & (bias > float("-inf"))
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    if sink is not None:
        column = sink.float()[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    p = scores.softmax(dim=-1)[..., :n_keys]
    # A row without any allowed key is uniform here. Its output becomes an exact 0, with zero gradient.
    return (p.masked_fill(~allowed, 0.0) @ v).to(q.dtype)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, bias: Tensor | None) -> Tensor:
    heads, kv_heads, (n_queries, n_keys) = q.shape[1], k.shape[1], (q.shape[2], k.shape[2])
    fused = functools.partial(F.scaled_dot_product_attention, scale=scale, enable_gqa=heads != kv_heads)
    if bias is None and mask.allows_all(n_queries, n_keys):
        if (
            n_queries == 1 and heads != kv_heads
        ):  # the heads of a group become extra queries, so keys are read once, not repeated
            y = F.scaled_dot_product_attention(q.reshape(*k.shape[:2], -1, q.shape[-1]), k, v, scale=scale)
            return y.reshape(*q.shape[:3], v.shape[-1])
        return fused(q, k, v)
    if bias is None and mask.is_causal_only and mask.offset == 0 and n_queries == n_keys:
        return fused(q, k, v, is_causal=True)
    allowed = mask.dense(n_queries, n_keys, q.device)
    empty = ~allowed.any(dim=-1, keepdim=True)  # [B, 1, Tq, 1]
    seen = allowed | empty
    if bias is not None:
        seen = _dense_bias(bias, q, mask, n_keys).to(q.dtype).masked_fill(~allowed, float("-inf"))
        empty = (seen == float("-inf")).all(dim=-1, keepdim=True)  # [B, H, Tq, 1]
        seen = seen.masked_fill(empty, 0.0)
    return fused(q, k, v, attn_mask=seen).masked_fill(empty, 0.0)


def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float,
    bias: Tensor | None,
    softcap: float | None,
    sink: Tensor | None,
) -> Tensor:
    from torch.nn.attention.flex_attention import create_block_mask

    n_queries, n_keys = q.shape[2], k.shape[2]
    mask.check(n_queries, n_keys)
    blocks = create_block_mask(
        mask.mask_mod(), mask.batch_size, mask.n_heads, n_queries, n_keys, device=q.device
    )
    added = bias if bias is None or bias.dim() == 1 else bias.expand(*q.shape[:3], n_keys)

    def modified(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if added is not None and added.dim() == 1:
            score = score - added[head] * (query + mask.offset - key).abs()
        elif added is not None:
            score = score + added[row, head, query, key]
        return score

    y, log_sum = _flex_attention(q.is_cuda)(
        q,
        k,
        v,
        score_mod=modified if added is not None or softcap is not None else None,
        block_mask=blocks,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    if sink is not None:  # exp(log_sum) / (exp(log_sum) + exp(sink)), with log_sum over the allowed keys
        y = y * torch.sigmoid(log_sum.float() - sink.float()[:, None])[..., None].to(y.dtype)
    result: Tensor = y
    return result


@functools.cache
def _flex_attention(compiled: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return torch's flex_attention: (q, k, v, ...) -> (y, log of the softmax's denominator [B, H, Tq])."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def run(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        y, aux = flex_attention(*args, **options, return_aux=AuxRequest(lse=True))
        return y, aux.lse

    if compiled:
        return torch.compile(run)

    def quiet(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        args = tuple(
            t.detach() for t in args
        )  # on a CPU, flex_attention rejects tensors that require a gradient
        with warnings.catch_warnings():  # the uncompiled form warns that it is slow; here it is only a check
            warnings.simplefilter("ignore", UserWarning)
            return run(*args, **options)

    return quiet


def _dense_bias(bias: Tensor, like: Tensor, mask: Mask, n_keys: int | None = None) -> Tensor:
    """Return a bias as [H, Tq, Tk] or unchanged. like: [B, H, Tq, ...]."""
    if bias.dim() != 1:
        return bias
    n_queries = like.shape[2]
    keys = torch.arange(like.shape[-1] if n_keys is None else n_keys, device=like.device)
    queries = torch.arange(mask.offset, mask.offset + n_queries, device=like.device)
    return -bias[:, None, None] * (queries[:, None] - keys).abs()


def _check(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, softcap: float | None, sink: Tensor | None
) -> None:
    shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in (("q", q), ("k", k), ("v", v)))
    if not (q.dim() == k.dim() == v.dim() == 4):
        raise ConfigError(f"the shapes are {shapes}", expected="[rows, heads, positions, features]")
    same_keys = k.shape[:3] == v.shape[:3]
    if not same_keys or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
        raise ConfigError(
            f"the shapes are {shapes}",
            expected="q [B, H, Tq, d], k [B, KV, Tk, d] and v [B, KV, Tk, dv], with H a multiple of KV",
        )
    heads, n_queries, n_keys = q.shape[1], q.shape[2], k.shape[2]
    if bias is not None and bias.shape != (heads,):
        whole = (q.shape[0], heads, n_queries, n_keys)[-bias.dim() :] if bias.dim() in (3, 4) else ()
        if not whole or any(have not in (1, want) for have, want in zip(bias.shape, whole, strict=True)):
            raise ConfigError(
                f"bias has the shape {list(bias.shape)}",
                expected=f"[{heads}] or [{heads}, {n_queries}, {n_keys}]",
            )
    if softcap is not None and softcap <= 0:
        raise ConfigError(f"softcap is {softcap}", expected="above 0, or None")
    if sink is not None and sink.shape != (heads,):
        raise ConfigError(f"sink has the shape {list(sink.shape)}", expected=f"[{heads}]: one logit per head")

"""Attention, softmax(q k^T * scale + bias) v over what a `Mask` allows, by backends that agree.

- "reference": the definition, a few lines, with fp32 scores; every option.
- "sdpa": torch's scaled_dot_product_attention, which fuses (Dao et al. 2022, FlashAttention, arXiv:2205.14135) where
  the device has a kernel. A causal row needs no mask at all, anything else is given as a dense one.
- "flex": torch's flex_attention (Dong et al. 2024, arXiv:2412.05496): the mask stays a function, and blocks of which
  nothing may be seen are never computed. Compiled on CUDA; on a CPU it is a check of the forward pass, for torch has no
  backward there.
- "blocked": causal rows on a CPU, with gradients, as plain products over blocks of queries (`nn/attention/causal.py`).
- "triton": FlashAttention-2 as a kernel of our own (`nn/kernels/attention.py`), on a GPU: causal, window, documents,
  padding; neither bias, softcap nor sink. "auto" takes it where it was measured to beat "sdpa" (`nn/kernels/autotune.py`).

What each score goes through, in this order (capital letters are what the papers add to plain attention):

    s = q k^T * scale
    s = softcap * tanh(s / softcap)         SOFTCAP, Gemma 2 (arXiv:2408.00118, sec. 2)
    s = s + bias                            BIAS; slopes [H] stand for -slope * |i - j|, ALiBi (arXiv:2108.12409, sec. 3)
    p = exp(s) / (exp(SINK) + sum exp(s))   SINK: a learned logit a head, to which no value belongs, so that a head can look
                                            at nothing (Xiao et al. 2023, arXiv:2309.17453, on why models make one of the
                                            first token; learned as in gpt-oss, arXiv:2508.10925)

The subtle part is a query that may look at nothing (padding; a packed row's filler). Its softmax is 0 / 0, and even
where a NaN is overwritten afterwards it comes back in the gradient. So such a row is first let see everything, and its
output is then set to 0: value and gradient are both exactly 0.

Grouped queries (arXiv:2305.13245): KV heads divide H; query head h reads key head h // (H / KV).
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
from whorl.nn.kernels import dispatch

BACKENDS = ("auto", "reference", "sdpa", "flex", "blocked", "triton")
MAX_BLOCKED_LENGTH = 2048  # positions: the blocked path keeps all probabilities for its backward


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """q: [B, H, Tq, d]; k: [B, KV, Tk, d]; v: [B, KV, Tk, dv] -> [B, H, Tq, dv], of q's type.

    Args:
        mask: what may be seen; None is everything.
        scale: of the products; None is d^-0.5.
        bias: added to the scores: [H] slopes, or [H, Tq, Tk] or [B, H, Tq, Tk] as it is (sizes of 1 are spread).
        softcap: bound of the scores.
        sink: [H] logits.
        backend: "auto" is the fastest that can do all of it, or one of the others.

    Raises:
        ConfigError: shapes that do not fit; a backend that is unknown, or cannot do what is asked.
    """
    mask = mask if mask is not None else Mask(causal=False)
    _check(q, k, v, bias, softcap, sink)
    if backend not in BACKENDS:
        raise ConfigError(f"backend is {backend!r}", expected=one_of(backend, BACKENDS))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if backend == "auto":
        backend = _select_backend(q, k, mask, bias, softcap, sink)
        if backend == "sdpa" and bias is None and q.is_cuda and not torch.compiler.is_compiling():
            return dispatch.attention(q, k, v, mask, scale, lambda q, k, v: _sdpa(q, k, v, mask, scale, None))
    if backend == "triton":
        return _triton(q, k, v, mask, scale, bias, softcap, sink)
    if backend == "sdpa":
        for name, option in (("softcap", softcap), ("sink", sink)):
            if option is not None:
                raise ConfigError(
                    f'backend is "sdpa" and {name} is given: torch\'s fused attention has no such thing',
                    expected='"reference" or "flex"',
                    do='backend = "auto" chooses one that can',
                )
        return _sdpa(q, k, v, mask, scale, bias)
    if backend == "flex":
        learning = torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (q, k, v, bias, sink)
        )
        if q.device.type == "cpu" and learning:
            raise ConfigError(
                'backend is "flex" on a CPU, with gradients: torch has no backward of it there',
                expected='"reference" or "sdpa", a GPU, or torch.no_grad()',
                do='backend = "auto" chooses one that can',
            )
        return _flex(q, k, v, mask, scale, bias, softcap, sink)
    if backend == "blocked":
        if bias is not None or softcap is not None or sink is not None or not _can_be_blocked(q, k, mask):
            raise ConfigError(
                'backend is "blocked"',
                expected="causal queries that stand last in their row, without bias, softcap and sink",
            )
        return _blocked(q, k, v, mask, scale)
    return _reference(q, k, v, mask, scale, bias, softcap, sink)


def _select_backend(
    q: Tensor, k: Tensor, mask: Mask, bias: Tensor | None, softcap: float | None, sink: Tensor | None
) -> str:
    """The fastest that was measured to be: flex, which no GPU has shown yet, has to be asked for."""
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
    last = mask.offset == k.shape[2] - q.shape[2]  # the queries are the newest of the positions
    return last and mask.causal and replace(mask, query_segments=None, key_segments=None).is_causal_only


def _blocked(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
    """Causal rows over blocks of queries (`nn/attention/causal.py`), 3 times as fast as sdpa on a CPU with gradients."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    return causal_attention(q * scale, k, v, mask.key_segments)


def _triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float,
    bias: Tensor | None,
    softcap: float | None,
    sink: Tensor | None,
) -> Tensor:
    from whorl.nn.kernels.attention import attention

    if bias is not None or softcap is not None or sink is not None:
        raise ConfigError(
            'backend is "triton"',
            expected="attention without bias, softcap and sink",
            do='backend = "auto" chooses one that can',
        )
    y: Tensor = attention(q, k, v, mask, scale)
    return y


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
    """The definition."""
    k, v = (t.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = q.float() @ k.transpose(-1, -2) * scale  # [B, H, Tq, Tk]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + _dense_bias(bias, scores, mask)
    n_queries, n_keys = scores.shape[-2:]
    allowed = mask.dense(n_queries, n_keys, q.device)
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    if sink is not None:
        column = sink.float()[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    p = scores.softmax(dim=-1)[..., :n_keys]
    # A row without any key is now uniform: an exact 0 instead, in which no gradient flows.
    return (p.masked_fill(~allowed, 0.0) @ v).to(q.dtype)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, bias: Tensor | None) -> Tensor:
    heads, kv_heads, (n_queries, n_keys) = q.shape[1], k.shape[1], (q.shape[2], k.shape[2])
    fused = functools.partial(F.scaled_dot_product_attention, scale=scale, enable_gqa=heads != kv_heads)
    if bias is None and mask.allows_all(n_queries, n_keys):
        if (
            n_queries == 1 and heads != kv_heads
        ):  # the heads of a group as queries: keys are read once, not repeated
            y = F.scaled_dot_product_attention(q.reshape(*k.shape[:2], -1, q.shape[-1]), k, v, scale=scale)
            return y.reshape(*q.shape[:3], v.shape[-1])
        return fused(q, k, v)
    if bias is None and mask.is_causal_only and mask.offset == 0 and n_queries == n_keys:
        return fused(q, k, v, is_causal=True)
    allowed = mask.dense(n_queries, n_keys, q.device)
    empty = ~allowed.any(dim=-1, keepdim=True)  # [B, 1, Tq, 1]
    seen = allowed | empty
    if bias is not None:
        dense = _dense_bias(bias, q, mask, n_keys).to(q.dtype)
        seen = dense.masked_fill(~seen, float("-inf"))
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
    blocks = create_block_mask(mask.mask_mod(), mask.batch_size, None, n_queries, n_keys, device=q.device)
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
    if sink is not None:  # exp(log_sum) / (exp(log_sum) + exp(sink)) of what was attended to without it
        y = y * torch.sigmoid(log_sum.float() - sink.float()[:, None])[..., None].to(y.dtype)
    result: Tensor = y
    return result


@functools.cache
def _flex_attention(compiled: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """(q, k, v, ...) -> (y, log of the softmax's denominator [B, H, Tq])."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def run(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        y, aux = flex_attention(*args, **options, return_aux=AuxRequest(lse=True))
        return y, aux.lse

    if compiled:
        return torch.compile(run)

    def quiet(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        args = tuple(t.detach() for t in args)  # on a CPU it refuses tensors that could have a gradient
        with warnings.catch_warnings():  # it warns of being slow uncompiled; here it is only a check
            warnings.simplefilter("ignore", UserWarning)
            return run(*args, **options)

    return quiet


def _dense_bias(bias: Tensor, like: Tensor, mask: Mask, n_keys: int | None = None) -> Tensor:
    """bias -> [H, Tq, Tk] or as it is.  like: [B, H, Tq, ...]."""
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
        raise ConfigError(f"sink has the shape {list(sink.shape)}", expected=f"[{heads}]: a logit a head")

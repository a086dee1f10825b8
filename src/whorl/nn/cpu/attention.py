"""Causal attention in C++ for bf16 and fp32 (`causal_attention.cpp`), with gradients.

`causal_attention` takes queries, keys and values. `rotary_attention` takes projections, and also does what a layer does
between the two: smear, QK-norm, temperature and rotation, which took longer as compiled kernels than the scores do.

torch multiplies the small matrices of attention at a third of its speed for large ones, and copies operands that are not
contiguous. This kernel leaves out masked blocks, keeps the scores in cache, and stores one number per query for the
backward instead of all probabilities. The scores and the softmax are fp32; in bf16, probabilities are rounded before they
are multiplied.

`nn/attention/causal.py` times it for one shape, before a step is compiled. Under torch's deterministic algorithms it is
never used.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from whorl.nn.cpu.library import choice_table, is_supported, product_library

MAX_HEAD_DIM = 256

_chosen: dict[tuple[torch.dtype, tuple[int, ...]], bool] = (
    choice_table()
)  # type and [B, H, T, d] -> whether it was the fastest


def library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return the compiled kernel, or None, as `product_library`."""
    return product_library("causal_attention", dtype)


def supports(head_dim: int, dtype: torch.dtype) -> bool:
    """Return whether the kernel runs here with heads of this width."""
    return head_dim % 32 == 0 and head_dim <= MAX_HEAD_DIM and library(dtype) is not None


def select(shape: tuple[int, int, int, int], dtype: torch.dtype, use: bool) -> None:
    """Set whether attention of this shape [B, H, T, d] and type runs here."""
    _chosen[dtype, shape] = use


def is_chosen(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether this attention should run here. q, k, v: [B, H, T, d]."""
    return q.shape == k.shape == v.shape and _is_chosen(q, tuple(q.shape))


def _is_chosen(x: Tensor, shape: tuple[int, ...]) -> bool:
    return is_supported(x) and _chosen.get((x.dtype, shape), False)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None = None) -> Tensor:
    """Return softmax(q k^T) v over keys that are not after the query, [B, H, T, d]; q is already scaled.

    segments: [B, T], the document of each position, each document in one piece; None where a row is one document.

    Raises:
        MemoryError: there is no memory for the scores of one head.
    """
    out: Tensor = attention_forward(q, k, v, None if segments is None else document_starts(segments))[0]
    return out


def document_starts(segments: Tensor) -> Tensor:
    """Return the first position of each position's document, [B, T] int32."""
    at = torch.arange(segments.shape[1], dtype=torch.int32, device=segments.device).expand_as(segments)
    begins = torch.nn.functional.pad(segments[:, 1:] != segments[:, :-1], (1, 0))
    return torch.where(begins, at, 0).cummax(dim=1).values


@torch.library.custom_op("whorl::causal_attention", mutates_args=())
def attention_forward(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return attention [B, H, T, d] and the log of each row's sum, [B, H, T] fp32. starts: of `document_starts`."""
    out, log_sum = _like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    _call("whorl_attention", (q, k, v, out), log_sum, starts)
    return out, log_sum


@torch.library.custom_op("whorl::causal_attention_backward", mutates_args=())
def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, out: Tensor, log_sum: Tensor, d_out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, [B, H, T, d] each."""
    d_q, d_k, d_v = _like(q), _like(k), _like(v)
    _call("whorl_attention_backward", (q, k, v, out, d_out, d_q, d_k, d_v), log_sum, starts)
    return d_q, d_k, d_v


@attention_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    return _like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@attention_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, out: Tensor, log_sum: Tensor, d_out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q), _like(k), _like(v)


def _save(ctx: Any, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, d_out: Tensor, _d_log_sum: Tensor) -> tuple[Tensor | None, ...]:
    return *attention_backward(*ctx.saved_tensors, d_out), None


attention_forward.register_autograd(_backward, setup_context=_save)


def rotary_attention(
    qkv: Tensor, temperature: Tensor, share: Tensor, tables: tuple[Tensor, Tensor], segments: Tensor | None, eps: float
) -> Tensor | None:  # fmt: skip
    """Return causal attention of projected queries, keys and values, [B, H, T, d]; None if it was not chosen.

    Args:
        qkv: [B, T, 3 H, d]: the heads of queries, keys and values, not normed.
        temperature: [H, 1], factor of normed queries. share: of the predecessor in a key, one logit per head.
        tables: rotary tables of all features, in halves, [(B,) T, 1, d] each.
        segments: [B, T], as in `causal_attention`. eps: of the norms.

    Raises:
        MemoryError: as `causal_attention`.
    """
    batch, length, heads, d = qkv.shape
    if tables[0].dtype != qkv.dtype or not _is_chosen(qkv, (batch, heads // 3, length, d)):
        return None
    share = torch.sigmoid(share).flatten()
    starts = None if segments is None else document_starts(segments)
    out: Tensor = rotary_forward(qkv, temperature.flatten(), share, *tables, starts, eps)[0]
    return out.transpose(1, 2)


@torch.library.custom_op("whorl::rotary_attention", mutates_args=())
def rotary_forward(
    qkv: Tensor,
    temperature: Tensor,
    share: Tensor,
    cos: Tensor,
    sin: Tensor,
    starts: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return attention [B, T, H, d] and the log of each row's sum, [B, H, T] fp32.

    qkv: [B, T, 3 H, d]. temperature: [H] fp32, factor of normed queries; share: [H] fp32, part of its predecessor in a key.
    cos, sin: [(B,) T, 1, d]. starts: of `document_starts`. eps: of the norms.
    """
    out, log_sum = _rotary_outputs(qkv)
    matrices = (*_heads(qkv), out.transpose(1, 2))
    _call("whorl_attention", matrices, log_sum, starts, (temperature, share, cos, sin), eps)
    return out, log_sum


@torch.library.custom_op("whorl::rotary_attention_backward", mutates_args=())
def rotary_backward(
    qkv: Tensor,
    temperature: Tensor,
    share: Tensor,
    cos: Tensor,
    sin: Tensor,
    starts: Tensor | None,
    eps: float,
    out: Tensor,
    log_sum: Tensor,
    d_out: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of qkv, and of temperature and share by row, [2, B, H] fp32."""
    d_qkv, scalars = torch.empty_like(qkv), _scalars(log_sum)
    matrices = (*_heads(qkv), out.transpose(1, 2), d_out.transpose(1, 2), *_heads(d_qkv))
    prologue = temperature, share, cos, sin
    _call("whorl_attention_backward", matrices, log_sum, starts, prologue, eps, scalars)
    return d_qkv, scalars


@rotary_forward.register_fake
def _(
    qkv: Tensor,
    temperature: Tensor,
    share: Tensor,
    cos: Tensor,
    sin: Tensor,
    starts: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    return _rotary_outputs(qkv)


@rotary_backward.register_fake
def _(
    qkv: Tensor,
    temperature: Tensor,
    share: Tensor,
    cos: Tensor,
    sin: Tensor,
    starts: Tensor | None,
    eps: float,
    out: Tensor,
    log_sum: Tensor,
    d_out: Tensor,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(qkv), _scalars(log_sum)


def _save_rotary(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _rotary_backward(ctx: Any, d_out: Tensor, _d_log_sum: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, out, log_sum = ctx.saved_tensors
    d_qkv, scalars = rotary_backward(*inputs, ctx.eps, out, log_sum, d_out)
    return d_qkv, *scalars.sum(1), None, None, None, None


rotary_forward.register_autograd(_rotary_backward, setup_context=_save_rotary)


def _rotary_outputs(qkv: Tensor) -> tuple[Tensor, Tensor]:
    batch, length, heads, d = qkv.shape
    log_sum = qkv.new_empty(batch, heads // 3, length, dtype=torch.float32)
    return qkv.new_empty(batch, length, heads // 3, d), log_sum


def _scalars(log_sum: Tensor) -> Tensor:
    return log_sum.new_empty(2, *log_sum.shape[:2])


def _heads(qkv: Tensor) -> list[Tensor]:
    """Return queries, keys and values [B, H, T, d]."""
    return [t.transpose(1, 2) for t in qkv.chunk(3, dim=2)]


def _like(t: Tensor) -> Tensor:
    """Return an empty [B, H, T, d] in the layout [B, T, H, d], which projections have."""
    batch, heads, length, d = t.shape
    return t.new_empty(batch, length, heads, d).transpose(1, 2)


def _call(
    name: str,
    matrices: tuple[Tensor, ...],
    log_sum: Tensor,
    starts: Tensor | None,
    prologue: tuple[Tensor, ...] = (),
    eps: float = 0.0,
    scalars: Tensor | None = None,
) -> None:
    adjacent = [t if t.stride(3) == 1 else t.contiguous() for t in matrices]  # outputs always are
    numbers = [n for t in adjacent for n in (t.data_ptr(), *t.stride()[:3])]
    sizes, first = matrices[0].shape, None if starts is None else starts.contiguous()
    before = [t.contiguous() for t in prologue]
    stride = before[2].stride(0) if before and before[2].dim() == 4 else 0  # of tables by row
    function = getattr(library(matrices[0].dtype), name)
    failed = function(
        (ctypes.c_int64 * len(numbers))(*numbers),
        ctypes.c_void_p(log_sum.data_ptr()),
        None if first is None else ctypes.c_void_p(first.data_ptr()),
        (ctypes.c_int64 * 4)(*sizes),
        ctypes.c_int32(torch.get_num_threads()),
        (ctypes.c_int64 * 5)(*(t.data_ptr() for t in before), stride) if before else None,
        ctypes.c_float(eps),
        None if scalars is None else ctypes.c_void_p(scalars.data_ptr()),
    )
    if failed:
        raise MemoryError(f"attention of {sizes[2]} positions: no memory for the scores of one head")

"""Causal attention in C++ for bf16 on a CPU with AMX (`causal_attention.cpp`), with gradients.

torch multiplies the small matrices of attention at a third of its speed for large ones, and copies operands that are not
contiguous. This kernel leaves out masked blocks, keeps the scores in cache, and stores one number per query for the
backward instead of all probabilities. The scores and the softmax are fp32; probabilities are rounded to bf16 before
they are multiplied.

`nn/attention/causal.py` times it for one shape, before a step is compiled. Under torch's deterministic algorithms it is
never used.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from whorl.nn.native.library import tile_library

MAX_HEAD_DIM = 256

_chosen: dict[tuple[int, ...], bool] = {}  # [B, H, T, d] -> whether the kernel was the fastest


def library() -> ctypes.CDLL | None:
    """Return the compiled kernel, or None where it cannot be built or the CPU's tiles cannot be used."""
    return tile_library("causal_attention")


def supports(head_dim: int) -> bool:
    """Return whether the kernel runs here with heads of this width."""
    return head_dim % 32 == 0 and head_dim <= MAX_HEAD_DIM and library() is not None


def select(shape: tuple[int, int, int, int], use: bool) -> None:
    """Set whether attention of this shape [B, H, T, d] runs here."""
    _chosen[shape] = use


def is_chosen(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether this attention should run here. q, k, v: [B, H, T, d]."""
    return (
        q.dtype == torch.bfloat16
        and q.device.type == "cpu"
        and q.shape == k.shape == v.shape
        and _chosen.get(tuple(q.shape), False)
    )


def causal_attention(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None = None) -> Tensor:
    """Return softmax(q k^T) v over keys that are not after the query, [B, H, T, d] in bf16; q is already scaled.

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


def _like(t: Tensor) -> Tensor:
    """Return an empty [B, H, T, d] in the layout [B, T, H, d], which projections have."""
    batch, heads, length, d = t.shape
    return t.new_empty(batch, length, heads, d).transpose(1, 2)


def _call(name: str, matrices: tuple[Tensor, ...], log_sum: Tensor, starts: Tensor | None) -> None:
    adjacent = [t if t.stride(3) == 1 else t.contiguous() for t in matrices]  # outputs always are
    numbers = [n for t in adjacent for n in (t.data_ptr(), *t.stride()[:3])]
    sizes, first = matrices[0].shape, None if starts is None else starts.contiguous()
    function = getattr(library(), name)
    failed = function(
        (ctypes.c_int64 * len(numbers))(*numbers),
        ctypes.c_void_p(log_sum.data_ptr()),
        None if first is None else ctypes.c_void_p(first.data_ptr()),
        (ctypes.c_int64 * 4)(*sizes),
        ctypes.c_int32(torch.get_num_threads()),
    )
    if failed:
        raise MemoryError(f"attention of {sizes[2]} positions: no memory for the scores of one head")

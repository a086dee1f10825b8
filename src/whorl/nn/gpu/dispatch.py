"""The functions that layers and objectives call on a GPU, one per operation: the kernel if selected, else torch.

Each takes the reference as an argument, so that no operation is defined twice. Kernel files are imported inside the
functions, because importing Triton takes a second and CPUs never need it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whorl.nn.cpu import cross_entropy as native
from whorl.nn.gpu.autotune import forward_and_backward, next_power_of_2, use_kernel

if TYPE_CHECKING:
    from whorl.nn.attention.mask import Mask

LogitsStep = Callable[[Tensor, Tensor, Tensor, float, float | None], tuple[Tensor, Tensor, Tensor]]


def rms_norm(
    x: Tensor, gain: Tensor | None, eps: float, reference: Callable[[Tensor, Tensor | None, float], Tensor]
) -> Tensor:
    """Return `nn.norm.rms_norm` of x on a GPU; `reference` is the torch version."""
    from whorl.nn.gpu import rms_norm as kernel

    if kernel.supports(x, gain):
        kind = ("rms_norm", x.shape[-1], None if gain is None else gain.shape, next_power_of_2(x.numel()))
        kernel_fn = forward_and_backward(lambda x, gain: kernel.rms_norm(x, gain, eps), x, gain)
        reference_fn = forward_and_backward(lambda x, gain: reference(x, gain, eps), x, gain)
        if use_kernel(kind, x, kernel_fn, reference_fn):
            return kernel.rms_norm(x, gain, eps)
    return reference(x, gain, eps)


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, layout: str, reference: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """Return `apply_rotary` of x on a GPU; `reference` is the torch version in this layout."""
    from whorl.nn.gpu import rotary as kernel

    if kernel.supports(x, cos, sin):
        kind = ("rotary", x.shape[-1], cos.shape[-1], layout, next_power_of_2(x.numel()))
        kernel_fn = forward_and_backward(lambda x: kernel.rotary(x, cos, sin, layout), x)
        if use_kernel(kind, x, kernel_fn, forward_and_backward(lambda x: reference(x, cos, sin), x)):
            return kernel.rotary(x, cos, sin, layout)
    return reference(x, cos, sin)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float,
    reference: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Return attention on a GPU; `reference` is torch's, which also serves single queries (decoding)."""
    from whorl.nn.gpu import attention as kernel

    if q.shape[2] > 1 and kernel.supports(q, k, v, mask):
        sizes = (
            *(t.shape[1] for t in (q, k)),
            *(next_power_of_2(t.shape[2]) for t in (q, k)),
            q.shape[3],
            v.shape[3],
        )
        parts = (mask.causal, mask.window, mask.key_segments is not None, mask.key_allowed is not None)
        kernel_fn = forward_and_backward(lambda q, k, v: kernel.attention(q, k, v, mask, scale), q, k, v)
        if use_kernel(
            ("attention", next_power_of_2(q.shape[0]), *sizes, *parts),
            q,
            kernel_fn,
            forward_and_backward(reference, q, k, v),
        ):
            y: Tensor = kernel.attention(q, k, v, mask, scale)
            return y
    return reference(q, k, v)


def logits_step(hidden: Tensor, head: Tensor, softcap: float | None, reference: LogitsStep) -> LogitsStep:
    """Return the function that computes loss and gradient of a chunk of logits in `next_token`.

    On a CPU, the C++ kernel if it was chosen before (`nn/cpu/cross_entropy.py`), else `reference`.

    Args:
        hidden: [N, d_model]; head: [vocab, d_model]: they have the device, type and width.
        softcap: as passed to `next_token`.
        reference: the torch version.
    """
    if not hidden.is_cuda:
        return native.logits_step if native.is_chosen(hidden, head.shape[0], softcap) else reference
    if torch.compiler.is_compiling():
        return reference
    from whorl.nn.gpu.cross_entropy import cross_entropy_

    rows, vocab = max(1, min(hidden.shape[0], 2048)), head.shape[0]

    def trial(step: LogitsStep) -> tuple[Tensor, ...]:
        # Not random: a measurement must not change the state of any generator.
        values = torch.arange(rows * vocab, device=hidden.device).remainder(97).sub(48).div(12)
        at = torch.arange(rows, device=hidden.device)
        logits = values.to(hidden.dtype).view(rows, vocab)
        return step(logits, at % vocab, (at % 7 > 0).float(), 1e-4, softcap)

    kind = ("cross_entropy", vocab, next_power_of_2(rows), softcap is None)
    kernel_fn, reference_fn = functools.partial(trial, cross_entropy_), functools.partial(trial, reference)
    return cross_entropy_ if use_kernel(kind, hidden, kernel_fn, reference_fn) else reference

"""Cross-entropy of a chunk of logits: the loss, and the logits' gradient written over the logits.

For a row of logits a [V], softcap c (z = c tanh(a / c), or z = a without one), target t and weight w (1, or 0 where
no target exists), with L = log sum_j exp(z_j):

    nll   = w (L - z_t)
    total = nll + w zeta L^2                                                  (z-loss: arXiv:2204.02311, section 5)
    dz_j  = w (p_j (1 + 2 zeta L) - [j = t]),     p_j = exp(z_j - L)
    da_j  = dz_j (1 - (z_j / c)^2)

The row is read twice and written once: the first pass computes L online (`softmax.py`), the second the gradient.
Tensor operations take about ten passes over [tokens, V] (docs/kernels.md). Chunks of tokens with the gradient in the
forward pass are from Liger Kernel (Hsu et al. 2024, arXiv:2410.10989, section 3.2); `objectives/next_token.py` loops
over the chunks and is the reference.

The subtle part is overwriting the input. Threads are not synchronized: one may store the gradient of logit t while
another still needs z_t. So z_t is picked from its block in the first pass, whose sums synchronize all threads. In the
second pass each thread stores only where it has loaded.

A target outside 0 .. V - 1 gives a loss of NaN, which is visible, unlike a wrong number.

Shapes: logits [N, V], any type, rows contiguous; targets [N]; keep [N] -> totals, nlls [N] fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whorl.errors import ConfigError
from whorl.nn.gpu.autotune import next_power_of_2
from whorl.nn.gpu.triton_support import jit, on_device, require_triton, tl

MAX_BLOCK = 8192  # columns per block


@jit
def _capped(a, cap, CAPPED: tl.constexpr):
    """cap * tanh(a / cap), by tanh(x) = 2 sigmoid(2 x) - 1, which cannot overflow and needs no library."""
    if CAPPED:
        a = cap * (2.0 * tl.sigmoid(2.0 * a / cap) - 1.0)
    return a


@jit
def _loss_and_gradient(
    logits, targets, keep, totals, nlls, width, stride, zeta, cap,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    row = logits + n.to(tl.int64) * stride
    target = tl.load(targets + n)
    weight = tl.load(keep + n).to(tl.float32)
    largest = float("-inf")
    total = 0.0
    picked = 0.0
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a = tl.load(row + at, mask=at < width, other=0.0).to(tl.float32)
        z = tl.where(at < width, _capped(a, cap, CAPPED), float("-inf"))
        picked += tl.sum(tl.where(at == target, z, 0.0), axis=0)
        new = tl.maximum(largest, tl.max(z, axis=0))
        offset = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(largest - offset) + tl.sum(tl.exp(z - offset), axis=0)
        largest = new
    log_normaliser = largest + tl.log(total)
    nll = tl.where((target >= 0) & (target < width), log_normaliser - picked, float("nan"))
    # A row without a target counts as 0, even if it holds NaN: 0 * NaN would not be 0.
    tl.store(nlls + n, tl.where(weight == 0.0, 0.0, weight * nll))
    with_z = nll + zeta * log_normaliser * log_normaliser
    tl.store(totals + n, tl.where(weight == 0.0, 0.0, weight * with_z))
    spread = 1.0 + 2.0 * zeta * log_normaliser
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a = tl.load(row + at, mask=at < width, other=0.0).to(tl.float32)
        z = _capped(a, cap, CAPPED)
        d = (tl.exp(z - log_normaliser) * spread - tl.where(at == target, 1.0, 0.0)) * weight
        if CAPPED:
            d = d * (1.0 - (z / cap) * (z / cap))
        tl.store(row + at, tl.where(weight == 0.0, 0.0, d), mask=at < width)


def cross_entropy_(
    logits: Tensor,
    targets: Tensor,
    keep: Tensor,
    z_loss: float = 0.0,
    softcap: float | None = None,
    max_block: int = MAX_BLOCK,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (total, nll, logits): the sums over the rows, [] fp32, and `logits` [N, V], now the gradient of `total`.

    No autograd: the caller computes the products on both sides (`objectives/next_token.py`).

    Args:
        targets: [N] ids; keep: [N] weights, 0 where no target exists.
        z_loss, softcap: zeta and c above.
        max_block: columns per block, a power of 2.

    Raises:
        ConfigError: shapes that do not fit, no Triton, or no GPU.
    """
    require_triton(logits)
    if logits.dim() != 2 or logits.stride(1) != 1 or not logits.shape[:1] == targets.shape == keep.shape:
        raise ConfigError(
            f"logits {list(logits.shape)}, targets {list(targets.shape)}, keep {list(keep.shape)}",
            expected="[N, V] with contiguous rows, [N] and [N]",
        )
    n, width = logits.shape
    totals, nlls = torch.zeros(2, n, device=logits.device)
    if n:
        block = min(max_block, next_power_of_2(width))
        with on_device(logits):
            _loss_and_gradient[(n,)](
                logits, targets.contiguous(), keep.contiguous(), totals, nlls, width, logits.stride(0),
                z_loss, 1.0 if softcap is None else softcap, CAPPED=softcap is not None, BLOCK=block,
                num_warps=8 if block >= 2048 else 4,
            )  # fmt: skip
    return totals.sum(), nlls.sum(), logits

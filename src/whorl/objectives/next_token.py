"""Next-token prediction: cross-entropy of each token given the tokens before it, summed over a batch.

    total = sum over t with mask[t] of  lse(z_t) - z_t[target_t]  +  z_loss * lse(z_t)^2,    z_t = W h_t

In nats (Shannon 1951). The z-loss keeps the normalizer near 1 (PaLM, Chowdhery et al. 2022, arXiv:2204.02311, section
5). The loss is a sum with a count. A caller that accumulates over micro-batches and ranks divides once by the global
count, so the split of a batch never changes the step.

The fused path never holds all logits: [tokens, vocab] in fp32 is the largest tensor of a small model. It processes
chunks of tokens and computes the gradient of a chunk while its logits are in cache:

    dz = softmax(z) - onehot,   d_h = dz W,   d_W += dz^T h;    with a softcap z = c tanh(W h / c), dz *= 1 - z^2 / c^2

The backward pass only scales these gradients (Liger Kernel, Hsu et al. 2024, arXiv:2410.10989, section 3.2). The step
between the two matrix products is `logits_step`; on a GPU the caller may select another one (`nn/gpu/dispatch.py`).
`next_token_reference` is the definition. A test compares values and gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK_LOGITS = 1 << 20  # logits held at a time: 4 MB in fp32, about the size of a cache
GPU_CHUNK_LOGITS = (
    1 << 27
)  # 256 MB in bf16: each further chunk reads and writes the gradient of the head again
MIN_CHUNK_TOKENS = 128  # tokens; smaller chunks make inefficient matrix products

# (logits [n, V], targets [n], keep [n], z_loss, softcap) -> (total [], nll [], gradient of total [n, V]).
# The gradient has the dtype of the logits and may overwrite the logits.
LogitsStep = Callable[[Tensor, Tensor, Tensor, float, float | None], tuple[Tensor, Tensor, Tensor]]
WeightGradient = Callable[
    [Tensor, Tensor], Tensor
]  # (gradient of logits [n, V], hidden [n, d]) -> [V, d] fp32
# (hidden, head, softcap, the default step) -> the step to use
LogitsStepSelector = Callable[[Tensor, Tensor, float | None, LogitsStep], LogitsStep]


@dataclass(frozen=True)
class Loss:
    """Result of an objective: `total` is differentiable and summed, `count` is its divisor."""

    total: Tensor
    count: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


def next_token_reference(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    mask: Tensor,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Loss:
    """Return the loss by its definition, with all logits in fp32. Shapes as in `next_token`."""
    logits = F.linear(hidden.float(), head.float())  # [N, V]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_normalizer = logits.logsumexp(dim=-1)
    nll = log_normalizer - logits.gather(-1, targets[:, None]).squeeze(-1)
    per_token = nll + z_loss * log_normalizer.square()
    weight = mask.float()
    return Loss((per_token * weight).sum(), weight.sum(), {"nll": (nll * weight).sum().detach()})


def next_token_of_logits(logits: Tensor, targets: Tensor, mask: Tensor) -> Loss:
    """Return next-token prediction of logits [..., V]: the form of a user's objective (`train/lm/token_objective.py`).

    targets: [...] ids. mask: [...], True where there is a target.
    """
    nll = F.cross_entropy(logits[mask].float(), targets[mask], reduction="sum")
    return Loss(nll, mask.sum().float(), {"nll": nll.detach()})


def logits_step(
    logits: Tensor, targets: Tensor, keep: Tensor, z_loss: float = 0.0, softcap: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a `LogitsStep` with tensor operations, in fp32."""
    raw, logits = logits, logits.float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_normalizer = logits.logsumexp(dim=-1, keepdim=True)
    nll = (log_normalizer - logits.gather(-1, targets[:, None])) * keep[:, None]
    total = (nll + z_loss * log_normalizer.square() * keep[:, None]).sum()
    p = (logits - log_normalizer).exp()
    onehot = torch.arange(logits.shape[-1], device=logits.device)[None, :] == targets[:, None]
    # Gradient of sum(nll + z_loss lse^2) of a chunk: p (1 + 2 z_loss lse) - onehot, where there is a target.
    d_logits = (p * (1.0 + 2.0 * z_loss * log_normalizer) - onehot.float()) * keep[:, None]
    if softcap is not None:
        d_logits = d_logits * (1.0 - (logits / softcap).square())
    return total, nll.sum(), d_logits.to(raw.dtype)


def plain_weight_gradient(d_logits: Tensor, hidden: Tensor) -> Tensor:
    """Compute a `WeightGradient` by torch's product in the type of the operands."""
    return (d_logits.t() @ hidden).float()


class _Fused(torch.autograd.Function):
    """Compute (total, nll) and the gradients in one forward pass; see the top of this file."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        mask: Tensor,
        z_loss: float,
        softcap: float | None,
        step: LogitsStep,
        chunk: int,
        weight_gradient: WeightGradient,
    ) -> tuple[Tensor, Tensor]:
        weight = head.to(hidden.dtype)
        totals, nlls, d_hidden = [], [], []
        d_head = None
        parts = zip(*(torch.split(t, chunk) for t in (hidden, targets, mask)), strict=True)
        for h, target, keep in parts:
            total, nll, d_logits = step(F.linear(h, weight), target, keep, z_loss, softcap)
            totals.append(total)
            nlls.append(nll)
            d_hidden.append(d_logits @ weight)
            part = weight_gradient(d_logits, h)
            d_head = part if d_head is None else d_head + part
        ctx.save_for_backward(torch.cat(d_hidden), d_head)
        total, nll = torch.stack(totals).sum(), torch.stack(nlls).sum()
        ctx.mark_non_differentiable(nll)
        return total, nll

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scale = gradients[0]
        d_hidden, d_head = ctx.saved_tensors
        return d_hidden * scale.to(d_hidden.dtype), d_head * scale, *[None] * 7


def default_chunk_tokens(vocabulary: int, device: str = "cpu") -> int:
    """Return the tokens whose logits are held at a time, if nothing else was measured. device: its type."""
    logits = CHUNK_LOGITS if device == "cpu" else GPU_CHUNK_LOGITS
    return max(MIN_CHUNK_TOKENS, logits // vocabulary)


def next_token(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    mask: Tensor,
    z_loss: float = 0.0,
    softcap: float | None = None,
    select_step: LogitsStepSelector | None = None,
    chunk_tokens: int | None = None,
    weight_gradient: WeightGradient | None = None,
) -> Loss:
    """Return the summed cross-entropy of the next tokens, in nats.

    Args:
        hidden: [N, d_model], output of the network, in its compute dtype.
        head: [vocab, d_model], fp32.
        targets: [N] ids. mask: [N], True where there is a target (made together with the tokens).
        z_loss: weight of the squared log-normalizer.
        softcap: c, for a model whose logits are c tanh(W h / c) (Gemma 2, arXiv:2408.00118, section 2).
        select_step: returns another `LogitsStep` if there is a faster one for the device.
        chunk_tokens: whose logits are held at a time; None: `default_chunk_tokens`.
        weight_gradient: another way to compute the head's gradient of a chunk.

    Returns:
        Loss: `total` [] fp32, `count` [] = number of targets, metrics `nll` (total without the z-loss).
    """
    keep = mask.float()
    step = logits_step if select_step is None else select_step(hidden, head, softcap, logits_step)
    chunk = chunk_tokens or default_chunk_tokens(head.shape[0], head.device.type)
    product = weight_gradient or plain_weight_gradient
    total, nll = _Fused.apply(hidden, head, targets, keep, z_loss, softcap, step, chunk, product)  # type: ignore[no-untyped-call]
    return Loss(total, keep.sum(), {"nll": nll})
